"""Znodes in memory, for tests of the ZooKeeper engine."""

from collections.abc import Callable
from types import SimpleNamespace

from kmqpy.errors import MessageError
from kmqpy.storages.engine import QueueRow
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.zookeeper.directory import Directory
from kmqpy.storages.zookeeper.draft import Now
from kmqpy.storages.zookeeper.engine import ZooKeeperEngine
from kmqpy.storages.zookeeper.znodes import Conflict, Lost
from kmqpy.testing import ManualClock


class Tree:
    """Znodes, as several processes see them."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.znodes: dict[str, tuple[bytes, int]] = {}
        self.next_id = 1
        self.asked = b""


class Multi(list):
    def set_data(self, path, data, version=-1):
        self.append(("set", path, data, version))

    def create(self, path, data):
        self.append(("create", path, data, -1))

    def delete(self, path):
        self.append(("delete", path, b"", -1))


class MemoryZnodes:
    """What the engine needs of Znodes; `lose` says which answers are lost: before, after, or never."""

    timeout_s = 10.0
    max_packet_bytes = 2**20
    commits = 0

    def prepare(self):
        return "storage"

    zk = SimpleNamespace(transaction=Multi)

    def __init__(self, tree: Tree, lose: Callable[[], str] = lambda: "never") -> None:
        self.tree = tree
        self.lose = lose

    def now(self):
        now_ms = self.tree.clock.wall_ms()
        return Now(now_ms, now_ms)

    def draw_ids(self, count, at_least):
        first = max(self.tree.next_id, at_least)
        self.tree.next_id = first + count
        return first

    def directory_path(self, generation):
        return f"/{generation}"

    def read_directory(self, generation, watch=None):
        return self.tree.znodes.get(f"/{generation}")

    def read(self, paths):
        return [self.tree.znodes.get(path, (None, 0))[0] for path in paths]

    def ask_for_turn(self, asked):
        self.tree.asked = asked

    def turn(self, watch):
        return self.tree.asked

    def children(self, paths):
        return [
            [one.removeprefix(f"{path}/") for one in self.tree.znodes if one.startswith(f"{path}/")]
            if path in self.tree.znodes
            else None
            for path in paths
        ]

    def send(self, multi, what):
        if sum(len(data) for _, _, data, _ in multi) > self.max_packet_bytes:
            raise MessageError(f"{what}: too large")
        self.commits += 1
        lost = self.lose()
        outcome = None if lost == "before" else self._apply(multi)

        def answer():
            if lost != "never":
                raise Lost
            if outcome is None:
                raise Conflict
            return outcome

        return answer

    def _apply(self, multi):
        after = dict(self.tree.znodes)
        for kind, path, data, version in multi:
            found = after.get(path)
            if (kind == "create") != (found is None) or (version >= 0 and found[1] != version):
                return None
            if kind == "delete":
                if any(one.startswith(f"{path}/") for one in after):
                    return None
                del after[path]
            else:
                after[path] = (data, 0 if found is None else found[1] + 1)
        self.tree.znodes = after
        return after[multi[0][1]][1]


def engine_over(znodes: MemoryZnodes) -> ZooKeeperEngine:
    return ZooKeeperEngine(znodes)


def queue_in(tree: Tree, **settings) -> QueueRow:
    queue = QueueRow("generation", StoredQueueSettings(name="q", **settings))
    tree.znodes["/generation"] = (Directory().to_bytes(), 0)
    return queue
