"""Implements Curator's DistributedQueue: items in znodes `queue-…`; the first process to take one gets it."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from typing import Any, Generic, Self, TypeVar

from kazoo.client import KazooClient
from kazoo.exceptions import KazooException, NoAuthError, NodeExistsError, NoNodeError
from kazoo.handlers.threading import KazooTimeoutError

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.closeable import Closeable
from kmqpy.errors import Closed, ConfigError, DecodeError, MessageError, UnknownOutcome, shown
from kmqpy.zookeeper.containers import ensure_path
from kmqpy.zookeeper.curator.item_format import decode_items, encode_items
from kmqpy.zookeeper.curator.item_names import (
    BY_ID,
    DELAYED,
    PLAIN,
    PREFIX,
    ItemNames,
    cleaned_id,
    delay_prefix,
    id_of,
    id_prefix,
    priority_prefix,
)
from kmqpy.zookeeper.curator.options import ErrorMode, PutListener, QueueOptions
from kmqpy.zookeeper.packets import check_create
from kmqpy.zookeeper.session import LOST_ANSWER, address, failure, has_ended, unavailable
from kmqpy.zookeeper.watched_children import WatchedChildren

log = logging.getLogger(__name__)
T = TypeVar("T")

_LOOK_AGAIN_AFTER_S = 1.0
"""The consumer tries again after this many seconds, even without a watch event, if it left items (another
process had locked them, for example), if the queue was removed, or if consuming failed."""
_ERROR_PAUSE_S = 0.1
"""The pause, in seconds, after an error of ZooKeeper."""
_LONGEST_PAUSE_S = 3_600.0
"""The consumer waits at most this many seconds for an item to be due, then it lists the items again. An item
can be delayed for longer than threads can wait."""
_MAX_REPORTED_NAMES = 1_000
"""The most znodes of which a queue remembers that it has warned; then it forgets all, and may warn again."""


class DistributedQueue(Closeable, Generic[T]):
    """A queue that Java programs with Curator's DistributedQueue can share; made by QueueBuilder.

    With `lock_path`, the queue deletes an item after its consumer has returned: at least once. Without
    `lock_path`, it deletes an item before it calls the consumer: at most once, so an item is lost when its
    consumer fails or dies. `guarantee` says which. The queue leaves znodes of foreign names, and items that
    it can't decode, where they are, and warns.
    """

    def __init__(self, options: QueueOptions[T], names: ItemNames = PLAIN) -> None:
        self._options = options
        self._names = options.named(names)
        self._error_mode = options.error_mode
        self._put_listeners = options.put_listeners
        self._zk: KazooClient = options.zk
        self._path = options.path
        self._started = False
        self._closed = threading.Event()
        self._changed = threading.Event()
        self._children = WatchedChildren(self._zk, self._path, self._changed)
        self._counted_children = WatchedChildren(self._zk, self._path)
        self._last_count = 0
        self._reported: set[str] = set()
        self._outstanding = 0
        self._outstanding_changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lost_sessions = 0
        """The number of sessions lost since the start: a lock is ours while this number does not change."""

    @property
    def guarantee(self) -> str:
        """`at least once` with lock_path, `at most once` without."""
        return "at least once" if self._options.lock_path else "at most once"

    @property
    def last_message_count(self) -> int:
        """The number of znodes when the consumer last listed the queue: for information only."""
        return self._last_count

    def set_error_mode(self, mode: ErrorMode) -> None:
        """Change what becomes of items whose consumer fails from now on.

        Args:
            mode: What becomes of them.

        Raises:
            ConfigError: The queue has no lock_path, so failed items are deleted already.
        """
        if not isinstance(mode, ErrorMode):
            raise ConfigError(f"error_mode: {shown(mode)} is not an ErrorMode")
        if self._options.lock_path is None:
            raise ConfigError("error_mode: needs lock_path; without it, failed items are deleted already")
        self._error_mode = mode

    def add_put_listener(self, listener: PutListener) -> None:
        """Tell this listener, too, of the outcome of puts from now on.

        Args:
            listener: A PutListener.
        """
        with self._outstanding_changed:
            self._put_listeners = (*self._put_listeners, listener)

    def remove_put_listener(self, listener: PutListener) -> None:
        """Tell this listener no more; does nothing if it is not told.

        Args:
            listener: One that was added.
        """
        with self._outstanding_changed:
            self._put_listeners = tuple(one for one in self._put_listeners if one is not listener)

    def start(self) -> None:
        """Create missing znodes and start to consume.

        Raises:
            ConfigError: start() was called before.
            Unavailable: The storage does not answer.
        """
        if self._started:
            raise ConfigError("start: this queue was started before; build another one")
        self._started = True
        if self._options.max_items is not None and self._options.puts_in_background:
            log.warning(
                "queue %s: max_items is held only roughly with put_in_background=True: many puts may be "
                "under way while the list of items is read",
                self._path,
            )
        with unavailable(self._zk):
            for path in filter(None, (self._path, self._options.lock_path)):
                ensure_path(self._zk, path)
        self._zk.add_listener(self._connection_changed)
        if self._options.consumer is not None:
            self._thread = self._options.thread_factory(self._run)
            self._thread.start()

    def close(self) -> None:
        """Wait for puts under way (final_flush_s), then stop consuming; the connection stays open.

        An item that is being consumed is finished first.
        """
        if not self._started or self._closed.is_set():
            return
        if self._options.final_flush_s:
            self.flush_puts(self._options.final_flush_s)
        self._closed.set()
        self._changed.set()
        self._counted_children.changed.set()
        self._zk.remove_listener(self._connection_changed)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def put(self, item: T, *, timeout: float | None = None) -> bool:
        """Put one item.

        In the background (the default without max_items) put() returns before ZooKeeper has answered, and a
        PutListener learns the outcome.

        Args:
            item: What the serializer takes; by default bytes.
            timeout: Seconds to wait while the queue has max_items; None: without limit.

        Returns:
            False if the queue had max_items for `timeout`.

        Raises:
            MessageError: The item is too large; nothing was sent.
            UnknownOutcome: In the foreground: the answer was lost.
            Unavailable: ZooKeeper does not answer.
            ConfigError: start() was not called.
            Closed: The queue is closed.
        """
        return self.put_multi([item], timeout=timeout)

    def put_multi(self, items: Iterable[T], *, timeout: float | None = None) -> bool:
        """Put several items in one znode: a consumer takes, and requeues, all of them together.

        Args:
            items: Each as for put().
            timeout: As for put().
        """
        return self.put_named(PREFIX, items, timeout=timeout)

    def put_named(self, prefix: str, items: Iterable[T], *, timeout: float | None = None) -> bool:
        """Put items in a znode whose name begins with `prefix`.

        Args:
            prefix: Holds an id, priority or due time.
            items: Each as for put().
            timeout: As for put().
        """
        self.check_usable()
        given = list(items)
        data = encode_items([self._serialized(item) for item in given])
        path = f"{self._path}/{prefix}"
        check_create(self._zk, path, data, self._options.max_packet_bytes, f"put to {self._path}")
        if not self._wait_for_room(timeout):
            return False
        if self._options.puts_in_background:
            self._put_in_background(path, data, given)
        else:
            self._put_and_wait(path, data, given)
            self._counted_children.expire()
        return True

    def _serialized(self, item: T) -> bytes:
        data = self._options.serializer.serialize(item)
        if not isinstance(data, bytes):
            raise MessageError(f"item: the serializer returned {type(data).__name__}, not bytes")
        return data

    def flush_puts(self, timeout: float) -> bool:
        """Wait until each put has succeeded or failed.

        Args:
            timeout: Seconds.

        Returns:
            False if some puts are still under way.
        """
        with self._outstanding_changed:
            return self._outstanding_changed.wait_for(lambda: not self._outstanding, timeout)

    def children(self) -> list[str]:
        """Return the names of all items, in the order of consumption.

        Raises:
            Unavailable: The storage does not answer.
        """
        self.check_usable()
        with unavailable(self._zk):
            names = self._zk.get_children(self._path)
        return self._names.order(name for name in names if name.startswith(PREFIX))

    def remove(self, name: str) -> bool:
        """Delete one item; return False if it is gone or locked.

        Args:
            name: The name of its znode.

        Raises:
            Unavailable: The storage does not answer.
        """
        self.check_usable()
        with unavailable(self._zk):
            if self._options.lock_path is None:
                with contextlib.suppress(NoNodeError):
                    self._zk.delete(f"{self._path}/{name}")
                    return True
                return False
            return self._with_lock(name, lambda *_: ErrorMode.DELETE)

    def check_usable(self) -> None:
        """Raise ConfigError before start(), Closed after close()."""
        if not self._started:
            raise ConfigError("start: call start() before the queue is used")
        if self._closed.is_set():
            raise Closed(f"queue {self._path} is closed")

    def _wait_for_room(self, timeout: float | None) -> bool:
        if self._options.max_items is None:
            return True
        deadline = None if timeout is None else SYSTEM_CLOCK.monotonic() + timeout
        while True:
            with unavailable(self._zk):
                if len(self._counted_children.names()) < self._options.max_items:
                    return True
            left = None if deadline is None else deadline - SYSTEM_CLOCK.monotonic()
            if not self._counted_children.changed.wait(left):
                return False
            self.check_usable()

    def _put_and_wait(self, path: str, data: bytes, items: list[T]) -> None:
        self._count(+1)
        try:
            with unavailable(self._zk):
                try:
                    self._create(path, data)
                except NoNodeError:  # somebody removed the empty queue
                    ensure_path(self._zk, self._path)
                    self._create(path, data)
        except Exception as error:
            self._tell(items, error)
            raise
        finally:
            self._count(-1)
        self._tell(items, None)

    def _create(self, path: str, data: bytes) -> None:
        try:
            self._zk.create_async(path, data, sequence=True).get(timeout=self._options.put_timeout_s)
        except LOST_ANSWER as error:
            raise self._unknown(error) from error

    def _put_in_background(self, path: str, data: bytes, items: list[T]) -> None:
        self._count(+1)

        def done(result: Any) -> None:
            try:
                error = result.exception
                self._tell(items, self._unknown(error) if isinstance(error, LOST_ANSWER) else error)
            finally:
                self._count(-1)

        self._zk.create_async(path, data, sequence=True).rawlink(done)

    def _unknown(self, error: Exception) -> UnknownOutcome:
        return UnknownOutcome(
            f"put to {self._path}: ZooKeeper at {address(self._zk)} did not answer ({type(error).__name__}); "
            "the item may be in the queue or not; put again, it may be there twice"
        )

    def _tell(self, items: list[T], error: Exception | None) -> None:
        listeners = self._put_listeners
        if error is not None and not listeners and self._options.puts_in_background:
            log.error("queue %s: a put failed: %s", self._path, error or type(error).__name__)
        for listener in listeners:
            try:
                if error is None:
                    listener.put_completed(items)
                else:
                    listener.put_failed(items, error)
            except Exception:
                log.exception("queue %s: a PutListener failed", self._path)

    def _count(self, change: int) -> None:
        with self._outstanding_changed:
            self._outstanding += change
            self._outstanding_changed.notify_all()

    def _connection_changed(self, state: str) -> None:
        if state == "LOST":
            self._lost_sessions += 1
        self._changed.set()
        consumer = self._options.consumer
        if consumer is not None and hasattr(consumer, "connection_changed"):
            try:
                consumer.connection_changed(state)
            except Exception:
                log.exception("queue %s: the consumer's connection_changed failed", self._path)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                pause = self._consume_once()
            except (KazooException, KazooTimeoutError) as error:
                if has_ended(self._zk):
                    return  # the process ends
                log.debug("queue %s: %r", self._path, error)
                pause = _ERROR_PAUSE_S
                self._closed.wait(pause)
            except Exception:
                log.exception("queue %s: consuming failed; it goes on", self._path)
                self._closed.wait(_LOOK_AGAIN_AFTER_S)
                pause = 0.0
            self._changed.wait(pause)

    def _consume_once(self) -> float | None:
        """Consume the due items of one listing; return how many s to wait for a change (None: no limit)."""
        names = self._children.names()
        self._last_count = len(names)
        ours = {name for name in names if name.startswith(PREFIX)}
        for name in set(names) - ours:
            self._warn_once(name, "a znode of a foreign name; it is left alone")
        now = SYSTEM_CLOCK.wall_ms()
        pause: float | None = None
        due = []
        for name in self._names.order(ours):
            late_ms = now - self._names.due_ms(name)
            if late_ms >= 0:
                due.append(name)
            else:
                pause = min(-late_ms / 1000, pause or _LONGEST_PAUSE_S)
        if self._consume_all(due) or (not names and self._children.stale):
            pause = min(_LOOK_AGAIN_AFTER_S, pause or _LOOK_AGAIN_AFTER_S)
        return pause

    def _consume_all(self, names: list[str]) -> bool:
        """Consume items until the listing is outdated or the queue closed; return True if some are left."""
        left = False
        running = []
        for count, name in enumerate(names):
            outdated = self._options.refresh_on_watch and self._children.stale
            if self._closed.is_set() or (outdated and count >= self._options.min_items_before_refresh):
                left = True
                break
            if self._options.executor is None:
                left |= not self._consume(name)
            else:
                running.append(self._options.executor.submit(self._consume, name))
        wait(running)
        return left or not all(future.result() for future in running)

    def _consume(self, name: str) -> bool:
        """Consume one item; return False if it was not consumed, and so may still be there."""
        if self._closed.is_set():  # an executor got all names of the listing at once
            return False
        try:
            if self._options.lock_path is None:
                return self._without_lock(name)
            return self._with_lock(name, lambda *found: self._decode_and_consume(name, *found))
        except (NoNodeError, NodeExistsError):
            return False
        except NoAuthError:
            self._warn_once(name, "we may not read or delete it; it is left alone")
            return False
        except (KazooException, UnknownOutcome) as error:
            if not has_ended(self._zk):
                log.warning("queue %s: %s: %r", self._path, name, error)
            return False

    def _without_lock(self, name: str) -> bool:
        path = f"{self._path}/{name}"
        data, stat = self._zk.get(path)
        items = self._decoded(name, data, stat)
        if items is None:
            return False
        self._zk.delete(path, version=stat.version)  # only the process whose deletion succeeds consumes it
        self._call_consumer(name, items)
        return True

    def _with_lock(self, name: str, use: Callable[[bytes, Any], ErrorMode | None]) -> bool:
        """Lock the item, delete or requeue it as use(data, stat) says (None: neither), and unlock it.

        Returns True if the item was deleted or requeued.
        """
        item, lock = f"{self._path}/{name}", f"{self._options.lock_path}/{name}"
        token = uuid.uuid4().hex.encode()
        session = self._lost_sessions
        try:
            self._lock(lock, token)
            data, stat = self._zk.get(item)
            fate = use(data, stat)
            if fate is None:
                self._unlock(lock, token, session)
                return False
            if self._lost_sessions != session:
                if not has_ended(self._zk):
                    text = "queue %s: %s: its lock was lost meanwhile; it is consumed again"
                    log.warning(text, self._path, name)
                return False
            multi = self._zk.transaction()
            multi.delete(item)
            if fate is ErrorMode.REQUEUE:
                multi.create(f"{self._path}/{self._names.requeue_prefix(name)}", data, sequence=True)
            multi.delete(lock)
            error = failure(multi.commit())
            if error is not None:
                raise error
        except NodeExistsError:
            return False  # another process has locked the item
        except BaseException:
            self._unlock(lock, token, session)
            raise
        return True

    def _lock(self, lock: str, token: bytes) -> None:
        try:
            self._zk.create(lock, token, ephemeral=True)
        except NoNodeError:  # somebody removed lock_path
            ensure_path(self._zk, lock.rpartition("/")[0])
            self._zk.create(lock, token, ephemeral=True)

    def _unlock(self, lock: str, token: bytes, session: int) -> None:
        """Remove the lock if it is ours; try again while its session lasts, with which the lock ends."""
        while self._lost_sessions == session and not self._zk._stopped.is_set():
            try:
                if self._zk.get(lock)[0] == token:
                    self._zk.delete(lock)
            except NoNodeError:
                return
            except KazooException:
                SYSTEM_CLOCK.sleep(_ERROR_PAUSE_S)
            else:
                return

    def _decoded(self, name: str, data: bytes, stat: Any) -> list[T] | None:
        """Return the items of a znode; warn and return None if we can't decode them or delete the znode."""
        if stat.numChildren:
            self._warn_once(name, "znodes of others are below it; it is left alone")
            return None
        try:
            return [self._options.serializer.deserialize(one) for one in decode_items(data)]
        except DecodeError as error:
            self._warn_once(name, f"{error}; it is left alone")
        except Exception as error:
            self._warn_once(name, f"the serializer failed ({type(error).__name__}); it is left alone")
        return None

    def _decode_and_consume(self, name: str, data: bytes, stat: Any) -> ErrorMode | None:
        items = self._decoded(name, data, stat)
        return None if items is None else self._call_consumer(name, items)

    def _call_consumer(self, name: str, items: list[T]) -> ErrorMode:
        consumer: Any = self._options.consumer
        call = getattr(consumer, "consume", consumer)
        for item in items:
            try:
                call(item)
            except Exception:
                log.exception("queue %s: %s: the consumer failed", self._path, name)
                if self._error_mode is ErrorMode.REQUEUE:
                    return ErrorMode.REQUEUE
        return ErrorMode.DELETE

    def _warn_once(self, name: str, text: str) -> None:
        if name not in self._reported:
            if len(self._reported) >= _MAX_REPORTED_NAMES:
                self._reported.clear()
            self._reported.add(name)
            log.warning("queue %s: %s: %s", self._path, name, text)


