"""Kafka in a simulation: its logs, transactions and a consumer group.

Only what kmqpy relies on, and that as Kafka does it: aborted and control records occupy offsets, a
commit reaches each partition by itself, readers stop at the last stable offset.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from confluent_kafka import KafkaError

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker
from kmqpy.kafka.settings import MARKERS_SUFFIX, PRIORITY_SUFFIX, RETRY_SUFFIX

from .journal import Decided, Opened, Written
from .world import EPOCH_MS, FIRST, World

CONTROL = "control"
TRANSACTION_TIMEOUT_MS = 2_000
GROUP_SESSION_MS = 1_500
LANE_SUFFIXES = ("", f"{PRIORITY_SUFFIX}1", RETRY_SUFFIX)
"""Of the main lane, of one of urgent messages, and of the retry lane, to which the others' copies go."""
_LANE = 100


def part_of(topic: str, partition: int) -> int:
    """The number of a partition among those of all lanes; in the main lane it is that of the partition."""
    return partition + _LANE * next((n for n in (1, 2) if LANE_SUFFIXES[n] in topic), 0)


def main_partition(part: int) -> int:
    """The partition of the main lane that a client has if it has this one."""
    return part % _LANE


def topic_of(main_topic: str, part: int) -> str:
    """The topic of the lane that this partition is of, where this is the one of the main lane."""
    queue = main_topic.removesuffix(MARKERS_SUFFIX)
    return f"{queue}{LANE_SUFFIXES[part // _LANE]}{main_topic[len(queue) :]}"


class Fenced(Exception):
    """Another producer has this transactional id now, or the transaction was timed out."""


class InvalidTxnState(Exception):
    """The coordinator has no transaction that this request can be of."""


class OutOfOrder(InvalidTxnState):
    """What this producer has written before is no more: its log was cut back."""


class Record:
    """A record of a log, with the methods of confluent_kafka.Message."""

    __slots__ = (
        "_headers",
        "_key",
        "_log",
        "_value",
        "at",
        "believed",
        "by",
        "confirmed",
        "copies",
        "cut_at",
        "decoded",
        "epoch",
        "has_end",
        "hung",
        "is_of_halted",
        "meant",
        "ms",
        "queue_end",
        "txn",
        "was_aborted",
    )
    problem: KafkaError | None = None

    def __init__(
        self,
        log: "Log",
        at: int,
        ms: int,
        key: bytes | None,
        value: Any,
        headers: list[tuple[str, bytes | None]],
        txn: "Txn | None",
        by: str,
    ) -> None:
        self._log = log
        self.at = at
        self.epoch = log.epoch
        self.ms = ms
        self._key = key
        self._value = value
        self._headers = headers
        self.txn = txn
        self.by = by
        self.confirmed = True
        self.decoded: Any = None  # for the checker
        # Of a tracker: an end marker knows the copies of what it ends, by offset.
        self.copies: dict[int, Record] = {}
        self.has_end = False
        # Of a marker of a client: for which topics it meant it, and how many messages there were then.
        self.believed = FIRST
        self.queue_end = 0
        # Of a client that stood still and lost the partition meanwhile.
        self.is_of_halted = False
        # When it was cut away, in ms of virtual time.
        self.cut_at: float | None = None
        # Of what transaction it was whose end was cut away; and whether such an end was an abort.
        self.hung: Txn | None = None
        self.was_aborted = False
        # Of a start marker, where logs may be cut back: the messages that it means, by number.
        self.meant: dict[int, Record] = {}

    def append(self, *, confirmed: bool) -> None:
        """Write this record, made beforehand, to the log that has the name now."""
        broker = self._log.broker
        self._log = broker.logs[self._log.topic, self._log.partition]
        self.at, self.ms, self.epoch = len(self._log.records), broker.time_ms(), self._log.epoch
        self.confirmed = confirmed
        self._log.records.append(self)
        broker.world.journal.append(Written(self))
        self._log.tell()

    @property
    def log(self) -> "Log":
        """Where it stands."""
        return self._log

    @property
    def is_cut(self) -> bool:
        """Whether it was cut away."""
        return self.cut_at is not None

    @property
    def was_committed(self) -> bool:
        """Whether it was, and the end of its transaction was cut away."""
        return self.hung is not None and self.hung.state == "committed"

    @property
    def copied(self) -> bool:
        """Whether a tracker made it."""
        return self.by.startswith("tracker")

    def error(self) -> KafkaError | None:
        return self.problem

    def topic(self) -> str:
        return self._log.topic

    def partition(self) -> int:
        return self._log.partition

    @property
    def part(self) -> int:
        """Its partition among those of all lanes."""
        return part_of(self._log.topic, self._log.partition)

    def offset(self) -> int:
        return self.at

    def leader_epoch(self) -> int:
        return self.epoch

    def timestamp(self) -> tuple[int, int]:
        return 2, self.ms

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> Any:
        return self._value

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self._headers

    @property
    def is_data(self) -> bool:
        """Whether this is a record that is or will be seen, in the end."""
        return self._value is not CONTROL and (self.txn is None or self.txn.state == "committed")


