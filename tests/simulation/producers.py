"""confluent_kafka's producers over the simulated broker: idempotent, and transactional."""

import contextlib
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.lineage import COPY, read_copies
from kmqpy.kafka.markers.log_cuts import offset_of
from kmqpy.kafka.settings import MARKERS_SUFFIX

from .connection import REQUEST_TIMEOUT_MS, Connection
from .journal import EndedLong
from .late_requests import ADD, END, INIT, PRODUCE
from .model import Fenced, InvalidTxnState, OutOfOrder, Record, decoded
from .world import Steps

T = TypeVar("T")

NOTICED_AFTER_MS = 750.0
"""An end that lasted as long may have been repeated, and its producer is used no more (rule R36)."""


class _Request:
    """Records for one partition that arrive together or not at all."""

    def __init__(self, made_at: float) -> None:
        self.made_at = made_at
        self.records: list[tuple[Record, Callable[..., None] | None]] = []
        self.purged = False


class PlainProducer:
    """Idempotent, not transactional: what it sends arrives in order, or is reported as failed.

    What is reported as failed may have been written, and may still be: until this producer has written
    something else to the partition, since it has another epoch then.
    """

    fatal_error: KafkaError | None = None

    def __init__(self, connection: Connection, *, only_errors: bool = False) -> None:
        self._connection = connection
        self._believed = connection.process.topics_of
        self._world = connection.world
        self._only_errors = only_errors
        self._unreported = 0
        self._reports: deque[tuple[Callable[..., None], Any, Any]] = deque()
        self._requests: dict[tuple[str, int], list[_Request]] = {}
        self._unanswered: list[_Request] = []
        """What went wrong, and is not reported yet."""
        self._free_at: dict[tuple[str, int], float] = {}
        self._written: dict[tuple[str, int], int] = {}
        self.wake: Callable[[], None] = lambda: None

    def produce(
        self,
        topic: str,
        value: Any,
        key: bytes | None,
        partition: int,
        on_delivery: Callable[..., None] | None = None,
        headers: Any = None,
    ) -> None:
        place = (topic, partition)
        log = self._connection.broker.logs[place]
        record = Record(log, -1, 0, key, value, headers or [], None, self._connection.process.name)
        record.believed = self._believed
        if self._world.cut_logs and topic.endswith(MARKERS_SUFFIX):
            self._world.history.names.meant_by(record, self._connection.process, decoded(record))
        waiting = self._requests.setdefault(place, [])
        if not waiting or waiting[-1].made_at != self._world.now or self._world.random() < 0.05:
            waiting.append(request := _Request(self._world.now))
            free_at = max(self._free_at.get(place, 0.0), self._world.now + self._world.latency())
            self._free_at[place] = free_at
            self._world.at(free_at - self._world.now, lambda: self._arrive(place, request))
        waiting[-1].records.append((record, on_delivery))
        self._unreported += on_delivery is not None

    def produce_batch(
        self, topic: str, messages: list[dict[str, Any]], partition: int, on_delivery: Callable[..., None]
    ) -> int:
        for message in messages:
            self.produce(topic, message["value"], message["key"], partition, on_delivery)
        return len(messages)

    def __len__(self) -> int:
        return max(0, self._unreported)

    def poll(self, timeout_s: float) -> tuple[float, ...]:
        while self._reports:
            report, error, record = self._reports.popleft()
            self._unreported -= 1
            if error is not None or not self._only_errors:
                report(error, record)
        return (timeout_s * 1000,)

    def purge(self) -> None:
        for requests in self._requests.values():
            for request in requests:
                request.purged = True
                self._report(request, KafkaError(KafkaError._PURGE_INFLIGHT))
        for request in list(self._unanswered):
            self._give_up(request, KafkaError(KafkaError._PURGE_INFLIGHT))

    def flush(self, _timeout_s: float = 0) -> int:
        self.poll(0)
        return 0

    def _arrive(self, place: tuple[str, int], request: _Request) -> None:
        world = self._world
        self._requests[place].remove(request)
        cut = self._connection.process.kafka_cut_until > world.now
        cut = cut or place[0] in self._connection.broker.missing
        if not cut and not world.unlucky():
            self._written[place] = self._written.get(place, 0) + 1
            self._write(request, confirmed=not request.purged)
            self._report(request, None)
            return
        luck = world.random()
        if luck < 0.3 and not cut:
            self._write(request, confirmed=False)
        elif luck < 0.6:
            written = self._written.get(place, 0)
            world.at(2000 * world.random(), lambda: self._arrive_late(place, request, written))
        world.trace(self._connection.process.name, f"not confirmed: {len(request.records)} of {place}")
        fatal = world.random() < 0.1
        code = KafkaError._FATAL if fatal else KafkaError._MSG_TIMED_OUT
        self._unanswered.append(request)
        world.at(REQUEST_TIMEOUT_MS, lambda: self._give_up(request, KafkaError(code, fatal=fatal)))

    def _give_up(self, request: _Request, error: KafkaError) -> None:
        if request in self._unanswered:
            self._unanswered.remove(request)
            self._report(request, error)

    def _arrive_late(self, place: tuple[str, int], request: _Request, written: int) -> None:
        if self._written.get(place, 0) == written and place[0] not in self._connection.broker.missing:
            self._world.trace(self._connection.process.name, "what was not confirmed arrives late:")
            self._write(request, confirmed=False, late=True)

    def _write(self, request: _Request, *, confirmed: bool, late: bool = False) -> None:
        for record, _ in request.records:
            record.append(confirmed=confirmed)
            queue = self._connection.queue_topic, record.partition()
            record.queue_end = self._connection.broker.logs[queue].end
            owner, process = self._connection.group.owner.get(record.partition()), self._connection.process
            unheard = process.silent_to_kafka or process.was_expelled
            halted = process.stood_still or (late and unheard)
            record.is_of_halted = halted and (owner is None or owner.process is not process)
            if record.meant:
                self._world.history.names.taken(record)
            if self._world.tracing:
                what = shown(record.key(), record.value(), record.headers())
                self._world.trace(record.by, f"wrote {record.partition()}@{record.at} {what}")

    def _report(self, request: _Request, error: KafkaError | None) -> None:
        for record, report in request.records:
            if report is not None and not (request.purged and error is None):
                self._reports.append((report, error, record))
        self.wake()


