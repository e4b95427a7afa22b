"""confluent_kafka's producers over the simulated broker: idempotent, and transactional."""

from collections import deque
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka.markers import codec

from .connection import REQUEST_TIMEOUT_MS, Connection
from .model import Fenced, Record, Steps, decoded


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
            self._write(request, confirmed=False)

    def _write(self, request: _Request, *, confirmed: bool) -> None:
        for record, _ in request.records:
            record.append(confirmed=confirmed)
            queue = self._connection.queue_topic, record.partition()
            record.queue_end = self._connection.broker.logs[queue].end
            owner, process = self._connection.group.owner.get(record.partition()), self._connection.process
            record.is_of_halted = process.stood_still and (owner is None or owner.process is not process)
            if self._world.tracing:
                what = shown(record.key(), record.value(), record.headers())
                self._world.trace(record.by, f"wrote {record.partition()}@{record.at} {what}")

    def _report(self, request: _Request, error: KafkaError | None) -> None:
        for record, report in request.records:
            if report is not None and not (request.purged and error is None):
                self._reports.append((report, error, record))
        self.wake()


class Transactions:
    """A transactional producer."""

    may_end_again = False

    def __init__(self, connection: Connection, transactional_id: str) -> None:
        self._connection = connection
        self._broker = connection.broker
        self._world = connection.world
        self._by = connection.process.name
        self._id = transactional_id
        self._markers = connection.markers_topic
        self._epoch = 0
        self._pending: list[tuple[tuple[str, int], bytes | None, Any, Any, Any]] = []
        self._copies: list[Record] = []
        """Those of this transaction whose end markers are not written yet."""

    def init_transactions(self, _timeout_s: float) -> Steps:
        yield from self._connection.reach()
        self._epoch = self._broker.init(self._id)
        self._world.trace(self._by, f"fenced {self._id}, epoch {self._epoch}")
        yield self._world.latency()

    def begin_transaction(self) -> tuple[()]:
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
        self._end(commit=True)
        yield self._world.latency()

    def abort_transaction(self, _timeout_s: float) -> Steps:
        self._pending = []
        yield from self._connection.reach()
        self._end(commit=False)
        yield self._world.latency()

    def purge(self) -> None:
        self._pending = []

    def _send_pending(self) -> Steps:
        copies = self._copies
        self._world.stall(self._connection.process)
        for place, key, value, headers, report in self._pending:
            yield self._world.latency()
            if self._world.unlucky() or place[0] in self._broker.missing:
                error = KafkaError(KafkaError._MSG_TIMED_OUT, txn_requires_abort=True)
                if self._world.random() < 0.5:
                    self._send(place, key, value, headers)
                report(error, None)
                raise KafkaException(error)
            record = self._send(place, key, value, headers)
            report(None, record)
            if record.topic() != self._markers:
                copies.append(record)
                continue
            # The end markers of the copies come after them, in the same order.
            for marker in [one for one in decoded(record) if one.offset >= 0][: len(copies)]:
                copy = record.copies[marker.offset] = copies.pop(0)
                copy.has_end = True

    def _end_somehow(self) -> Steps:
        """The outcome stays unknown: done, not done, or done later."""
        luck = self._world.random()
        if luck < 0.3:
            self._end(commit=True)
        elif luck < 0.7:
            self._world.at(3000 * self._world.random(), self._end_late)
        self._world.trace(self._by, "commit of unknown outcome")
        yield REQUEST_TIMEOUT_MS
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, retriable=True))

    def _end_late(self) -> None:
        try:
            self._broker.end_transaction(self._id, self._epoch, commit=True)
        except Fenced:
            return
        self._world.trace(self._by, "a commit arrived late")

    def _send(self, place: tuple[str, int], key: bytes | None, value: Any, headers: Any) -> Record:
        try:
            at = self._broker.send(self._id, self._epoch, self._by, place, key, value, headers)
        except Fenced:
            raise self._fenced() from None
        if self._world.tracing:
            what = shown(key, value)
            self._world.trace(self._by, f"sent in transaction: {place[0]} {place[1]}@{at} {what}")
        return self._broker.logs[place].records[at]

    def _end(self, *, commit: bool) -> None:
        try:
            self._broker.end_transaction(self._id, self._epoch, commit=commit)
        except Fenced:
            raise self._fenced() from None
        self._world.trace(self._by, "transaction committed" if commit else "transaction aborted")

    def _fenced(self) -> KafkaException:
        self._world.trace(self._by, "fenced off")
        return KafkaException(KafkaError(KafkaError._FENCED, fatal=True))


def shown(key: bytes | None, value: Any, headers: Any = ()) -> str:
    """A record for a trace."""
    try:
        marker = codec.decode(key, value, headers)
    except Exception:  # a message
        return repr(value)
    which = marker.runs or marker.offset
    return f"{marker.op} {which} {marker.redeliver_after_ms or ''}"