class NoTopic(Record):
    """What a consumer gives for a partition of a topic that is gone."""

    __slots__ = ()
    problem = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)

    def __init__(self, log: "Log") -> None:
        super().__init__(log, -1, 0, None, None, [], None, "broker")


class OutOfRange(NoTopic):
    """What a consumer with auto.offset.reset=error gives for an offset that the log does not have."""

    __slots__ = ()
    problem = KafkaError(KafkaError._AUTO_OFFSET_RESET)


@dataclass(eq=False)
class Txn:
    """A transaction: state open, committed or aborted.

    epoch, number  of its producer, and which one of its transactions it is
    early   a request of an earlier one has ended it, which arrived late
    hangs_of  the transaction of which this is a part whose end was cut away
    places  what was added to it: records come in there only
    """

    transactional_id: str
    by: str
    epoch: int
    number: int
    state: str = "open"
    early: bool = False
    hangs_of: "Txn | None" = None
    places: set[tuple[str, int]] = field(default_factory=set)
    logs: list["Log"] = field(default_factory=list)

    def is_part_of(self, other: "Txn") -> bool:
        """Whether they are one for their producer: a transaction that was ended early goes on as another."""
        ours, theirs = ((one.transactional_id, one.epoch, one.number) for one in (self, other))
        return ours == theirs


