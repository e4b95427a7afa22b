"""Keeps ephemeral znodes in ZooKeeper by which others find this gateway."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NodeExistsError, NoNodeError
from kazoo.protocol.states import KazooState
from kazoo.security import OPEN_ACL_UNSAFE

from kmqpy.core.closeable import Closeable
from kmqpy.errors import KmqError
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

_log = logging.getLogger(__name__)

CHECK_EVERY_S = 2.0
_CLOSE_S = 2.0
"""close() waits no longer, in seconds: the entries go with the session anyway, soon after the process."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One znode: the folder that it is in, the end of its name, and its data.

    shared  a folder above that others use, too: everybody may make folders in it
    """

    folder: str
    name: str
    data: bytes
    shared: str = ""


class Registration(Closeable):
    """Keeps entries registered until close(), even after a lost session.

    A thread registers, and looks every CHECK_EVERY_S whether the znodes are there: others can remove them. It
    calls `on_check` with the client each time.
    """

    def __init__(
        self,
        zookeeper: ZooKeeperConnection,
        entries: Sequence[Entry],
        on_check: Callable[[KazooClient], None] = lambda _: None,
    ) -> None:
        self._settings = zookeeper
        self._entries = entries
        self._on_check = on_check
        self._paths: dict[Entry, str] = {}
        self._changed = threading.Condition()
        self._session = 0
        self._client: KazooClient | None = None
        self._withdrawn = False
        self._thread = threading.Thread(target=self._run, name="kmq-discovery", daemon=True)
        self._thread.start()

    @property
    def registered(self) -> bool:
        """True while all entries are there, as far as we know; False without a connection."""
        with self._changed:
            is_connected = self._client is not None and self._client.connected
            return is_connected and len(self._paths) == len(self._entries)

    def close(self) -> None:
        """Remove the entries, and return when they are gone, or ZooKeeper does not answer in time."""
        with self._changed:
            self._withdrawn = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _log.warning("not withdrawn from ZooKeeper: it does not answer")

    def _run(self) -> None:
        while not self._is_withdrawn():
            try:
                with connect(self._settings) as client:
                    client.add_listener(self._note_state)
                    self._client = client
                    self._keep(client)
            except Exception as error:  # whatever it is, it may go, and clients must find us again
                is_expected = isinstance(error, (KmqError, KazooException))
                _log.warning(
                    "not registered in ZooKeeper", extra={"error": str(error)}, exc_info=not is_expected
                )
            with self._changed:
                self._paths.clear()
                self._changed.wait_for(lambda: self._withdrawn, CHECK_EVERY_S)

    def _keep(self, client: KazooClient) -> None:
        session = self._session
        while not self._is_withdrawn():
            with self._changed:
                if session != self._session:
                    session = self._session
                    self._paths.clear()
            for entry in self._entries:
                self._register(client, entry)
            self._on_check(client)
            with self._changed:
                if not self._withdrawn and session == self._session:
                    self._changed.wait(CHECK_EVERY_S)
        for path in list(self._paths.values()):
            with contextlib.suppress(NoNodeError):
                client.delete(path)

    def _register(self, client: KazooClient, entry: Entry) -> None:
        path = self._paths.get(entry)
        if path is not None and client.exists(path) is not None:
            return
        if entry.shared:
            client.ensure_path(entry.shared, OPEN_ACL_UNSAFE)
        client.ensure_path(entry.folder)
        # As Curator names it. Each registration has a new name: EmoDB's clients ignore data that change.
        new = f"{entry.folder}/_c_{uuid4()}-{entry.name}"
        with contextlib.suppress(NodeExistsError):  # created by a request whose answer was lost
            client.create(new, entry.data, ephemeral=True)
        with self._changed:
            self._paths[entry] = new
        _log.info("registered in ZooKeeper", extra={"folder": entry.folder, "entry": entry.name})

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
