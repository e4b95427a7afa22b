"""confluent_kafka's clients as kmqpy sees them, over the simulated broker."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection, TopicPartition

from kmqpy.errors import QueueNotFound, TopicError, Unavailable
from kmqpy.kafka import librdkafka as real
from kmqpy.kafka.markers import codec
from kmqpy.kafka.partition_reader import Reached
from kmqpy.kafka.topics import QueueTopics, TopicInfo

from .model import Broker, Fenced, Group, Log, NoTopic, Process, Record, Steps, decoded

REQUEST_TIMEOUT_MS = 400.0


def timed_out() -> KafkaException:
    return KafkaException(KafkaError(KafkaError._TIMED_OUT))


def no_topic() -> KafkaException:
    return KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))


class Connection:
    """What kmqpy's parts are given instead of addresses: the process they are in."""

    bootstrap = "broker"
    root = "/kmq"
    kafka: Mapping[str, str] = MappingProxyType({})
    queue_topic = "q"
    markers_topic = "q__markers"

    def __init__(self, process: Process, broker: Broker, group: Group, zookeeper: Any) -> None:
        self.process = process
        self.world = process.world
        self.broker = broker
        self.group = group
        self.zookeeper = SimpleNamespace(hosts=zookeeper, security=None)

    def reach(self) -> Steps:
        """One way to a broker; raises when it can't be reached."""
        yield self.world.latency()
        if self.process.kafka_cut_until > self.world.now or self.world.unlucky():
            yield REQUEST_TIMEOUT_MS
            raise timed_out()

    def is_away(self) -> bool:
        """Whether Kafka does not answer a question about topics now."""
        world = self.world
        unlucky = world.faults and world.topics_rng.random() < world.error_rate
        return unlucky or self.process.kafka_cut_until > world.now

    def describe(self) -> dict[str, TopicInfo]:
        """The topics of the queue, as far as they exist, as some broker knows them."""
        number = self.broker.number_told()
        names = [name for name in (self.queue_topic, self.markers_topic) if name not in self.broker.missing]
        return {name: TopicInfo(name, f"{name}-{number}", self.broker.partitions, 3) for name in names}

    def checked(self) -> QueueTopics:
        """The same, when they are to exist."""
        found = self.describe()
        if len(found) < 2:
            raise QueueNotFound("there is no such topic")
        return QueueTopics(found[self.queue_topic], found[self.markers_topic], None)


class _Answer:
    """A future of what is asked of Kafka."""

    def __init__(self) -> None:
        self._found: TopicInfo | KafkaException | None = None

    def set(self, found: TopicInfo | KafkaException) -> None:
        self._found = found

    def done(self) -> bool:
        return self._found is not None

    def result(self, _timeout_s: float) -> TopicInfo:
        if not isinstance(self._found, TopicInfo):
            raise self._found or timed_out()
        return self._found


