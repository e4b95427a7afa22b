"""Runs threads that hand the items of a queue to a function, each item in a transaction of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Self

from kmqpy.core.backoff import Backoff
from kmqpy.core.closeable import Closeable
from kmqpy.core.settings import check_limit
from kmqpy.errors import Closed, ConfigError, KmqError, shown
from kmqpy.zookeeper.queue.queue import ZkQueue
from kmqpy.zookeeper.queue.takes import Item
from kmqpy.zookeeper.queue.transaction import Transaction
from kmqpy.zookeeper.session import has_ended

log = logging.getLogger(__name__)
_LOOK_AGAIN_AFTER_S = 1.0
"""A worker without items looks again after this many seconds: the end of a back-off changes no znode."""


class MessageConsumer:
    """The transaction in which a listener's function processes one item."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    def put_on_commit(self, target: str, body: bytes | str, *, priority: int = 0) -> None:
        """Put an item to a queue in the commit that removes the item being processed.

        Args:
            target: The name of the queue.
            body: As for Transaction.put().
            priority: As for Transaction.put().
        """
        self._transaction.put(target, body, priority=priority)


class Listener(Closeable):
    """Calls `listener(consumer, item)` for each item of queue `source`, in `workers` threads.

    When the function returns, one commit removes the item and stores the items that the function put on
    commit. After an exception of the function, or trouble with ZooKeeper, the worker rolls back, and the item
    is handed out again as the policy says.

    Args:
        queue: Where it takes items.
        source: The name of the queue.
        listener: Called with a MessageConsumer and the Item.
        workers: How many threads.
        backoff: The pause of a worker after a failure.
        start: False: nothing is taken before start() is called.

    Raises:
        ConfigError: For arguments that are wrong.
    """

    def __init__(
        self,
        queue: ZkQueue,
        source: str,
        listener: Callable[[MessageConsumer, Item], None],
        *,
        workers: int = 1,
        backoff: Backoff | None = None,
        start: bool = True,
    ) -> None:
        if not isinstance(queue, ZkQueue):
            raise ConfigError(f"queue: {shown(queue)} is not a ZkQueue")
        if not isinstance(source, str):
            name = shown(source)
            raise ConfigError(f"source: {name} is not the name of a queue; make a Listener for each queue")
        queue.paths(source)
        if not callable(listener):
            raise ConfigError(f"listener: {shown(listener)} can't be called")
        check_limit(workers, "workers")
        if backoff is not None and not isinstance(backoff, Backoff):
            given = shown(backoff)
            raise ConfigError(f"backoff: {given} is not a Backoff; give one like Backoff(0.1, maximum=5)")
        self._queue = queue
        self._source = source
        self._listener = listener
        self._backoff = backoff or Backoff(0.1, maximum=5)
        self._stopped = threading.Event()
        names = [f"zk-listener-{source}-{n}" for n in range(workers)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        self._started = False
        self._mutex = threading.Lock()
        if start:
            self.start()

    def start(self) -> None:
        """Begin to take items; does nothing if they are taken already. Raises Closed after close()."""
        with self._mutex:
            if self._stopped.is_set():
                raise Closed("the listener is closed; make another one")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def close(self) -> None:
        """Stop each worker after its present item, and wait for that; the connection stays open."""
        with self._mutex:
            self._stopped.set()
        for thread in self._threads:
            if self._started and thread is not threading.current_thread():
                thread.join()

    def _work(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            try:
                if not self._process_one():
                    self._queue.wait_for_change(self._source, _LOOK_AGAIN_AFTER_S)
                failures = 0
            except Closed:
                if self._queue.session.closed:
                    return
            except Exception as error:
                if not isinstance(error, KmqError):
                    log.exception("listener of queue %s failed; the item is rolled back", self._source)
                elif has_ended(self._queue.session.zk):
                    return  # the process ends
                else:
                    log.warning("listener of queue %s: %s", self._source, error)
                failures += 1
                self._stopped.wait(self._backoff.delay(failures))

    def _process_one(self) -> bool:
        with self._queue.transaction() as transaction:
            item = transaction.try_take(self._source)
            if item is None:
                return False
            self._listener(MessageConsumer(transaction), item)
            transaction.commit()
            return True