class Log:
    """One partition of a topic, whole: what was deleted stays here for the checker."""

    def __init__(self, broker: "Broker", topic: str, partition: int, number: int = FIRST) -> None:
        self.broker = broker
        self.number = number
        self.topic = topic
        self.partition = partition
        self.records: list[Record] = []
        self.start = 0
        self.epoch = 0
        """Of its leader."""
        self.open: dict[Txn, int] = {}
        self.forgotten: set[Txn] = set()
        """Open transactions whose records here were cut away: only their coordinator knows of them."""
        self.hanging: dict[str, Txn] = {}
        """By transactional id, what is of no transaction that the broker knows: an old broker has let it in,
        or the end of the transaction was cut away."""
        self.lag_end = 0
        """What stands before that was written while some brokers still told of the topics before."""
        self.readers: list[Callable[[], None]] = []

    @property
    def end(self) -> int:
        return len(self.records)

    @property
    def stable(self) -> int:
        """The last stable offset."""
        return min(self.open.values()) if self.open else len(self.records)

    def append(
        self,
        key: bytes | None,
        value: Any,
        headers: list[tuple[str, bytes | None]],
        by: str,
        txn: Txn | None = None,
    ) -> int:
        at = len(self.records)
        if txn is not None and txn not in self.open and value is not CONTROL:
            self.open[txn] = at
            txn.logs.append(self)
        record = Record(self, at, self.broker.time_ms(), key, value, headers, txn, by)
        self.records.append(record)
        self.broker.world.journal.append(Written(record))
        if txn is None:
            self.tell()
        return at

    def elect(self) -> None:
        """The leader is another broker from now on, or the same once more."""
        self.epoch += 1
        self.broker.world.trace("broker", f"{self.topic} {self.partition} has epoch {self.epoch}")

    def cut(self, at: int) -> list[Record]:
        """Cut the log back to this offset; returns what was cut away. The next leader has another epoch.

        Kafka makes the state of transactions anew from what is left: a transaction whose records are gone is
        not open here, but its coordinator will end it here; one whose end is gone hangs.
        """
        gone = self.records[at:]
        del self.records[at:]
        self.elect()
        for record in gone:
            record.cut_at = self.broker.world.now
        for txn, first in list(self.open.items()):
            if first >= at:
                del self.open[txn]
                if self.hanging.get(txn.transactional_id) is txn:
                    del self.hanging[txn.transactional_id]
                else:
                    self.forgotten.add(txn)
        for ended in {record.txn for record in gone if record._value is CONTROL} - {None}:
            self._let_hang(ended)
        return gone

    def _let_hang(self, ended: Txn) -> None:
        left = [record for record in self.records if record.txn is ended and record._value is not CONTROL]
        if not left:
            return
        of = ended.hangs_of or ended
        hangs = self.hanging.get(ended.transactional_id)
        if hangs is None:
            hangs = Txn(ended.transactional_id, ended.by, ended.epoch, ended.number, hangs_of=of)
            self.hanging[ended.transactional_id] = hangs
        self.open[hangs] = min(left[0].at, self.open.get(hangs, left[0].at))
        for record in left:
            record.txn, record.hung = hangs, record.hung or ended
            record.was_aborted |= ended.state == "aborted"

    def end_hanging(self) -> None:
        """An operator ends what hangs, as the other partitions of the transaction show it."""
        for hangs in [one for one in self.hanging.values() if one.hangs_of is not None]:
            assert hangs.hangs_of is not None
            hangs.state = hangs.hangs_of.state
            del self.hanging[hangs.transactional_id]
            self.finish(hangs)

    def epoch_end(self, epoch: int) -> int:
        """Where the records end that were written in this epoch or before; a leader tells it who asks."""
        return next((record.at for record in self.records if record.epoch > epoch), len(self.records))

    def finish(self, txn: Txn) -> None:
        """Write the control record that ends `txn` here; once."""
        if txn in self.open or txn in self.forgotten:
            self.open.pop(txn, None)
            self.forgotten.discard(txn)
            self.append(None, CONTROL, [], "broker", txn)
            self.tell()
            if (hangs := self.hanging.pop(txn.transactional_id, None)) is not None:
                hangs.state = txn.state
                self.finish(hangs)

    def read(
        self, position: int, limit: int, *, uncommitted: bool = False, cautious: bool = True
    ) -> tuple[list[Record], int]:
        """Up to `limit` visible records from `position` on, and where to go on."""
        found: list[Record] = []
        end = len(self.records) if uncommitted or not cautious else self.stable
        records = self.records
        while position < end and len(found) < limit:
            record = records[position]
            position += 1
            if record._value is CONTROL:
                continue
            if uncommitted or record.txn is None or record.txn.state == "committed":
                found.append(record)
        return found, position

    def tell(self) -> None:
        for tell in self.readers:
            tell()


@dataclass(eq=False)
class _Coordinator:
    epoch: int = 0
    txn: Txn | None = None
    ending: Txn | None = None
    last: str | None = None
    """How the last transaction of this epoch ended; None: there was none."""


