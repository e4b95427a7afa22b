"""A ZooKeeper in memory that counts its operations, as far as `tracker.leadership` needs it.

It answers each request at once, so a thousand trackers run in one thread on a simulated clock.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError, RolledBackError
from kazoo.protocol.states import KazooState, KeeperState

Watch = Callable[[Any], None]


@dataclass(frozen=True)
class Stat:
    czxid: int
    mzxid: int
    version: int
    ephemeralOwner: int  # noqa: N815


class Done:
    """The result of an asynchronous operation, which is known at once."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def get(self, timeout: float | None = None) -> Any:  # noqa: ARG002
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


class Server:
    """The znodes and the watches on them; `counts` has the number of operations of each kind."""

    def __init__(self) -> None:
        self.nodes: dict[str, tuple[bytes, Stat]] = {}
        self.children: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.lists: dict[str, list[str]] = {}  # the names of children, until they change
        self.owned: defaultdict[int, dict[str, None]] = defaultdict(dict)  # by session
        self.counts: Counter[str] = Counter()
        self.watches: defaultdict[str, dict[Watch, None]] = defaultdict(dict)
        self.child_watches: defaultdict[str, dict[Watch, None]] = defaultdict(dict)
        self._zxid = itertools.count(1)
        self._sessions = itertools.count(1)

    def client(self) -> "Client":
        return Client(self, next(self._sessions))

    def watch_count(self) -> int:
        return sum(map(len, self.watches.values())) + sum(map(len, self.child_watches.values()))

    def expire(self, session: int) -> None:
        """End a session, and delete its ephemeral znodes."""
        for path in list(self.owned.pop(session, ())):
            self.delete(path)

    def check(self, path: str, version: int) -> None:
        if path not in self.nodes:
            raise NoNodeError
        if version not in (-1, self.nodes[path][1].version):
            raise BadVersionError

    def create(self, path: str, data: bytes, session: int = 0) -> None:
        if path in self.nodes:
            raise NodeExistsError
        zxid = next(self._zxid)
        self.nodes[path] = (data, Stat(zxid, zxid, 0, session))
        if session:
            self.owned[session][path] = None
        parent, _, name = path.rpartition("/")
        self.children[parent][name] = None
        self.lists.pop(parent, None)
        self._fire(self.watches, path)
        self._fire(self.child_watches, parent)

    def set(self, path: str, data: bytes, version: int) -> Stat:
        self.check(path, version)
        stat = self.nodes[path][1]
        stat = replace(stat, mzxid=next(self._zxid), version=stat.version + 1)
        self.nodes[path] = (data, stat)
        self._fire(self.watches, path)
        return stat

    def delete(self, path: str) -> None:
        self.check(path, -1)
        session = self.nodes.pop(path)[1].ephemeralOwner
        self.owned.get(session, {}).pop(path, None)
        parent, _, name = path.rpartition("/")
        del self.children[parent][name]
        self.lists.pop(parent, None)
        self._fire(self.watches, path)
        self._fire(self.child_watches, parent)

    def names(self, path: str) -> list[str]:
        """The names of the children: the same list until the children change. Callers must not change it."""
        if path not in self.lists:
            self.lists[path] = list(self.children[path])
        return self.lists[path]

    def _fire(self, watches: dict[str, dict[Watch, None]], path: str) -> None:
        for watch in watches.pop(path, ()):
            self.counts["watch events"] += 1
            watch(SimpleNamespace(path=path))


class Client:
    """One session, with methods of a KazooClient."""

    def __init__(self, server: Server, session: int) -> None:
        self._server = server
        self.client_id = (session, b"")
        self.state = KazooState.CONNECTED
        self.client_state = KeeperState.CONNECTED
        self.hosts: list[tuple[str, int]] = []
        self.chroot = ""
        self.handler = SimpleNamespace(dispatch_callback=lambda callback: callback.func(*callback.args))
        self.granted_s = 6.0

    def add_listener(self, _listener: Any) -> None: ...

    def stop(self) -> None:
        self._server.expire(self.client_id[0])

    def close(self) -> None: ...

    def sync_async(self, path: str) -> Done:
        self._server.counts["syncs"] += 1
        return Done(path)

    def exists_async(self, path: str, watch: Watch | None = None) -> Done:
        return self._read(self._server.watches, path, watch, lambda: self._server.nodes[path][1], absent=True)

    def get_async(self, path: str, watch: Watch | None = None) -> Done:
        return self._read(self._server.watches, path, watch, lambda: self._server.nodes[path])

    def get_children_async(self, path: str, watch: Watch | None = None) -> Done:
        return self._read(self._server.child_watches, path, watch, lambda: self._server.names(path))

    def ensure_path_async(self, path: str) -> Done:
        parts = path.split("/")[1:]
        for depth in range(1, len(parts) + 1):
            above = "/" + "/".join(parts[:depth])
            if above not in self._server.nodes:
                self._server.create(above, b"")
        self._server.counts["reads"] += 1
        return Done(path)

    def create_async(
        self,
        path: str,
        data: bytes,
        *,
        ephemeral: bool = False,
        makepath: bool = False,  # noqa: ARG002
    ) -> Done:
        return self._write(
            lambda: self._server.create(path, data, self.client_id[0] if ephemeral else 0), path
        )

    def set_async(self, path: str, data: bytes, version: int = -1) -> Done:
        return self._write(lambda: self._server.set(path, data, version))

    def transaction(self) -> "Transaction":
        return Transaction(self._server, self.client_id[0])

    def _read(
        self, watches: Any, path: str, watch: Watch | None, value: Callable[[], Any], *, absent: bool = False
    ) -> Done:
        self._server.counts["reads"] += 1
        there = path in self._server.nodes
        if watch is not None and (there or absent):
            watches[path][watch] = None
        return Done(value() if there else NoNodeError())

    def _write(self, change: Callable[[], Any], value: Any = None) -> Done:
        self._server.counts["writes"] += 1
        try:
            stat = change()
        except (BadVersionError, NodeExistsError, NoNodeError) as error:
            return Done(error)
        return Done(value if stat is None else stat)


class Transaction:
    """Operations of which all are applied, or none."""

    def __init__(self, server: Server, session: int) -> None:
        self._server = server
        self._session = session
        self._steps: list[tuple[Callable[[], None], Callable[[], Any]]] = []

    def check(self, path: str, version: int) -> None:
        self._steps.append((lambda: self._server.check(path, version), lambda: True))

    def create(self, path: str, data: bytes, *, ephemeral: bool = False) -> None:
        def can() -> None:
            if path in self._server.nodes:
                raise NodeExistsError
            self._server.check(path.rpartition("/")[0], -1)

        session = self._session if ephemeral else 0
        self._steps.append((can, lambda: self._server.create(path, data, session) or path))

    def delete(self, path: str) -> None:
        self._steps.append((lambda: self._server.check(path, -1), lambda: self._server.delete(path) or True))

    def set_data(self, path: str, data: bytes, version: int = -1) -> None:
        self._steps.append(
            (lambda: self._server.check(path, version), lambda: self._server.set(path, data, version))
        )

    def commit_async(self) -> Done:
        self._server.counts["multis"] += 1
        self._server.counts["writes in multis"] += len(self._steps)
        for number, (can, _) in enumerate(self._steps):
            try:
                can()
            except (BadVersionError, NodeExistsError, NoNodeError) as error:
                return Done([error if n == number else RolledBackError() for n in range(len(self._steps))])
        return Done([do() for _, do in self._steps])
