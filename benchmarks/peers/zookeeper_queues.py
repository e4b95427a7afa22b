"""Measures queues in one ZooKeeper: puts, and takes with acknowledgements, per second.

kmqpy storage     the queue behind kmqpy.queue.Queue, `zookeeper://`; one session puts, another one takes
unit of work      kmqpy.zookeeper.queue; a batch is one transaction
kmqpy curator     kmqpy.zookeeper.curator with lock_path; `takers` queues, or one with an executor of `takers`
curator           Curator 5.9.0 itself, with lockPath; as many queues, or an executor; see jvm_curator.py
locking queue     kazoo's LockingQueue, which takes one by one; each taker has a connection of its own

A batch is put by Curator's queues in the background and flushed (each item has a znode), and with `packed` by
put_multi (a batch is one znode). Curator's queues call their consumers with one item at a time, so a batch
differs for them only in how it is put.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from kazoo.client import KazooClient
from kazoo.recipe.queue import LockingQueue

from benchmarks.peers import storage_queues
from benchmarks.queue_load import BODY, Worker, measure, put_speed
from kmqpy.queue import storage_for
from kmqpy.zookeeper.curator import QueueBuilder
from kmqpy.zookeeper.curator.item_format import encode_items
from kmqpy.zookeeper.queue import Transaction, ZkQueue
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

SESSION_MS = 20_000
_IN_MULTI = 1_000
_WARM_UP = 300
_IN_WARM_UP = 20
_TAKE_AS_LONG = 4
"""Like queue_load.measure(): taking ends at the latest after this many times `seconds`."""


class UnitOfWork:
    """A taken batch is finished by the commit of its transaction."""

    def __init__(self, queue: ZkQueue) -> None:
        self._queue = queue
        self._transaction: Transaction | None = None

    def put(self, count: int) -> None:
        with self._queue.transaction() as transaction:
            for _ in range(count):
                transaction.put("speed", BODY)
            transaction.commit()

    def take(self, count: int) -> Sequence[Any]:
        self._transaction = self._queue.transaction()
        return self._transaction.try_take_many("speed", count)

    def finish(self, taken: Sequence[Any]) -> None:
        assert self._transaction is not None
        if taken:
            self._transaction.commit()
        self._transaction.rollback()

    def close(self) -> None:
        pass


class Locking:
    """kazoo's LockingQueue; its only method for batches is put_all()."""

    def __init__(self, hosts: str, path: str) -> None:
        self._zk = KazooClient(hosts=hosts, timeout=SESSION_MS / 1000)
        self._zk.start()
        self._queue = LockingQueue(self._zk, path)

    def put(self, count: int) -> None:
        self._queue.put_all([BODY] * count)

    def take(self, count: int) -> Sequence[Any]:  # noqa: ARG002 - it holds one at a time
        found = self._queue.get(timeout=1)
        return [] if found is None else [found]

    def finish(self, taken: Sequence[Any]) -> None:
        if taken:
            self._queue.consume()

    def close(self) -> None:
        self._zk.stop()
        self._zk.close()


class PushQueue(Protocol):
    """A queue that calls its consumer."""

    def put(self, count: int) -> None:
        """Put `count` items; all are stored when put() returns."""
        ...

    def consume(self, count: int, timeout: float) -> int:
        """Consume until `count` items came or the time is up; returns how many came."""
        ...

    def close(self) -> None:
        """Close the queue."""
        ...


class OurCurator:
    """kmqpy's queue on Curator's znodes."""

    def __init__(self, hosts: str, path: str, takers: int, *, executor: bool, packed: bool) -> None:
        self._stack = ExitStack()
        self._zk = self._stack.enter_context(connect(ZooKeeperConnection(hosts=hosts), SESSION_MS))
        self._path = path
        self._takers = 1 if executor else takers
        self._executor = ThreadPoolExecutor(takers) if executor else None
        self._packed = packed
        self._one = self._stack.enter_context(
            QueueBuilder(zk=self._zk, path=path, put_in_background=False).build_queue()
        )
        self._many = self._stack.enter_context(QueueBuilder(zk=self._zk, path=path).build_queue())

    def put(self, count: int) -> None:
        if count == 1:
            self._one.put(BODY)
        elif self._packed:
            self._one.put_multi([BODY] * count)
        else:
            for _ in range(count):
                self._many.put(BODY)
            if not self._many.flush_puts(60):
                raise TimeoutError("puts in the background did not end")

    def consume(self, count: int, timeout: float) -> int:
        came = 0
        lock, ended = threading.Lock(), threading.Event()

        def consumer(_item: bytes) -> None:
            nonlocal came
            with lock:
                came += 1
                if came >= count:
                    ended.set()

        builder = QueueBuilder(
            zk=self._zk,
            path=self._path,
            consumer=consumer,
            lock_path=f"{self._path}-locks",
            executor=self._executor,
        )
        with ExitStack() as queues:
            for _ in range(self._takers):
                queues.enter_context(builder.build_queue())
            ended.wait(timeout)
            return came  # read before the queues are closed: that lets consumers end

    def close(self) -> None:
        self._stack.close()
        if self._executor is not None:
            self._executor.shutdown()