class Admin:
    """An admin client that is asked which topics there are."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def poll(self, _timeout_s: float) -> int:
        return 0

    def describe_topics(self, asked: TopicCollection, request_timeout: float) -> dict[str, _Answer]:
        connection, world = self._connection, self._connection.world
        answers = {name: _Answer() for name in asked.topic_names}

        def answer(found: dict[str, TopicInfo], away: bool) -> None:
            for name, one in answers.items():
                one.set(timed_out() if away else found.get(name) or no_topic())

        def arrive() -> None:
            away = connection.is_away()
            later_ms = request_timeout * 1000 if away else 12 * world.topics_rng.random() ** 2
            found = connection.describe()
            world.at(later_ms, lambda: answer(found, away))

        world.at(12 * world.topics_rng.random() ** 2, arrive)
        return answers


class Module:
    """Stands where kmqpy.kafka.librdkafka is imported."""

    REQUEST_TIMEOUT_S = real.REQUEST_TIMEOUT_S
    COPY_SETTINGS = real.COPY_SETTINGS
    kafka_errors = staticmethod(real.kafka_errors)
    error_of = staticmethod(real.error_of)
    is_fatal = staticmethod(real.is_fatal)
    error_name = staticmethod(real.error_name)

    @staticmethod
    def refresh_partition(*_: object) -> bool:
        return False

    @staticmethod
    def watermarks(reader: "Reader", topic: str, partition: int, _timeout_s: float) -> Steps:
        return reader.get_watermark_offsets(TopicPartition(topic, partition))

    @staticmethod
    def new_admin(connection: Connection) -> Admin:
        return Admin(connection)

    @staticmethod
    def new_producer(connection: Connection, settings: dict[str, Any]) -> Any:
        if "transactional.id" in settings:
            return connection.world.controls.transactions(connection, settings["transactional.id"])
        return PlainProducer(connection, only_errors=settings.get("delivery.report.only.error", False))

    @staticmethod
    def new_consumer(connection: Connection, settings: dict[str, Any]) -> Any:
        if "on_commit" in settings:
            return GroupConsumer(connection, settings["on_commit"])
        return Reader(connection)


class TrackerModule(Module):
    """The same where the markers consumer of a tracker is made, whose reads wait for nothing."""

    @staticmethod
    def new_consumer(connection: Connection, _settings: dict[str, Any]) -> "MarkersConsumer":
        return MarkersConsumer(connection)


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


class _EndOfLog:
    """What librdkafka gives at the end of a partition."""

    def __init__(self, log: Log, position: int) -> None:
        self._log = log
        self._position = position

    def error(self) -> KafkaError:
        return KafkaError(KafkaError._PARTITION_EOF)

    def offset(self) -> int:
        return self._position

    def partition(self) -> int:
        return self._log.partition


class Reader:
    """Reads one assigned partition; joins no group."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._world = connection.world
        self._place: tuple[str, int] | None = None
        self._position = 0
        self._told_end = -1

    def get_watermark_offsets(self, place: TopicPartition) -> Steps:
        yield from self._connection.reach()
        if place.topic in self._connection.broker.missing:
            raise no_topic()
        log = self._connection.broker.logs[place.topic, place.partition]
        return log.start, log.stable

    def assign(self, places: Sequence[TopicPartition]) -> None:
        (place,) = places
        self._place = place.topic, place.partition
        self._position = place.offset
        self._told_end = -1

    def seek(self, place: TopicPartition) -> None:
        self._position = place.offset

    def unassign(self) -> None:
        self._place = None

    def consume(self, limit: int, timeout_s: float) -> Steps:
        yield self._world.latency()
        place, world, broker = self._place, self._world, self._connection.broker
        assert place is not None
        log = broker.logs[place]
        if place[0] in broker.missing:
            raise no_topic()
        if self._connection.process.kafka_cut_until > world.now:
            yield timeout_s * 1000
            return []
        if not log.start <= self._position <= log.end:
            raise KafkaException(KafkaError(KafkaError._AUTO_OFFSET_RESET))
        some = 1 + int(limit * world.random())
        found, position = log.read(self._position, some)
        self._position = position
        result: list[Any] = list(found)
        if not found:
            if self._told_end != position:
                self._told_end = position
                return [_EndOfLog(log, position)]
            yield timeout_s * 1000
        return result

    def close(self) -> None:
        self._place = None


class LogReader:
    """Stands where kmqpy.kafka.partition_reader is imported."""

    @staticmethod
    def bounds(
        connection: Connection, topic: str, partitions: Sequence[int], _timeout_s: float, *, uncommitted: bool
    ) -> dict[int, tuple[int, int]]:
        assert uncommitted
        if topic in connection.broker.missing:
            raise TopicError("there is no such topic")
        logs = {partition: connection.broker.logs[topic, partition] for partition in partitions}
        return {partition: (log.start, log.end) for partition, log in logs.items()}

    @staticmethod
    def scan(
        connection: Connection,
        topic: str,
        starts: Mapping[int, int],
        visit: Callable[[Record], None],
        *,
        uncommitted: bool,
        timeout_s: float,
        clock: Any,
        recovers: bool = True,
    ) -> Steps:
        """Read one partition up to where it ends now, in some pieces.

        recovers  a client reads what was started before it got the partition
        """
        ((partition, start),) = starts.items()
        world = connection.world
        try:
            yield from connection.reach()
        except KafkaException as exception:
            raise Unavailable(str(exception)) from exception
        log = connection.broker.logs[topic, partition]
        end = log.end if uncommitted else log.stable
        if recovers:
            connection.process.recovered[partition] = log, end
        reached = Reached(log.start, min(max(start, log.start), max(end, log.start)), end)
        while not reached.done:
            yield world.latency()
            if topic in connection.broker.missing:
                raise TopicError("there is no such topic")
            log = connection.broker.logs[topic, partition]
            if reached.position >= log.end:  # recreated, and shorter: read from its start, what is there
                reached.position = log.start
            if connection.process.kafka_cut_until > world.now or reached.position >= log.end:
                yield timeout_s * 1000
                raise Unavailable("sends nothing")
            some = min(end - reached.position, 1 + int(100 * world.random()))
            found, reached.position = log.read(reached.position, some, uncommitted=uncommitted)
            for record in found:
                if record.offset() < end:
                    visit(record)
        return {partition: reached}