class DistributedIdQueue(DistributedQueue[T]):
    """A queue whose items can be removed by their ids; several items may have the same id."""

    def __init__(self, options: QueueOptions[T]) -> None:
        super().__init__(options, BY_ID)

    def put_with_id(self, item: T, item_id: str, *, timeout: float | None = None) -> bool:
        """Put one item under an id; otherwise like put().

        Args:
            item: As for put().
            item_id: Text; `/` and `|` become `_`.
            timeout: As for put().
        """
        return self.put_named(id_prefix(item_id), [item], timeout=timeout)

    def remove_by_id(self, item_id: str) -> int:
        """Remove the items of this id that nobody consumes now; return how many.

        Args:
            item_id: As for put_with_id().

        Raises:
            Unavailable: The storage does not answer.
        """
        wanted = cleaned_id(item_id)
        return sum(self.remove(name) for name in self.children() if id_of(name) == wanted)


class DistributedPriorityQueue(DistributedQueue[T]):
    """A queue whose items have priorities; lower numbers come first, as in Curator."""

    def put_with_priority(self, item: T, priority: int, *, timeout: float | None = None) -> bool:
        """Put one item with a priority; otherwise like put().

        Args:
            item: As for put().
            priority: 32 bits, signed; lower ones come first.
            timeout: As for put().
        """
        return self.put_named(priority_prefix(priority), [item], timeout=timeout)


class DistributedDelayQueue(DistributedQueue[T]):
    """A queue whose items are not consumed before they are due, by the consumer's clock."""

    def __init__(self, options: QueueOptions[T]) -> None:
        super().__init__(options, DELAYED)

    def put_until(self, item: T, due_ms: int, *, timeout: float | None = None) -> bool:
        """Put one item that is due later; otherwise like put().

        Args:
            item: As for put().
            due_ms: When, in ms since 1970 UTC.
            timeout: As for put().
        """
        return self.put_named(delay_prefix(due_ms), [item], timeout=timeout)
