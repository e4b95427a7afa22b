"""The clients, producers and users of a simulation: kmqpy's own code (see `stepwise`), in single steps."""

import contextlib
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from kmqpy.core.durations import MIN_LEASE_MS
from kmqpy.errors import Closed, ReceiptError, TopicError, Unavailable
from kmqpy.kafka.client import assigned_partition, commit_check
from kmqpy.kafka.message_headers import DELIVER_AT
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topic_identity import TopicIds

from . import collapsing
from .connection import Connection, timed_out
from .history import History
from .kafka import Errors, Module
from .log_readers import LogReader, RepeatedReader
from .model import LANE_SUFFIXES
from .stepwise import stepwise
from .surroundings import CLOCK, QUEUE, NothingHangsWatch, NoWatch, Threading, Topics, number_of, records
from .world import Process, Steps

_identity = stepwise("kmqpy.kafka.topic_identity", set(), librdkafka=Module)


class TopicWatch(_identity.TopicWatch):
    """The real TopicWatch, whose process is known by the topics that it was told of last."""

    def __init__(self, connection: Connection, *rest: Any) -> None:
        super().__init__(connection, *rest)
        self._process = connection.process

    def _note_answer(self, ids: TopicIds) -> None:
        super()._note_answer(ids)
        self._process.topics_of = number_of(self._ids.queue)


def watch(connection: Connection, *rest: Any) -> Any:
    """What notices that topics are recreated, where that happens."""
    world, rest = connection.world, rest[:3]  # nobody adds lanes
    return world.controls.watch(connection, *rest) if world.topics_change else NoWatch(connection, *rest)


cut_search = stepwise(
    "kmqpy.kafka.cut_search",
    {"find_cut", "find", "_cut_before", "_ask", "_ask_end", "_first_from"},
    librdkafka=Module,
    kafka_errors=Errors,
    SYSTEM_CLOCK=CLOCK,
)
_commit_check = stepwise(
    "kmqpy.kafka.client.commit_check",
    {"ask", "cut_back", "with_markers_cut_back", "_taken_to"},
    find_cut=cut_search.find_cut,
    RepeatedReader=RepeatedReader,
    _taken_to=commit_check._taken_to,  # that of a record, which does not wait
)
_crash_recovery = stepwise(
    "kmqpy.kafka.client.crash_recovery",
    {
        "find_starts",
        "recover",
        "check",
        "_recover",
        "_activate",
        "_has_told",
        "_find_starts",
        "_believed",
        "_find_in_log",
    },
    CommitCheck=_commit_check.CommitCheck,
    partition_reader=LogReader,
)
CrashRecovery = _crash_recovery.CrashRecovery
find_starts = _crash_recovery.find_starts
_record_fetcher = stepwise("kmqpy.kafka.client.record_fetcher", {"fetch", "fetch_ahead"})


def _returns_in_time(call: Any, timeout_s: float = 1) -> bool:
    """Make a call now, or let a consumer whose Kafka is away leave its group later."""
    if timeout_s:
        return call() is None
    call.__self__.leave_later()
    return False


