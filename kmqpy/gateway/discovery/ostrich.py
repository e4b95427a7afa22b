"""Registers a gateway in ZooKeeper, where EmoDB's robust clients (Ostrich) look for end points.

Each end point is an ephemeral znode of a service's folder; clients read only its data. Source: Ostrich 1.9.3.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState

from kmqpy.errors import KmqError
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

_ROOT = "/ostrich"
_CHECK_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class EndPoint:
    """One service of this gateway, as clients find it.

    service      its name: `<cluster>-emodb-queue-1`, for example
    address      `host:port`
    service_url  with the path of the service
    admin_url    where /healthcheck is
    """

    service: str
    address: str
    service_url: str
    admin_url: str

    def data(self) -> bytes:
        """The data of its znode. The payload is text that holds JSON."""
        payload = {
            "serviceUrl": self.service_url,
            "adminUrl": self.admin_url,
            "extensions": {"proxy": False},
        }
        return json.dumps(
            {
                "name": self.service,
                "id": self.address,
                "registration-time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                "payload": json.dumps(payload, separators=(",", ":")),
            },
            separators=(",", ":"),
        ).encode()


def end_points(cluster: str, host: str, port: int, admin_port: int, scheme: str) -> list[EndPoint]:
    """The end points of a gateway for the services of EmoDB's queues."""
    base, admin_url = f"{scheme}://{host}:{port}", f"http://{host}:{admin_port}"
    prefix = f"{cluster}-" if cluster else ""
    return [
        EndPoint(f"{prefix}emodb-{kind}-1", f"{host}:{port}", f"{base}/{kind}/1", admin_url)
        for kind in ("queue", "dedupq")
    ]


class Registration:
    """Keeps end points registered until withdraw(), also after a lost session.

    A thread registers, and looks every few seconds whether the znodes are there: others can remove them.
    """

    def __init__(self, zookeeper: ZooKeeperConnection, points: Sequence[EndPoint]) -> None:
        self._settings = zookeeper
        self._points = points
        self._paths: dict[EndPoint, str] = {}
        self._changed = threading.Condition()
        self._session = 0
        self._withdrawn = False
        self._thread = threading.Thread(target=self._run, name="kmq-discovery", daemon=True)

    def start(self) -> None:
        """Begin; does not wait for ZooKeeper."""
        self._thread.start()

    @property
    def registered(self) -> bool:
        """True while all end points are registered, as far as we know."""
        with self._changed:
            return len(self._paths) == len(self._points)

    def withdraw(self) -> None:
        """Remove the end points, and return when they are gone, or ZooKeeper does not answer."""
        with self._changed:
            self._withdrawn = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._is_withdrawn():
            try:
                with connect(self._settings) as client:
                    client.add_listener(self._note_state)
                    self._keep(client)
            except (KmqError, KazooException) as error:
                _log.warning("not registered in ZooKeeper", extra={"error": str(error)})
            with self._changed:
                self._paths.clear()
                self._changed.wait_for(lambda: self._withdrawn, _CHECK_EVERY_S)

    def _keep(self, client: KazooClient) -> None:
        session = None
        while not self._is_withdrawn():
            with self._changed:
                if session != self._session:
                    session = self._session
                    self._paths.clear()
            for point in self._points:
                self._register(client, point)
            with self._changed:
                if not self._withdrawn and session == self._session:
                    self._changed.wait(_CHECK_EVERY_S)
        for path in self._paths.values():
            try:
                client.delete(path)
            except NoNodeError:
                continue

    def _register(self, client: KazooClient, point: EndPoint) -> None:
        path = self._paths.get(point)
        if path is not None and client.exists(path) is not None:
            return
        folder = f"{_ROOT}/{point.service}"
        client.ensure_path(folder)
        # As Curator names it. Each registration is a znode of a new name: clients ignore data that change.
        new = f"{folder}/_c_{uuid4()}-{point.address}"
        with contextlib.suppress(NodeExistsError):  # created by a request whose answer was lost
            client.create(new, point.data(), ephemeral=True)
        with self._changed:
            self._paths[point] = new
        _log.info("registered in ZooKeeper", extra={"service": point.service, "end_point": point.address})

    def _note_state(self, state: str) -> None:
        """Called by kazoo, in its thread; must not block."""
        if state == KazooState.LOST:
            with self._changed:
                self._session += 1
                self._paths.clear()
                self._changed.notify_all()

    def _is_withdrawn(self) -> bool:
        with self._changed:
            return self._withdrawn