class RepeatedReader:
    """kmqpy.kafka.partition_reader.RepeatedReader: each partition, one after the other."""

    def __init__(
        self, connection: Connection, topic: str, *, uncommitted: bool, timeout_s: float, clock: Any
    ) -> None:
        self.connection = connection
        self.topic = topic
        self._how = {"uncommitted": uncommitted, "timeout_s": timeout_s, "clock": clock}

    def scan(self, starts: Mapping[int, int], visit: Callable[[int, list[Record]], bool]) -> Steps:
        reached: dict[int, Reached] = {}
        for partition, start in starts.items():
            found: list[Record] = []
            reached |= yield from LogReader.scan(
                self.connection, self.topic, {partition: start}, found.append, recovers=False, **self._how
            )
            if found:
                visit(partition, found)
        return reached

    def close(self) -> None:
        pass


class QueueEnds:
    """Stands where tracker.reading.queue_ends is imported."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def end_beyond(self, place: tuple[str, int], _offset: int) -> int:
        (end,) = self.each_of([place], anew=False).values()
        if isinstance(end, Unavailable):
            raise end
        return end

    def each_of(
        self, places: Iterable[tuple[str, int]], *, anew: bool
    ) -> dict[tuple[str, int], int | Unavailable]:
        connection, places = self._connection, list(places)
        if connection.process.kafka_cut_until > connection.world.now or connection.world.unlucky():
            return dict.fromkeys(places, Unavailable("does not answer"))
        if connection.queue_topic in connection.broker.missing:
            return dict.fromkeys(places, Unavailable("there is no such topic"))
        return {place: connection.broker.logs[place].end for place in places}

    def close(self) -> None:
        pass


class MarkersConsumer:
    """The markers consumer of a tracker: many partitions, read without waiting."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._world = connection.world
        self._positions: dict[tuple[str, int], int] = {}

    def incremental_assign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions[place.topic, place.partition] = place.offset

    def incremental_unassign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions.pop((place.topic, place.partition), None)

    def consume(self, limit: int, _timeout_s: float) -> list[Record]:
        world, found = self._world, []
        if self._connection.process.kafka_cut_until > world.now:
            return []
        for place, position in self._positions.items():
            log = self._connection.broker.logs[place]
            if place[0] in self._connection.broker.missing:
                found.append(NoTopic(log))
                continue
            if position > log.end:  # of a topic that was longer: auto.offset.reset earliest
                self._positions[place] = position = log.start
            if position >= log.stable:
                continue
            if position < log.start:  # auto.offset.reset earliest
                position = log.start
            elif world.faults and world.random() < 0.01:  # a reset, after a change of leaders
                position = max(log.start, position - int(10 * world.random()))
            records, self._positions[place] = log.read(position, limit - len(found))
            found += records
            if len(found) >= limit:
                break
        return found

    def close(self) -> None:
        self._positions.clear()


