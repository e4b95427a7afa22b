"""Finds gateways in ZooKeeper, where `kmq gateway --discovery` registers them."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence

from kazoo.exceptions import KazooException, NoNodeError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

_SERVICE = "emodb-queue-1"
_PATH = "/queue/1"
_FRESH_S = 1.0


class Discovery:
    """The urls of the gateways that are registered now, in random order."""

    def __init__(self, zookeeper: ZooKeeperConnection, cluster: str, timeout_s: float) -> None:
        self._zookeeper = zookeeper
        self._folder = f"/ostrich/{cluster}-{_SERVICE}" if cluster else f"/ostrich/{_SERVICE}"
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._known: Sequence[str] = ()
        self._read_s = float("-inf")

    def __call__(self) -> Sequence[str]:
        """Read them, if nobody has within the last second; while ZooKeeper is away, they are those known.

        Raises Unavailable if none was ever there, AccessDenied.
        """
        with self._lock:
            if SYSTEM_CLOCK.monotonic() - self._read_s > _FRESH_S:
                try:
                    found = self._read()
                except (Unavailable, KazooException) as error:
                    if not self._known:
                        raise Unavailable(f"gateways: ZooKeeper does not tell them: {error}") from error
                    found = []
                self._known = found or self._known
                self._read_s = SYSTEM_CLOCK.monotonic()
            if not self._known:
                raise Unavailable(
                    f"gateways: none is registered in {self._folder} at {self._zookeeper.hosts}; "
                    "give `kmq gateway` the same --discovery and --cluster-name"
                )
            return self._known

    def _read(self) -> list[str]:
        found = []
        with connect(self._zookeeper, timeout=self._timeout_s) as zk:
            try:
                names = zk.get_children(self._folder)
            except NoNodeError:
                return []
            for name in names:
                try:
                    found.append(_url_in(zk.get(f"{self._folder}/{name}")[0]))
                except (NoNodeError, ValueError, KeyError, TypeError):  # gone, or no gateway's
                    continue
        random.shuffle(found)
        return found


def _url_in(data: bytes) -> str:
    """The url of a gateway, from what it has registered; raises ValueError, KeyError or TypeError."""
    url = json.loads(json.loads(data)["payload"])["serviceUrl"]
    if not (url.startswith(("http://", "https://")) and url.endswith(_PATH)):
        raise ValueError(url)
    return str(url.removesuffix(_PATH))