class Broker:
    """Kafka: topics, transaction coordinators, a clock of its own."""

    def __init__(self, world: World, topics: list[str], partitions: int) -> None:
        self.world = world
        self.skew_ms = 0.0
        self.partitions = partitions
        self.logs = {(topic, p): Log(self, topic, p) for topic in topics for p in range(partitions)}
        self.missing: set[str] = set()
        self.refusing: set[str] = set()
        """Topics that can be read, and not be written to."""
        self.verifies = True
        """False: a broker before 3.6 lets records in that are of no transaction."""
        self.number = FIRST
        """Of the topics of the queue."""
        self.past: list[dict[tuple[str, int], Log]] = []
        """The logs of those that are no more."""
        self.was_cut = False
        """Whether some log was cut back."""
        self.out_of_order: set[tuple[str, tuple[str, int]]] = set()
        """Transactional ids, and where Kafka refuses the next record of their producers, which would follow
        one that was cut away."""
        self._lagging: list[Log] = []
        self._coordinators: dict[str, _Coordinator] = {}

    @property
    def has_lanes(self) -> bool:
        """Whether the queue has a retry lane, or had one."""
        return any(RETRY_SUFFIX in topic for topic, _ in self.logs)

    def time_ms(self) -> int:
        return EPOCH_MS + int(self.world.now + self.skew_ms)

    def delete(self, topics: list[str]) -> None:
        """The topics of the queue are no more, nor is what open transactions had written there."""
        self.missing.update(topics)
        for log in self._of(topics):
            for txn in log.open:
                txn.logs.remove(log)
            log.open.clear()

    def create(self, topics: list[str], lag_ms: float) -> None:
        """Make topics of these names, whose offsets begin at 0; it takes a while until all brokers know."""
        self.end_lag()  # for the topics before, whose time is over
        self.number += 1
        self.past.append({(log.topic, log.partition): log for log in self._of(topics)})
        for log in self._of(topics):
            anew = self.logs[log.topic, log.partition] = Log(self, log.topic, log.partition, self.number)
            anew.readers = log.readers
            log.readers = []
            anew.tell()
        self.missing.difference_update(topics)
        if lag_ms:
            self._lagging = self._of(topics)
            self.world.at(lag_ms, self.end_lag)

    def end_lag(self) -> None:
        """All brokers know which topics there are."""
        for log in self._lagging:
            log.lag_end = log.end
        self._lagging = []

    def cut(self, log: Log, at: int, *, refuses: Callable[[], bool]) -> None:
        """Cut a log back; `refuses`: whether it knows the producers' sequence numbers then."""
        self.was_cut = True
        for record in log.cut(at):
            if record.txn is not None and refuses():
                self.out_of_order.add((record.txn.transactional_id, (log.topic, log.partition)))

    def _begin_anew(self, transactional_id: str) -> None:
        """Its producer has another epoch, and counts its records anew."""
        self.out_of_order = {one for one in self.out_of_order if one[0] != transactional_id}

    def _of(self, topics: list[str]) -> list[Log]:
        return [log for (topic, _), log in self.logs.items() if topic in topics]

    def number_told(self) -> int:
        """The number of the topics of the queue, as the broker says that is asked."""
        lags = self._lagging and self.world.topics_rng.random() < 0.5
        return self.number - 1 if lags else self.number

    def init(self, transactional_id: str) -> int:
        """Fence all others of this id and abort what they left open; the new epoch."""
        found = self._coordinators.setdefault(transactional_id, _Coordinator())
        self._complete(found)
        found.epoch += 1
        self._abort(found)
        self._begin_anew(transactional_id)
        found.last = None
        self.world.journal.append(Opened(transactional_id))
        return found.epoch

    def add_partition(
        self, transactional_id: str, epoch: int, by: str, number: int, place: tuple[str, int]
    ) -> None:
        """Begin the transaction, if none is open, and add a partition to it."""
        found = self._checked(transactional_id, epoch)
        self._complete(found)
        if found.txn is None:
            txn = found.txn = Txn(transactional_id, by, epoch, number)
            self.world.at(TRANSACTION_TIMEOUT_MS, lambda: self._expire(found, txn))
        found.txn.number = max(number, found.txn.number)
        found.txn.places.add(place)

    def send(
        self,
        transactional_id: str,
        epoch: int,
        by: str,
        number: int,
        place: tuple[str, int],
        key: bytes | None,
        value: Any,
        headers: list[tuple[str, bytes | None]],
    ) -> int:
        found = self._checked(transactional_id, epoch)
        txn = found.txn
        if txn is None or place not in txn.places:
            if self.verifies:
                raise InvalidTxnState
            new = Txn(transactional_id, by, epoch, number)
            txn = self.logs[place].hanging.setdefault(transactional_id, new)
        if (transactional_id, place) in self.out_of_order:
            raise OutOfOrder
        txn.number = max(number, txn.number)
        return self.logs[place].append(key, value, headers, by, txn)

    def end_transaction(self, transactional_id: str, epoch: int, number: int, *, commit: bool) -> bool:
        """Decide; the partitions learn of it a little later, each by itself.

        Returns True if it has ended a later transaction of the producer than this `number`, since nothing
        tells a late request of an earlier one from that.
        """
        found = self._checked(transactional_id, epoch)
        txn, outcome = found.txn, "committed" if commit else "aborted"
        if txn is None:
            if found.last != outcome:
                raise InvalidTxnState
            return False
        found.txn = None
        found.last = txn.state = outcome
        if not commit:
            self._begin_anew(transactional_id)
        txn.early = txn.number > number
        found.ending = txn
        self._decided(txn)
        for log in txn.logs:
            self.world.at(self.world.latency(), lambda log=log: log.finish(txn))
        return txn.early

    def _decided(self, txn: Txn) -> None:
        if txn.logs:  # else nobody can know that there was one
            self.world.journal.append(Decided(txn))

    def _checked(self, transactional_id: str, epoch: int) -> _Coordinator:
        found = self._coordinators[transactional_id]
        if found.epoch != epoch:
            raise Fenced
        return found

    def _complete(self, found: _Coordinator) -> None:
        """What follows a decision waits until every partition knows it."""
        if found.ending is not None:
            for log in found.ending.logs:
                log.finish(found.ending)
            found.ending = None

    def _abort(self, found: _Coordinator) -> None:
        if found.txn is not None:
            found.last = found.txn.state = "aborted"
            self._decided(found.txn)
            for log in found.txn.logs:
                log.finish(found.txn)
            found.txn = None

    def _expire(self, found: _Coordinator, txn: Txn) -> None:
        if found.txn is txn:
            self.world.trace("broker", f"transaction of {txn.by} timed out")
            found.epoch += 1
            self._abort(found)