class GroupConsumer:
    """A member of the queue's consumer group."""

    def __init__(self, connection: Connection, on_commit: Callable[..., None]) -> None:
        self._connection = connection
        self.process = connection.process
        self._world = connection.world
        self._group = connection.group
        self._logs: dict[int, Log] = {}
        self._on_commit = on_commit
        self._positions: dict[int, int | None] = {}
        self._paused: set[int] = set()
        self._eager: set[int] = set()
        self._failed_commit = False
        self._free_at = 0.0
        self._generation = 0

    def subscribe(self, topics: Sequence[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        (self._topic,) = topics
        self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost
        self._group.join(self)

    def assignment(self) -> list[int]:
        return list(self._positions)

    def unsubscribe(self) -> None:
        """Give up what one has; takes effect at once."""
        self._notice_losses()
        for _ in self._give_up([p for p, owner in self._group.owner.items() if owner is self]):
            raise AssertionError("who leaves the group has waited before")

    def wake(self) -> None:
        self._world.wake(self.process.main, self._world.latency())

    def consume(self, limit: int, _timeout_s: float) -> Steps:
        yield self._world.latency()
        if self.process.kafka_cut_until > self._world.now:
            return []
        yield from self._rebalance()
        if self._failed_commit:
            self._failed_commit = False
            self._on_commit(KafkaError(KafkaError.UNKNOWN_MEMBER_ID), [])
        found: list[Record] = []
        if self._topic in self._connection.broker.missing:
            logs = [self._connection.broker.logs[self._topic, partition] for partition in self._positions]
            return [NoTopic(log) for log in logs if self._world.topics_rng.random() < 0.3]
        for partition in list(self._positions):
            # What came before the pause was noticed is delivered.
            eager = partition in self._eager and self._world.random() < 0.5
            if partition in self._paused and not eager:
                continue
            self._eager.discard(partition)
            some = 1 + int(limit * self._world.random())
            found += self._fetch(partition, min(some, limit - len(found)))
        return found

    def _fetch(self, partition: int, limit: int) -> list[Record]:
        log = self._connection.broker.logs[self._topic, partition]
        position = self._positions[partition]
        if position is None:
            position = self._group.committed.get(partition, (0, ""))[0]
        elif self._world.faults and self._world.random() < 0.01:  # librdkafka repeats a look-up, too late
            position = int(position * self._world.random())
        if position > log.end:  # of a topic that was longer: auto.offset.reset earliest
            position = log.start
        found, self._positions[partition] = log.read(max(position, log.start), limit)
        return found

    def _rebalance(self) -> Steps:
        group, me = self._group, self
        self._notice_losses()
        if me not in group.members:
            self._generation += 1
            group.join(me)
            for other in group.members:
                other.wake()
        mine = [p for p, owner in group.owner.items() if owner is me]
        gone = self._topic in self._connection.broker.missing
        if gone and mine and self._world.topics_rng.random() < 0.1:  # noticed before it is there again
            yield from self._give_up(mine)
            return
        yield from self._give_up([p for p in mine if group.target(p) is not me])
        free = [p for p in range(group.partitions) if p not in group.owner and not gone]
        got = [p for p in free if group.target(p) is me]
        if got:
            for p in got:
                group.assign(p, me)
            self._world.trace(self.process.name, f"got {got}")
            self._on_assign(me, [TopicPartition(self._topic, p) for p in got])
            self._eager.update(got)

    def _notice_losses(self) -> None:
        """What was taken away while nothing was heard of us."""
        lost = [p for p in self._positions if self._group.owner.get(p) is not self]
        if lost:
            self._world.trace(self.process.name, f"lost {lost}")
            self._on_lost(self, [TopicPartition(self._topic, p) for p in lost])

    def _give_up(self, partitions: list[int]) -> Steps:
        if not partitions:
            return
        yield from self._on_revoke(self, [TopicPartition(self._topic, p) for p in partitions])
        for p in partitions:
            if self._group.owner.get(p) is self:  # nobody has thrown us out meanwhile
                del self._group.owner[p]
        self._world.trace(self.process.name, f"gave up {partitions}")
        for other in self._group.members:
            other.wake()

    def incremental_assign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions[place.partition] = place.offset if place.offset >= 0 else None
            self._paused.discard(place.partition)

    def incremental_unassign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions.pop(place.partition, None)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        self._paused.update(place.partition for place in places)

    def resume(self, places: Iterable[TopicPartition]) -> None:
        self._paused.difference_update(place.partition for place in places)

    def seek(self, place: TopicPartition) -> None:
        if self._positions.get(place.partition) is None:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._positions[place.partition] = place.offset

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> Steps:
        yield from self._connection.reach()
        (place,) = places
        offset, metadata = self._group.committed.get(place.partition, (-1001, ""))
        yield self._world.latency()
        return [TopicPartition(place.topic, place.partition, offset, metadata)]

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        log = self._connection.broker.logs[place.topic, place.partition]
        return log.start, log.end

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        world, process = self._world, self.process
        wanted = [(place.partition, place.offset, place.metadata or "") for place in offsets]

        generation = self._generation

        def arrive() -> bool:
            lost = self._generation != generation or process.kafka_cut_until > world.now or world.unlucky()
            lost = lost or self._topic in self._connection.broker.missing
            return not lost and self._group.commit(self, wanted)

        def arrive_later() -> None:
            if not arrive():
                self._failed_commit = True

        if asynchronous:
            self._free_at = max(self._free_at, world.now + world.latency())
            world.at(self._free_at - world.now, arrive_later)
        elif not arrive():
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def close(self) -> None:
        self.unsubscribe()
        self._group.leave(self)


def shown(key: bytes | None, value: Any, headers: Any = ()) -> str:
    """A record for a trace."""
    try:
        marker = codec.decode(key, value, headers)
    except Exception:  # a message
        return repr(value)
    which = marker.runs or marker.offset
    return f"{marker.op} {which} {marker.redeliver_after_ms or ''}"