_leave_group = stepwise("kmqpy.kafka.client.leave_group", set(), returns_in_time=_returns_in_time)
_group_member = stepwise(
    "kmqpy.kafka.client.group_member",
    {
        "poll",
        "keep_alive",
        "serve",
        "_poll_ahead",
        "_look_for_cuts",
        "_prepare",
        "_on_revoke",
        "_wait_for_outcomes",
    },
    librdkafka=Module,
    ascending_offsets=records.ascending_offsets,
    records_by_partition=records.records_by_partition,
    CrashRecovery=lambda connection, *rest: connection.world.controls.recovery(connection, *rest),
    CommitCheck=_commit_check.CommitCheck,
    RecordFetcher=_record_fetcher.RecordFetcher,
    leave_group=_leave_group.leave_group,
    returns_in_time=_leave_group.returns_in_time,
)
_start_markers = stepwise(
    "kmqpy.kafka.client.start_markers",
    {"wait_until_confirmed", "start"},
    librdkafka=Module,
)
_start_markers._MANY = 3  # batches are small here
_writer = stepwise(
    "kmqpy.kafka.client.marker_writer",
    {"_serve"},
    librdkafka=Module,
    StartMarkerWriter=_start_markers.StartMarkerWriter,
    threading=Threading,
)
_topics_in_use = stepwise(
    "kmqpy.kafka.client.topics_in_use",
    set(),
    MarkerWriter=lambda connection, *rest, **more: connection.world.controls.marker_writer(
        connection, *rest, **more
    ),
    Topics=Topics,
    TopicWatch=watch,
    check_topics=lambda *_: None,
)
_late_acks = stepwise(
    "kmqpy.kafka.copies.late_acks",
    {"examine", "find_acknowledged", "_read"},
    partition_reader=SimpleNamespace(RepeatedReader=RepeatedReader),
    Topics=Topics,
    threading=Threading,
)
LateAckCheck = _late_acks.LateAckCheck
_receiver = stepwise(
    "kmqpy.kafka.client.receiver",
    {"receive", "poll", "serve", "start", "confirm", "keep_alive", "_start", "_confirm", "find_acknowledged"},
    LateAckCheck=lambda connection, *rest: connection.world.controls.late_ack_check(connection, *rest),
    GroupMember=lambda connection, *rest, **more: connection.world.controls.member(connection, *rest, **more),
    Collapsing=lambda connection, *rest: connection.world.controls.collapsing(connection, *rest),
    have_headers=records.have_headers,
    HangingWatch=NothingHangsWatch,
)


class Receiver(_receiver.Receiver):
    """The client's Receiver, whose process is known by what it takes."""

    def start(self, records: list[Any], *rest: Any) -> Steps:
        self._connection.process.taking.update(((one.part, one.at), one) for one in records)
        yield from super().start(records, *rest)


class _Housekeeper:
    """The client's Housekeeper, whose thread does nothing: what it would do is done in client()."""

    is_started = True

    def __init__(self, *_: Any, **_more: Any) -> None:
        pass

    def ensure_started(self) -> None:
        pass

    def join(self) -> None:
        pass


_client = stepwise(
    "kmqpy.kafka.client.consumer",
    {
        "_receive_once",
        "_look_for_topics",
        "nack",
        "extend",
        "dead_letter",
        "_end_acknowledged",
        "poll",
        "serve",
    },
    TopicsInUse=_topics_in_use.TopicsInUse,
    Receiver=Receiver,
    Housekeeper=_Housekeeper,
)
_lanes = stepwise(
    "kmqpy.kafka.client.lanes",
    {"_round", "each", "poll", "take_turn", "take_rest", "wait", "start", "_receive_ahead", "_serve"},
    QueueConsumer=_client.QueueConsumer,
)
_receiver._START_TIMEOUT_S = 0.3  # less than it may take until a start marker counts as failed


def started(partitions: Any) -> Any:
    """What a writer says that has written all start markers."""
    return _start_markers.StartOutcome(dict.fromkeys(partitions, -1), {})


class GroupMember(_group_member.GroupMember):
    """The client's GroupMember, which may stand still when it has fetched messages (rule R30)."""

    def poll(self, max_records: int, wait_s: float) -> Steps:
        polled = yield from super().poll(max_records, wait_s)
        if polled[0]:
            self._connection.world.stall_client(self._connection.process)
            yield 0.0
        return polled


class Claim:
    """kmqpy.kafka.client.start_markers.StartBatch that says so, true or not."""

    def __init__(self, partitions: Any, starting: Any = None) -> None:
        self._started = started(partitions)
        self._starting = starting

    def wait_until_confirmed(self, closed=None) -> Steps:
        """Say it at once, or when the truth is known."""
        if self._starting is not None:
            yield from self._starting.wait_until_confirmed()
        yield 0.0
        return self._started