class Transactions:
    """A transactional producer.

    backoff_ms  retry.backoff.ms: how long it waits before it repeats a request
    """

    may_end_again = False

    def __init__(self, connection: Connection, transactional_id: str, backoff_ms: float) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._world = connection.world
        self._by = connection.process.name
        self._id = transactional_id
        self._backoff_ms = backoff_ms
        self._epoch = 0
        self._number = 0
        """Of its transaction."""
        self._ended_long: set[int] = set()
        """Transactions whose end lasted so long that it may have been repeated."""
        self._held: list[Callable[[], None]] = []
        """Requests that arrive while it writes something."""
        self._added: set[tuple[str, int]] = set()
        """Partitions of this transaction."""
        self._pending: list[tuple[tuple[str, int], bytes | None, Any, Any, Any]] = []
        self._copies: list[Record] = []
        """Those of this transaction whose end markers are not written yet."""

    def init_transactions(self, _timeout_s: float) -> Steps:
        yield from self._connection.reach()
        yield from self._repeat(INIT, lambda: self._broker.init(self._id))
        self._epoch = self._broker.init(self._id)
        self._world.trace(self._by, f"fenced {self._id}, epoch {self._epoch}")
        yield self._world.latency()

    def begin_transaction(self) -> tuple[()]:
        self._number += 1
        self._added = set()
        self._pending = []
        self._copies = []
        return ()

    def produce(
        self, topic: str, value: Any, key: bytes | None, partition: int, on_delivery: Any, headers: Any
    ) -> None:
        self._pending.append(((topic, partition), key, value, headers, on_delivery))

    def flush(self, _timeout_s: float) -> Steps:
        yield from self._send_pending()
        self._pending = []
        return 0

    def commit_transaction(self, _timeout_s: float) -> Steps:
        yield self._world.latency()
        if self._world.unlucky(2.0) or self._connection.process.kafka_cut_until > self._world.now:
            yield from self._end_somehow()
        yield from self._end(commit=True)
        yield self._world.latency()

    def abort_transaction(self, _timeout_s: float) -> Steps:
        self._pending = []
        yield from self._connection.reach()
        if self._added:  # else the broker knows of no transaction
            yield from self._end(commit=False)
        yield self._world.latency()

    def purge(self) -> None:
        self._pending = []

    def _repeat(self, request: str, arrive: Callable[[], object]) -> Steps:
        """A request that was sent is sent again, if the connection breaks, and may arrive later itself."""
        world = self._world

        def arrive_late() -> None:
            world.trace(self._by, f"{request} arrives late:")
            with contextlib.suppress(Fenced, InvalidTxnState):
                arrive()

        while world.faults and world.late.breaks(request):
            world.trace(self._by, f"{request} is repeated")
            world.late.delay(arrive_late, self._held)
            yield world.late.repeated_after_ms(self._backoff_ms)
            yield world.latency()

    def _send_pending(self) -> Steps:
        self._world.stall(self._connection.process)
        for place, key, value, headers, report in self._pending:
            yield self._world.latency()
            self._world.late.deliver(self._held)
            write = self._produce_request(place, key, value, headers)
            if place not in self._added and place[0] not in self._broker.missing:
                add = partial(
                    self._broker.add_partition, self._id, self._epoch, self._by, self._number, place
                )
                yield from self._repeat(ADD, (lambda: None) if self._world.late.loses(ADD) else add)
                self._answered(add)
                self._added.add(place)
            refused = place[0] in self._broker.missing or place[0] in self._broker.refusing
            if self._world.unlucky() or refused:
                error = KafkaError(KafkaError._MSG_TIMED_OUT, txn_requires_abort=True)
                if self._world.random() < 0.5 and place in self._added:
                    self._answered(write)
                report(error, None)
                raise KafkaException(error)
            yield from self._repeat(PRODUCE, write)
            try:
                written = self._answered(write)
            except KafkaException as exception:
                if (error := exception.args[0]).code() == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER:
                    report(error, None)
                raise
            report(None, written)

    def _produce_request(
        self, place: tuple[str, int], key: bytes | None, value: Any, headers: Any
    ) -> Callable[[], Record]:
        """Writes a record when it arrives first: then its sequence number is known."""
        written: list[Record] = []
        number, copies = self._number, self._copies

        def arrive() -> Record:
            if not written:
                record = self._send(number, place, key, value, headers)
                written.append(record)
                if not record.topic().endswith(MARKERS_SUFFIX):
                    copies.append(record)
                else:
                    _note_ends(record, copies)
            return written[0]

        return arrive

    def _end_somehow(self) -> Steps:
        """The outcome stays unknown: done, not done, or done later."""
        luck = self._world.random()
        if luck < 0.3:
            self._answered(self._end_request(commit=True))
        elif luck < 0.7:
            self._world.at(3000 * self._world.random(), self._commit_late)
        self._world.trace(self._by, "commit of unknown outcome")
        yield REQUEST_TIMEOUT_MS
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    def _commit_late(self) -> None:
        try:
            self._end_request(commit=True)()
        except (Fenced, InvalidTxnState):
            return
        self._world.trace(self._by, "a commit arrived late")

    def _send(
        self, number: int, place: tuple[str, int], key: bytes | None, value: Any, headers: Any
    ) -> Record:
        at = self._broker.send(self._id, self._epoch, self._by, number, place, key, value, headers)
        if self._world.tracing:
            what = shown(key, value)
            self._world.trace(self._by, f"sent in transaction: {place[0]} {place[1]}@{at} {what}")
        return self._broker.logs[place].records[at]

    def _end(self, *, commit: bool) -> Steps:
        began = self._world.now
        end = self._end_request(commit=commit)
        lost = self._world.late.loses(END, commit=commit)
        yield from self._repeat(END, (lambda: None) if lost else end)
        self._answered(end)
        if self._world.now - began >= NOTICED_AFTER_MS:
            self._ended_long.add(self._number)
            self._world.journal.append(EndedLong(self._id))
        self._world.trace(self._by, "transaction committed" if commit else "transaction aborted")

    def _end_request(self, *, commit: bool) -> Callable[[], None]:
        """Ends a transaction of this producer when it arrives: a later one, if it arrives late."""
        number = self._number

        def arrive() -> None:
            early = self._broker.end_transaction(self._id, self._epoch, number, commit=commit)
            if early:
                self._world.trace(
                    self._by, f"its transaction {self._number} was ended by a request of {number}"
                )
                if number in self._ended_long:
                    self._world.history.problems.append(
                        f"R36: {self._by}: a request ended a later transaction"
                    )

        return arrive

    def _answered(self, arrive: Callable[[], T]) -> T:
        """Let a request arrive, and take its answer."""
        try:
            return arrive()
        except Fenced:
            self._world.trace(self._by, "fenced off")
            raise KafkaException(KafkaError(KafkaError._FENCED, fatal=True)) from None
        except OutOfOrder:
            self._world.trace(self._by, "what it wrote before was cut away")
            code = KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER
            raise KafkaException(KafkaError(code, txn_requires_abort=True)) from None
        except InvalidTxnState:
            self._world.trace(self._by, "not in this state of the transaction")
            raise KafkaException(KafkaError(KafkaError.INVALID_TXN_STATE, fatal=True)) from None


def _note_ends(end: Record, copies: list[Record]) -> None:
    """Note which end marker is of which copy: they come after the copies, in the same order.

    Those without copies in the same transaction name the copies of another one.
    """
    ended = [one.offset for one in decoded(end) if one.offset >= 0]
    for offset, copy in zip(ended, copies or _named_copies(end, len(ended)), strict=False):
        end.copies[offset] = copy
        copy.has_end = True
    del copies[: len(ended)]


def _named_copies(end: Record, count: int) -> list[Record]:
    """Which an end marker names; none if they were in a topic that is gone."""
    logs = end.log.broker.logs
    named = dict(end.headers()).get(COPY)
    places = read_copies(named, end.topic().removesuffix(MARKERS_SUFFIX), count) if named else []
    if any(offset_of(number) >= logs[topic, partition].end for topic, partition, number in places):
        return []
    return [logs[topic, partition].records[offset_of(number)] for topic, partition, number in places]


def shown(key: bytes | None, value: Any, headers: Any = ()) -> str:
    """A record for a trace."""
    try:
        marker = codec.decode(key, value, headers)
    except Exception:  # a message
        return repr(value)
    which = marker.runs or marker.offset
    return f"{marker.op} {which} {marker.redeliver_after_ms or ''}"