class Group:
    """A consumer group: cooperative, so a partition moves only after its owner gave it up."""

    def __init__(self, world: World, partitions: int) -> None:
        self.world = world
        self.partitions = partitions
        self.members: list[Any] = []
        self.owner: dict[int, Any] = {}
        self.committed: dict[int, tuple[int, str]] = {}
        self.set_back: dict[int, float] = {}
        """Partitions that are set back when somebody gets them next, and to which part of their offset."""
        self.taking_again: dict[int, set[str]] = {}
        """By partition that was set back, the clients that got it since."""
        self.set_back_to: Callable[[int, int], None] = lambda _partition, _offset: None
        """Called when a partition is set back, with its offset then."""

    def join(self, member: Any) -> None:
        self.members.append(member)

    def leave(self, member: Any) -> None:
        if member in self.members:
            self.members.remove(member)
        self.owner = {p: owner for p, owner in self.owner.items() if owner is not member}
        for other in self.members:
            other.wake()

    def target(self, partition: int) -> Any:
        """Who is to have the partition; None: there is nobody."""
        return self.members[partition % len(self.members)] if self.members else None

    def assign(self, partition: int, member: Any) -> None:
        """Give a partition that nobody has to `member`."""
        self.owner[partition] = member
        for part in [one for one in self.set_back if main_partition(one) == partition]:
            share = self.set_back.pop(part)
            if part in self.committed:
                offset = int(share * self.committed[part][0])
                self.committed[part] = (offset, "")
                self.set_back_to(part, offset)
                self.taking_again.setdefault(part, set())
        for part, members in self.taking_again.items():
            if main_partition(part) == partition:
                members.add(member.process.name)

    def silent(self, member: Any) -> None:
        """Nothing is heard of `member` from now on; expel it when that lasts."""

        def look() -> None:
            if member in self.members and member.process.silent_to_kafka:
                self.world.trace("group", f"{member.process.name} expelled")
                member.process.was_expelled = True
                self.leave(member)

        self.world.at(GROUP_SESSION_MS, look)

    def commit(self, member: Any, offsets: list[tuple[int, int, str]]) -> bool:
        """Store (partition, offset, metadata); whether the member may."""
        if any(self.owner.get(main_partition(part)) is not member for part, _, _ in offsets):
            return False
        for partition, offset, metadata in offsets:
            self.committed[partition] = (offset, metadata)
            if self.world.tracing:
                self.world.trace(member.process.name, f"committed {partition}@{offset} {metadata}")
        return True


def decoded(record: Record) -> list[Marker]:
    """The single markers that a record stands for."""
    if record.decoded is None:
        record.decoded = _decoded(record)
    found: list[Marker] = record.decoded
    return found


LIAR = "liar"
"""Writes markers of messages that don't exist and of other partitions, with timestamps far ahead."""


def _decoded(record: Record) -> list[Marker]:
    if record.by == LIAR:
        return []
    topic = codec.topic_tag(f"{record.topic().removesuffix(MARKERS_SUFFIX)}-{record.log.number}")
    try:
        marker = codec.decode(record.key(), record.value(), record.headers(), topic=topic)
    except DecodeError:
        return []
    if not marker.runs:
        return [marker]
    return [replace(marker, offset=offset, runs=()) for offset in marker.offsets()]