class MarkerWriter(_writer.MarkerWriter):
    """The client's MarkerWriter, whose thread is an actor that sleeps while there is nothing to do."""

    def __init__(self, connection: Connection, *rest: Any, **more: Any) -> None:
        self._world = connection.world
        self._connection = connection
        super().__init__(connection, *rest, **more)
        self._actor = connection.process.spawn(self._run())

    @property
    def idle(self) -> bool:
        return not (self._collected or self._failed or len(self._producer))

    @property
    def starts(self) -> Any:
        """What writes start markers; controls override `start`."""
        return self

    def get_ready(self) -> None:
        self._starts.get_ready()

    def start(self, *what: Any) -> Steps:
        return (yield from self._starts.start(*what))

    def outcome_known(self, partition: int) -> bool:
        return self._starts.outcome_known(partition)

    def put(self, *what: Any, **how: Any) -> None:
        super().put(*what, **how)
        self._wake()

    def write_assignments(self, ticks: Any, timeout_s: float) -> Steps:
        """The same, step by step."""
        waiters = {tick.partition: self._put_unflushed(tick) for tick in ticks}
        until = self._world.now + timeout_s * 1000
        while any(waiter.left for waiter in waiters.values()) and self._world.now < until:
            yield 10.0
        return {partition for partition, waiter in waiters.items() if waiter.left}

    def write_in_steps(self, items: Any) -> Steps:
        """write(), step by step and without a time-out."""
        waiter = self._put_apart(items)
        while waiter.left:
            yield 10.0
            if self._closing.is_set():
                raise Closed

    def _wake(self) -> None:
        self._world.wake(self._actor, self._world.latency())

    def _new_producer(self, **settings: Any) -> Any:
        producer = super()._new_producer(**settings)
        producer.wake = self._reported
        return producer

    def _reported(self) -> None:
        for actor in (self._actor, self._connection.process.main):
            self._world.wake(actor, 0.5)

    def _run(self) -> Steps:
        for delay_ms in self._serve():
            yield float("inf") if self.idle else delay_ms


def client(
    connection: Connection, queue: QueueSettings, history: History, *, lease_ms: int, batch: int, fmt: str
) -> Steps:
    """A process that takes messages and does with them what users do."""
    process, world = connection.process, connection.world
    while True:
        try:
            settings = replace(queue, markers=fmt)  # as before and after `kmq queue alter`
            make = LanesConsumer if queue.has_lanes else _client.QueueConsumer
            own = make(settings, connection, holder=process.name, clock=process)
            break
        except TopicError:
            if process.leaving and queue.has_lanes:
                return
            yield 200.0
    consumers = own.consumers if queue.has_lanes else [own]
    members = [one.receiver.join() for one in consumers]
    process.client = own
    logs = [log for (topic, _), log in connection.broker.logs.items() if topic in queue.lane_names]
    readers = [log.readers for log in logs]
    wake = lambda: world.wake(process.main, world.latency())  # noqa: E731
    for some in readers:
        some.append(wake)

    def use(message: Any, lease: int) -> None:
        history.handed_out(process, message)
        consumer = own._by_lane([message])[0][0] if queue.has_lanes else own
        process.spawn(_use(connection, consumer, message, lease, history), 30 * world.random())

    try:
        while not process.leaving:
            lease = int(lease_ms * (0.5 + world.random())) if world.random() < 0.3 else lease_ms
            lease = max(MIN_LEASE_MS, lease)
            asked = process.monotonic()
            try:
                messages = yield from own._receive_once(1 + int(batch * world.random()), 0.0, lease)
            except TopicError:
                yield 200 * world.random()
                continue
            iterates = lease == lease_ms and (not queue.has_lanes or queue.priorities > 1)
            if iterates and world.random() < 0.2:  # `for message in client`: one after the other
                until = asked + lease_ms / 1000
                for one, some in own._split(messages[1:]) if queue.has_lanes else [(own, messages[1:])]:
                    one.read_ahead.extend(some, until)
                messages = messages[:1]
            for message in messages:
                use(message, lease)
            if messages and world.faults and world.random() < (0.4 if queue.late_acks else 0.05):
                for _ in range(3):  # the user's code is busy, the housekeeper goes on
                    yield 600.0
                    for one in consumers:
                        one._follow_topics()
                        yield from one.receiver.keep_alive()
                        one.read_ahead.give_back_stale()
            while not queue.has_lanes and own.read_ahead:
                own.read_ahead.give_back_stale()
                yield 40 * world.random()
                # QueueConsumer.__iter__ must look, too: we may have stood still.
                if (message := own.read_ahead.pop()) is not None and until > process.monotonic():
                    use(message, lease)
            while queue.has_lanes and any(one.read_ahead for one in consumers):
                yield 40 * world.random()
                for one in consumers:
                    one.read_ahead.give_back_stale()
                if (found := own._pop()) is not None:
                    level, message = found
                    use(message, lease)
                    if level and world.random() < 0.5:
                        with contextlib.suppress(TopicError):
                            yield from own._receive_ahead(own._lanes[:level], 3, 0)
            waiting = any(
                member._commit_schedule.uncommitted
                or any(
                    known.phase is not assigned_partition.ReceivePhase.ACTIVE
                    for known in member._partitions.values()
                )
                for member in members
            )
            yield 20 * world.random() if messages else 100.0 if waiting else 400.0
        for _ in range(20):
            if not all(map(_is_idle, consumers)):
                yield 100.0
        for one in consumers:
            # No time passes in close(): one that would wait in vain must not begin to.
            one._topics.writer.is_away = not _is_idle(one)
        own.close()
        world.trace(process.name, "closed")
    finally:
        for some in readers:
            some.remove(wake)