class _Puts:
    """One thread's handle of a PushQueue, for its puts."""

    def __init__(self, queue: PushQueue) -> None:
        self._queue = queue

    def put(self, count: int) -> None:
        self._queue.put(count)

    def take(self, count: int) -> Sequence[Any]:
        raise NotImplementedError

    def finish(self, taken: Sequence[Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def speed(options: Mapping[str, Any]) -> dict[str, float]:
    """Measure one peer: `peer, hosts, path, depth, takers, batch, seconds`."""
    return PEERS[options["peer"]](options)


def warm_up(options: Mapping[str, Any]) -> dict[str, float]:
    """Let the server carry out requests of all kinds for a while: `hosts, seconds`."""

    def one(zk: KazooClient) -> int:
        multi = zk.transaction()
        for _ in range(_IN_WARM_UP):
            multi.create("/warm-up/item-", BODY, sequence=True)
        made = multi.commit()
        for path in made:
            zk.get(path)
        multi = zk.transaction()
        for path in made:
            multi.set_data(path, b"")
            multi.delete(path)
        multi.commit()
        zk.get_children("/warm-up")
        return len(made)

    done, until = 0, time.monotonic() + options["seconds"]
    with _client(options["hosts"]) as zk:
        zk.ensure_path("/warm-up")
        while time.monotonic() < until:
            done += one(zk)
    return {"znodes": done}


def leave() -> None:
    """End the JVM, whose threads would keep the process waiting."""
    import jpype

    if jpype.isJVMStarted():
        jpype.JClass("java.lang.Runtime").getRuntime().halt(0)


def _storage(options: Mapping[str, Any]) -> dict[str, float]:
    """Measure puts by one session, and takes by another one.

    A session takes messages that it has put itself from its memory. At depth 10,000 these would be nearly all
    that are taken in a turn, at depth 100,000 half of them.
    """
    url = f"zookeeper://{options['hosts']}/bench"
    with storage_for(url) as puts, storage_for(url) as takes:
        queue = storage_queues.filled(puts, options["depth"])
        takes_from = takes.open(queue.name)
        return _pulled(options, lambda: storage_queues.Ours(queue, takes_from))


def _unit_of_work(options: Mapping[str, Any]) -> dict[str, float]:
    with ZkQueue(ZooKeeperConnection(hosts=options["hosts"])) as queue:
        queue.init("speed")
        _fill(options, queue.paths("speed").new_item(), BODY)
        return _pulled(options, lambda: UnitOfWork(queue))


def _locking(options: Mapping[str, Any]) -> dict[str, float]:
    _fill(options, f"{options['path']}/entries/entry-100-", BODY)
    return _pulled(options, lambda: Locking(options["hosts"], options["path"]))


def _pulled(options: Mapping[str, Any], open_worker: Callable[[], Worker]) -> dict[str, float]:
    return measure(open_worker, takers=options["takers"], batch=options["batch"], seconds=options["seconds"])


def _our_curator(executor: bool, packed: bool) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    def run(options: Mapping[str, Any]) -> dict[str, float]:
        return _pushed(
            options,
            OurCurator(
                options["hosts"], options["path"], options["takers"], executor=executor, packed=packed
            ),
        )

    return run


def _curator(executor: bool, packed: bool) -> Callable[[Mapping[str, Any]], dict[str, float]]:
    def run(options: Mapping[str, Any]) -> dict[str, float]:
        from benchmarks.peers.jvm_curator import Curator

        return _pushed(
            options,
            Curator(options["hosts"], options["path"], options["takers"], executor=executor, packed=packed),
        )

    return run


def _pushed(options: Mapping[str, Any], queue: PushQueue) -> dict[str, float]:
    """Measure a queue that calls its consumer, like queue_load.measure()."""
    try:
        _fill(options, f"{options['path']}/queue-", encode_items([BODY]))
        for _ in range(-(-_WARM_UP // options["batch"])):
            queue.put(options["batch"])
        queue.consume(_WARM_UP, 10)
        put, put_s = put_speed([_Puts(queue)] * options["takers"], options["batch"], options["seconds"])
        began = time.monotonic()
        taken = queue.consume(put, _TAKE_AS_LONG * options["seconds"])
        return {"put": put / put_s, "take": taken / (time.monotonic() - began)}
    finally:
        queue.close()


PEERS = {
    "kmqpy storage": _storage,
    "unit of work": _unit_of_work,
    "kmqpy curator": _our_curator(executor=False, packed=False),
    "kmqpy curator, executor": _our_curator(executor=True, packed=False),
    "kmqpy curator, packed": _our_curator(executor=False, packed=True),
    "curator": _curator(executor=False, packed=False),
    "curator, executor": _curator(executor=True, packed=False),
    "curator, packed": _curator(executor=False, packed=True),
    "locking queue": _locking,
}


def _fill(options: Mapping[str, Any], prefix: str, data: bytes) -> None:
    """Bring a queue to its depth: put what is missing, delete what the last turn has left."""
    parent = prefix.rpartition("/")[0]
    with _client(options["hosts"]) as zk:
        zk.ensure_path(parent)
        names = sorted(zk.get_children(parent))
        missing = options["depth"] - len(names)
        requests = []
        for first in range(0, missing, _IN_MULTI):
            multi = zk.transaction()
            for _ in range(min(_IN_MULTI, missing - first)):
                multi.create(prefix, data, sequence=True)
            requests.append(multi.commit_async())
        surplus = names[options["depth"] :]
        for first in range(0, len(surplus), _IN_MULTI):
            multi = zk.transaction()
            for name in surplus[first : first + _IN_MULTI]:
                multi.delete(f"{parent}/{name}")
            requests.append(multi.commit_async())
        for request in requests:
            failed = [result for result in request.get() if isinstance(result, Exception)]
            if failed:
                raise failed[0]


@contextmanager
def _client(hosts: str) -> Iterator[KazooClient]:
    zk = KazooClient(hosts=hosts, timeout=SESSION_MS / 1000)
    zk.start()
    try:
        yield zk
    finally:
        zk.stop()
        zk.close()
