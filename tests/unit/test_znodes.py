"""The watched copy of znodes, over a ZooKeeper in memory."""

from collections.abc import Callable
from typing import Any

from kazoo.exceptions import NoNodeError

from tracker.leadership.znode_cache import ZnodeCache


class Result:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, timeout: float) -> Any:
        assert timeout > 0
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class Event:
    def __init__(self, path: str) -> None:
        self.path = path


class FakeZk:
    def __init__(self, **data: bytes) -> None:
        self.data = data
        self._watches: dict[str, Callable[[Any], None]] = {}

    def get_async(self, path: str, watch: Callable[[Any], None]) -> Result:
        if path not in self.data:
            return Result(NoNodeError())
        self._watches[path] = watch
        return Result((self.data[path], None))

    get_children_async = exists_async = None

    def delete(self, path: str) -> None:
        del self.data[path]
        self._watches.pop(path)(Event(path))


def test_clean_again_after_a_znode_has_gone_that_nobody_asks_for_any_more() -> None:
    zk = FakeZk(a=b"1", b=b"2")
    znodes = ZnodeCache(zk, lambda: None, 1.0)
    znodes.data(["a", "b"])
    assert znodes.clean
    zk.delete("b")
    assert not znodes.clean
    assert znodes.data(["a"]) == {"a": (b"1", None)}
    znodes.expire()  # as the leadership does from time to time
    assert znodes.data(["a"]) == {"a": (b"1", None)}
    assert znodes.clean


def test_a_value_is_not_seen_while_it_is_read_again() -> None:
    zk = FakeZk(a=b"old")
    znodes = ZnodeCache(zk, lambda: None, 1.0)
    znodes.data(["a"])
    assert znodes.seen("a") == (b"old", None)
    zk.delete("a")
    zk.data["a"] = b"new"
    read, seen_meanwhile = zk.get_async, []

    def slow_read(path: str, watch: Callable[[Any], None]) -> Result:
        seen_meanwhile.append(znodes.seen(path))  # as another thread would
        return read(path, watch)

    zk.get_async = slow_read  # type: ignore[method-assign]
    assert znodes.data(["a"]) == {"a": (b"new", None)}
    assert seen_meanwhile == [None]