class LanesConsumer(_lanes.LanesConsumer):
    """The client's LanesConsumer, which receives as a QueueConsumer does here."""

    @property
    def consumers(self) -> list[Any]:
        """Those of the lanes, in their order of precedence."""
        return [lane.consumer for lane in self._lanes]

    def _receive_once(self, most: int, wait_s: float, lease_ms: int) -> Steps:
        return (yield from self._round(most, wait_s, lease_ms))


def _is_idle(consumer: Any) -> bool:
    """Whether it waits for no markers to be confirmed."""
    writer = consumer._topics.writer
    return writer.idle and writer._starts.all_outcomes_known()  # type: ignore[no-any-return]


def _use(connection: Connection, own: Any, message: Any, lease: int, history: History) -> Steps:
    """What a user does with one message, unless the client is closed before."""
    with contextlib.suppress(Closed):
        try:
            yield from _use_open(connection, own, message, lease, history)
        except (ReceiptError, TopicError, Unavailable) as error:
            if not (connection.world.topics_change or own._queue.has_lanes):
                raise
            connection.world.trace(connection.process.name, f"refused: {error}")


def _use_open(connection: Connection, own: Any, message: Any, lease: int, history: History) -> Steps:
    world, process = connection.world, connection.process
    if world.faults and message.body in history.poison:
        yield 20 * world.random()
        world.kill(process)
        return

    def ack() -> None:
        own.ack(message)
        history.acks(process, message)

    def nack(**how: Any) -> Steps:
        history.asks(process, message)
        yield from own.nack(message, reason="simulated", **how)

    def extend(lease: float) -> Steps:
        history.asks(process, message)
        lost = yield from own.extend(message, lease=lease / 1000)
        history.lost[process.name] += len(lost)

    def dead_letter() -> Steps:
        history.asks(process, message)
        yield from own.dead_letter(message, reason="simulated")

    if world.faults and own._queue.late_acks and world.random() < 0.4:  # while the copy waits, with luck
        yield lease * (1 + world.random())
        late = world.random()
        if late < 0.15:
            yield from nack(delay=2 * world.random())
        elif late < 0.25:
            yield from dead_letter()
        elif late < 0.55:
            yield from extend(lease * (1 + world.random()))
            yield lease * world.random()
            yield from extend(lease * (1 + world.random()))
            yield lease * 2 * world.random()
            ack()
        else:
            ack()
        return
    luck = world.random() if world.faults else 0.0
    if luck < 0.15:  # as ack(confirmed=True)
        own.check_open()
        writer, places = own._locate(own._places.offsets_of, [message])
        history.acks(process, message)
        yield from writer.write_in_steps(places.items())
        history.written(process, message)
        own._note_finished(places, "ack")
    elif luck < 0.45:
        ack()
    elif luck < 0.55:  # in time or late
        yield lease * 1.5 * world.random()
        ack()
    elif luck < 0.65:
        yield lease * world.random()
        yield from extend(max(MIN_LEASE_MS, lease * (0.5 + world.random())))
        yield lease * 1.3 * world.random()
        ack()
    elif luck < 0.74:
        yield lease * 0.5 * world.random()
        delay = 0 if world.random() < 0.5 else world.random()
        counts = world.random() < 0.7
        yield from nack(delay=delay, count=counts)
    elif luck < 0.78:
        yield from dead_letter()
    elif luck < 0.88:  # F14: what comes after an ack changes nothing
        ack()
        yield 300 * world.random()
        if world.random() < 0.5:
            yield from extend(lease)
        else:
            yield from nack()
    elif luck < 0.93:  # another process has the receipt
        yield 200 * world.random()
        others = [other for other in world.clients if other.alive and other.client]
        if others:
            yield from _look_for_topics(others[0], message)
            others[0].client.ack(message.receipt)
            history.acks(others[0], message)
    yield 0.0


def _look_for_topics(process: Process, message: Any) -> Steps:
    """QueueConsumer._look_for_topics, which waits: its thread that receives is who looks."""
    if not process.world.topics_change:
        return
    topic_id = Receipt.parse(message.receipt).topic_id
    until = process.monotonic() + 3.0
    while process.client._topics.ids.queue != topic_id and process.monotonic() < until:
        process.world.wake(process.main)
        yield 100.0


def producer(
    connection: Connection,
    history: History,
    *,
    name: str,
    count: int,
    gap_ms: float,
    delays: bool,
    forwards: Random | None = None,
    urgent: Random | None = None,
) -> Steps:
    """Sends `count` messages and records which sends were acknowledged.

    forwards  every third message has the headers of one that is there, as some programs forward them
    urgent    every third message is sent to the lane of urgent messages
    """
    world, process = connection.world, connection.process
    broker = connection.broker
    for number in range(count):
        body = f"{name}-{number}".encode()
        headers: list[tuple[str, bytes | None]] = [("h", b"1")]
        if delays and world.random() < 0.15:
            due = process.wall_ms() + int(1500 * world.random())
            headers.append((DELIVER_AT, b"%d" % due))
        history.attempted.add(body)
        try:
            yield from connection.reach()
            is_urgent = urgent is not None and urgent.random() < 0.3
            place = (f"{QUEUE}{LANE_SUFFIXES[is_urgent]}", int(broker.partitions * world.random()))
            if QUEUE in broker.missing:
                raise timed_out()
            if forwards is not None and forwards.random() < 0.3:
                copies = [one for one in broker.logs[place].records if one.is_data and one.copied]
                if copies:
                    headers = list(forwards.choice(copies[-5:]).headers())
            broker.logs[place].append(b"k", body, headers, process.name)
            history.sent_to[body] = broker.number
            if world.unlucky():
                raise timed_out()
            history.sent.add(body)
        except Exception:  # the outcome is unknown, and the user does not send again
            world.trace(name, f"send of {body!r} of unknown outcome")
        yield gap_ms * world.random()


STEPWISE = (
    _commit_check,
    _crash_recovery,
    _group_member,
    _start_markers,
    _writer,
    _topics_in_use,
    _late_acks,
    collapsing._collapsing,
    _receiver,
    _client,
    _lanes,
)
"""The modules that run in here, which log by their names."""
