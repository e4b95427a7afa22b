"""A member of the consumer group over a consumer that only writes down what it is asked."""

import itertools
import threading
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import AccessDenied, Fenced, TopicError, Unavailable
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.client.assigned_partition import AssignedPartition, StartsFound
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.client.start_markers import StartOutcome
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.markers.records import offsets_of_records
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.telemetry.base import Telemetry

GIVEN = (KafkaConnection(), QueueSettings(name="q"), Telemetry())
IDENTITY = {"ids": TopicIds("Q", "M"), "ids_known": lambda _: True, "announce": lambda _: ()}


class FakeRecord(NamedTuple):
    place: int
    at: int

    def error(self):
        return None

    def partition(self):
        return self.place

    def offset(self):
        return self.at


def record(offset, partition=0):
    return Message(topic="q", value=b"", partition=partition, offset=offset)


class FakeConsumer:
    def __init__(self):
        self.commits = []
        self.polls = 0
        self.offsets = []  # to come first
        self.end = 1_000
        self.of_predecessor = TopicPartition("q", 0)
        self.paused = set()
        self.waited_s = []

    def consume(self, count, timeout):
        self.polls += 1
        self.waited_s.append(timeout)
        if not self.offsets:
            return [FakeRecord(0, 100 + self.polls)]
        some, self.offsets = self.offsets[:count], self.offsets[count:]
        return [record(at) for at in some]

    def get_watermark_offsets(self, place, cached=False, timeout=None):
        return 0, self.end

    def subscribe(self, topics, **callbacks):
        pass

    def seek(self, place):
        self.sought = place.offset

    def committed(self, places, timeout):
        return [self.of_predecessor]

    def incremental_assign(self, places):
        pass

    def pause(self, places):
        self.paused |= {place.partition for place in places}

    def resume(self, places):
        self.paused -= {place.partition for place in places}

    def commit(self, offsets, asynchronous):
        self.commits += [(place.offset, place.metadata) for place in offsets]

    def incremental_unassign(self, places):
        pass


@pytest.fixture
def consumer(monkeypatch):
    fake = FakeConsumer()
    monkeypatch.setattr(librdkafka, "new_consumer", lambda connection, settings: fake)
    return fake


@pytest.fixture
def member(consumer):
    made = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=lambda _: True,
    )
    made._partitions[0] = active(markers_offset=5)
    return made


def active(markers_offset=None):
    """A partition whose predecessor's commit says this markers offset."""
    made = AssignedPartition(0.0)
    made.recovered(Commit(0, markers_offset), StartsFound())
    return made


def apply(member, *offsets, at=None, failed=None):
    """The start markers of messages below `failed` are confirmed, the last at this markers offset."""
    outcome = StartOutcome({} if at is None else {0: at}, {} if failed is None else {0: failed})
    member.apply_start_outcome({0: offsets}, outcome)


def commit(member):
    member._commit_schedule.committed(-1_000.0)
    member.maintain()


@pytest.mark.parametrize(
    ("kafka", "credentials"),
    [
        ({}, ("", "")),
        ({"sasl.mechanism": "PLAIN", "sasl.username": "ann", "sasl.password": "s3cret"}, ("ann", "s3cret")),
    ],
)
def test_librdkafka_fetches_at_once_from_what_is_resumed(monkeypatch, kafka, credentials):
    """It looks at partitions when it is woken, and else once a second; new credentials wake it."""
    woken_by = []
    real = librdkafka.Consumer.set_sasl_credentials

    def wake(consumer, *given):
        woken_by.append(given)
        real(consumer, *given)

    monkeypatch.setattr(librdkafka.Consumer, "set_sasl_credentials", wake)
    consumer = librdkafka.new_consumer(KafkaConnection(bootstrap="127.0.0.1:1", kafka=kafka), {})
    consumer.assign([TopicPartition("q", 0)])
    consumer.pause([TopicPartition("q", 0)])
    assert not woken_by
    consumer.resume([TopicPartition("q", 0)])
    assert woken_by == [credentials]


def test_a_signal_handler_that_has_interrupted_a_poll_closes_without_waiting_for_it(member, consumer, caplog):
    polled = threading.Event()

    def consume(count, timeout):
        member.close()  # as a handler would, in the thread that polls
        return []

    consumer.consume = consume
    consumer.unsubscribe = lambda: None
    consumer.assignment = list
    consumer.close = polled.wait  # librdkafka's waits until no other call of it is going on
    member.poll(1, 0)
    polled.set()
    assert not [one for one in caplog.records if "without an answer" in one.getMessage()]


@pytest.mark.parametrize(("partitions", "ready", "waited_s"), [(0, 0, 0.02), (2, 1, 0.02), (2, 2, 5.0)])
def test_while_partitions_are_not_ready_they_are_looked_after_often(consumer, partitions, ready, waited_s):
    consumer.consume = lambda count, timeout: consumer.waited_s.append(timeout) or []
    clock = SleepingClock()
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: False, clock=clock)
    for n in range(partitions):
        member._partitions[n] = active() if n < ready else AssignedPartition(0.0)
    assert member.poll(10, 5.0) == ([], {})
    clock.sleep(60)
    member.poll(10, 5.0)
    assert consumer.waited_s == [waited_s, 0.02 if ready < partitions else 5.0]  # on standby without any


def test_a_commit_tells_where_the_starts_end_that_it_covers(member, consumer):
    apply(member, 5, 6, 7, at=11)
    commit(member)
    assert consumer.commits == [(8, "kmq2:12:Q:M")]


def test_a_commit_that_failed_is_made_again(member, consumer):
    """Even if no message comes any more: else others believe that the queue waits for its consumer."""
    apply(member, 5, 6, 7, at=11)
    commit(member)
    commit(member)
    assert len(consumer.commits) == 1
    member._on_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), [])
    commit(member)
    assert consumer.commits == [(8, "kmq2:12:Q:M")] * 2


def test_r10_after_a_failed_start_commits_lead_to_the_starts_they_do_not_cover(member, consumer):
    # The starts of 3 to 8 stand at 5 to 9, but that of 4 failed.
    member._partitions[0].commits.receive(6)
    apply(member, *range(3, 9), at=9, failed=4)
    commit(member)
    assert consumer.sought == 4
    # Taken again one by one, their new starts behind the old ones.
    for offset, at in [(4, 10), (5, 11), (6, 12), (7, 13), (8, 14), (9, 15)]:
        member._partitions[0].commits.receive(1)
        apply(member, offset, at=at)
        commit(member)
    assert consumer.commits == [
        (4, "kmq2:5:Q:M"),
        (5, "kmq2:5:Q:M"),
        (6, "kmq2:5:Q:M"),
        (7, "kmq2:5:Q:M"),
        (8, "kmq2:5:Q:M"),
        (9, "kmq2:15:Q:M"),
        (10, "kmq2:16:Q:M"),
    ]


def test_r10_what_is_recovered_and_lies_ahead_keeps_the_older_offset(member, consumer):
    known = member._partitions[0]
    known._add_found(2, StartsFound(OffsetRuns([(9, 1)])))
    apply(member, 7, at=11)
    commit(member)
    apply(member, 10, at=12)
    commit(member)
    assert consumer.commits == [(8, "kmq2:2:Q:M"), (11, "kmq2:13:Q:M")]


@pytest.fixture
def takes(monkeypatch):
    """The markers of partition 0: takes, the queue offset by the markers offset."""
    log = {}

    def scan(_connection, _topic, starts, visit, **_):
        ((partition, start),) = starts.items()
        end = max(log, default=-1) + 1
        for at in sorted(at for at in log if at >= start and partition == 0):
            key, value, headers = codec.encode(Marker(0, log[at], Op.TAKE, 60_000))
            visit(Message(topic="q__markers", key=key, value=value, headers=headers, partition=0, offset=at))
        return {partition: partition_reader.ReadPosition(0, end, end)}

    monkeypatch.setattr(partition_reader, "scan", scan)
    monkeypatch.setattr(partition_reader, "bounds", lambda *_, **__: {0: (0, 1_000)})
    return log


def take_one(member, consumer, offset, markers_offset):
    """Poll and take a message, and commit."""
    consumer.offsets = [offset]
    assert member.poll(1, 0)[1] == {0: range(offset, offset + 1)}
    apply(member, offset, at=markers_offset)
    commit(member)


def test_r10_what_a_predecessor_started_stays_in_reach_of_successors_until_it_is_passed(
    member, consumer, takes
):
    """It died before it could commit; if this member dies, too, the next one must find those starts."""
    takes.update({1: 2, 2: 3, 3: 6, 4: 8})
    consumer.of_predecessor = TopicPartition("q", 0, 3, "kmq2:2:Q:M")
    member._on_assign(consumer, [TopicPartition("q", 0)])
    for offset, at in [(4, 11), (5, 12), (7, 13), (9, 14)]:
        take_one(member, consumer, offset, at)
    assert consumer.commits == [(5, "kmq2:2:Q:M"), (6, "kmq2:2:Q:M"), (8, "kmq2:2:Q:M"), (10, "kmq2:15:Q:M")]


def test_r10_what_was_started_after_all_stays_in_reach_too(member, consumer, takes):
    """Found when a failed start had this member read markers again; 9 was started by another one."""
    member._partitions[0].commits.receive(1)
    apply(member, 4, failed=4)
    member._partitions[0]._retry_at = 0.0
    takes.update({5: 4, 6: 9})
    take_one(member, consumer, 5, 7)
    take_one(member, consumer, 10, 8)
    assert consumer.commits == [(6, "kmq2:5:Q:M"), (11, "kmq2:9:Q:M")]
    assert member.pop_orphaned_starts() == [(0, 4)]


def test_r10_the_older_of_two_readings_is_where_successors_begin(member, consumer, takes):
    takes.update({1: 2, 2: 20})
    consumer.of_predecessor = TopicPartition("q", 0, 3, "kmq2:1:Q:M")
    member._on_assign(consumer, [TopicPartition("q", 0)])
    take_one(member, consumer, 3, 11)
    member._partitions[0].commits.receive(1)
    apply(member, 4, failed=4)
    member._partitions[0]._retry_at = 0.0
    takes.update({12: 4})
    take_one(member, consumer, 5, 13)
    take_one(member, consumer, 21, 14)
    assert consumer.commits == [(4, "kmq2:1:Q:M"), (6, "kmq2:1:Q:M"), (22, "kmq2:15:Q:M")]


def test_a_markers_partition_that_does_not_answer_holds_up_no_other(member, consumer, takes, monkeypatch):
    def unavailable(*_, **__):
        raise Unavailable("Kafka does not answer")

    apply(member, 4, failed=4)
    member._partitions[0]._retry_at = 0.0
    member._partitions[1] = active()
    consumer.consume = lambda count, timeout: [record(3, partition=1)]
    with monkeypatch.context() as patch:
        patch.setattr(partition_reader, "scan", unavailable)
        assert member.poll(1, 0)[1] == {1: range(3, 4)}
    assert member.partitions == [1]
    member._partitions[0]._retry_at = 0.0
    consumer.consume = lambda count, timeout: [record(4)]
    assert member.poll(1, 0)[1] == {0: range(4, 5)}


def test_while_kafka_does_not_tell_the_commit_nothing_is_received(member, consumer, takes):
    """Without that commit it would receive the whole queue again."""
    place, found = SimpleNamespace(error=KafkaError(KafkaError._TIMED_OUT), offset=-1001, metadata=""), []
    consumer.committed = lambda places, timeout: found or [place]
    assign(member, consumer, 0)
    member._prepare()
    assert member.partitions == []
    found.append(TopicPartition("q", 0, 5, "kmq2:0:Q:M"))
    member._partitions[0]._retry_at = 0.0
    consumer.offsets = [5]
    assert member.poll(1, 0)[1] == {0: range(5, 6)}


def test_r22_a_marker_of_a_message_that_does_not_exist_hides_none_that_comes_later(member, consumer, takes):
    takes.update({0: 1_000, 1: 3})
    consumer.of_predecessor = TopicPartition("q", 0, 2, "kmq2:0:Q:M")
    assign(member, consumer, 0)
    consumer.offsets = [2, 3, 1_000]
    assert member.poll(3, 0)[1] == {0: [2, 1_000]}


def test_r24_where_the_markers_end_before_a_commit_they_are_read_from_their_beginning(
    member, consumer, takes
):
    """The markers topic was recreated or cut short."""
    takes.update({0: 5, 1: 7})
    consumer.of_predecessor = TopicPartition("q", 0, 5, "kmq2:9:Q:M")
    assign(member, consumer, 0)
    consumer.offsets = [5, 6, 7, 8]
    assert member.poll(4, 0)[1] == {0: [6, 8]}


class SleepingClock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_r18_a_partition_whose_starts_fail_again_and_again_waits_longer_each_time(consumer, takes):
    clock = SleepingClock()
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: True, clock=clock)
    member._partitions[0] = active(markers_offset=5)

    def waits():
        apply(member, 4, failed=4)
        began = clock.now
        while member.partitions != [0]:
            clock.sleep(0.05)
            consumer.offsets = [4]
            member.poll(1, 0)
        return clock.now - began

    waited = [waits() for _ in range(9)]
    assert 0 < waited[0] < 0.5
    assert all(later > 1.5 * wait or later >= 9.9 for wait, later in itertools.pairwise(waited))
    assert waited[-1] == pytest.approx(10, abs=0.1)
    member._partitions[0].commits.receive(1)
    apply(member, 4, at=20)
    assert waits() == pytest.approx(waited[0], abs=0.1)


@pytest.mark.parametrize(("settles_at", "given_up_at"), [(0.5, 0.5), (1_000.0, 2.0)])
def test_r10_a_partition_is_given_up_when_nothing_started_can_come_any_more(
    consumer, settles_at, given_up_at
):
    clock = SleepingClock()
    member = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=lambda partition: partition == 1 or clock.now >= settles_at,
        clock=clock,
    )
    member._partitions = {0: active(), 1: active()}
    member._on_revoke(consumer, [TopicPartition("q", 1)])
    assert clock.now == 0.0
    member._on_revoke(consumer, [TopicPartition("q", 0)])
    assert clock.now == pytest.approx(given_up_at, abs=0.05)  # a rebalance does not wait for ever
    assert member.partitions == []


def test_a_partition_is_given_up_whatever_is_raised_on_the_way(consumer):
    def interrupted(partition):
        raise KeyboardInterrupt

    given_up = []
    consumer.incremental_unassign = given_up.extend
    member = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=interrupted,
    )
    member._partitions = {0: active(), 1: active()}
    with pytest.raises(KeyboardInterrupt):
        member._on_revoke(consumer, [TopicPartition("q", 0)])
    member.start_over()  # what the client does after an error
    assert list(member._partitions) == [1]
    assert given_up == [TopicPartition("q", 0)]


def test_a_busy_member_keeps_polling_although_something_came(member, consumer):
    # Else it would be no member any more after max.poll.interval.ms.
    for _ in range(3):
        member._last_poll = -1_000.0
        member.keep_alive()
    assert consumer.polls == 3
    assert [record.at for record in member._fetcher._ahead] == [101, 102, 103]
    member._fetcher.seek(0, 102)
    assert member._fetcher._ahead == []  # it will be read again


def test_what_came_to_a_busy_member_is_received_when_it_asks_again_however_little(member, consumer):
    consumer.offsets = [*range(6)]
    for _ in range(3):
        member._last_poll = -1_000.0
        member.keep_alive()
    assert [member.poll(1, 0)[1] for _ in range(3)] == [{0: range(at, at + 1)} for at in range(3)]


def test_a_partition_that_is_not_fetched_yet_is_fetched_from_where_it_is_sought(member, consumer):
    def seek(place):
        raise KafkaException(KafkaError(KafkaError._STATE))

    assigned = []
    consumer.seek, consumer.incremental_assign = seek, assigned.extend
    apply(member, 4, failed=4)
    assert [(place.partition, place.offset) for place in assigned] == [(0, 4)]


def failing(code):
    return lambda count, timeout: [Message(topic="q", error=KafkaError(code))]


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicError),
        (KafkaError._UNKNOWN_TOPIC, TopicError),
    ],
)
def test_an_error_that_waiting_does_not_mend_is_raised(member, consumer, code, raised):
    consumer.consume = failing(code)
    with pytest.raises(raised):
        member.poll(1, 0)


def test_after_an_error_that_passes_it_goes_on(member, consumer):
    consume, consumer.consume = consumer.consume, failing(KafkaError._TRANSPORT)
    assert member.poll(1, 0) == ([], {})
    consumer.consume, consumer.offsets = consume, [0]
    assert member.poll(1, 0)[1] == {0: range(1)}


def test_who_is_fenced_receives_nothing_more(member, consumer):
    """Others have its partitions."""
    consume, consumer.consume = consumer.consume, failing(KafkaError._FATAL)
    with pytest.raises(Fenced):
        member.poll(1, 0)
    consumer.consume, consumer.offsets = consume, [0]
    with pytest.raises(Fenced):
        member.poll(1, 0)


def test_a_busy_member_fetches_nothing_until_it_is_asked_again(member, consumer):
    """Else keep_alive() would pile up records for as long as the user's code is busy."""
    member._partitions[1] = active()
    for offset in (3, 4):
        consumer.offsets = [offset]
        assert member.poll(1, 0)[1] == {0: range(offset, offset + 1)}
        assert consumer.paused == set()
        member.keep_alive()
        assert consumer.paused == set(), "it is not busy yet"
        member._last_poll = -1_000.0
        member.keep_alive()
        assert consumer.paused == {0, 1}
        member._fetcher.drop_ahead()


def test_r11_a_busy_member_learns_which_failed_starts_were_written_after_all(member, consumer, takes):
    """Their leases run, and their messages were handed to nobody."""
    member._partitions[0].commits.receive(1)
    apply(member, 4, failed=4)
    member._partitions[0]._retry_at = 0.0
    takes.update({5: 4})
    member._partitions[1] = AssignedPartition(0.0)  # just assigned: that can wait until messages are wanted
    member._last_poll = -1_000.0
    member.keep_alive()
    assert member.pop_orphaned_starts() == [(0, 4)]
    assert member.partitions == [0]


@pytest.mark.parametrize("usual", [True, False])
def test_what_librdkafka_reads_again_is_not_taken_again(member, consumer, usual):
    known = member._partitions[0]
    if usual:  # nothing to look at in single records
        known.commits.skip(-1)
    consumer.offsets = [0, 1, 2, 5, 6]
    _, found = member.poll(5, 0)
    assert found == {0: [0, 1, 2, 5, 6]}
    consumer.offsets = [7, 0, 1, 2, 5, 6, 7, 8]  # from the beginning, in the middle of a batch
    _, found = member.poll(3, 0)
    assert found == {0: range(7, 8)}
    _, found = member.poll(5, 0)
    assert found == {0: range(8, 9)}


def test_a_log_that_ends_before_our_position_is_read_from_its_beginning(member, consumer, takes):
    consumer.of_predecessor = TopicPartition("q", 0, 72, "kmq2:72:Q:M")
    consumer.offsets, consumer.end = [70, 71], 72
    member.poll(2, 0)
    takes[0] = 1
    consumer.offsets, consumer.end = [0, 1, 2], 3
    assert member.poll(3, 0) == ([], {})
    consumer.offsets = [0, 1, 2]
    _, found = member.poll(3, 0)
    assert consumer.sought == 0
    assert list(found[0]) == [0, 2]


def test_partitions_are_known_although_a_signal_handler_raised_while_they_were_assigned(
    member, consumer, takes
):
    """confluent-kafka assigns them all the same; nobody would receive their messages."""

    def incremental_assign(_places):
        raise KeyboardInterrupt

    member._partitions.clear()
    consumer.incremental_assign = incremental_assign
    with pytest.raises(KeyboardInterrupt):
        member._on_assign(consumer, [TopicPartition("q", 0)])
    member.start_over()  # as the receiver does then
    consumer.offsets = [0]
    assert member.poll(1, 0)[1] == {0: range(1)}


def test_a_consumer_that_is_cut_off_ends_although_somebody_keeps_an_error_of_it(monkeypatch):
    """It ends when Python frees it, and a traceback refers to what its functions referred to."""
    monkeypatch.setattr(librdkafka, "new_consumer", lambda connection, settings: FakeConsumer())
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: True)
    former = weakref.ref(member.consumer)
    former().end = None  # so that reading it raises
    member._partitions[0] = active(markers_offset=5)
    with pytest.raises(TypeError) as kept:
        member.poll(1, 0)
    member.join_again()
    assert former() is None
    assert kept.tb


def test_r24_a_partition_is_taken_when_the_ids_are_known_as_of_its_assignment(member, consumer, takes):
    known = []
    member._ids_known = lambda moment: moment < 0 or known
    member._on_assign(consumer, [TopicPartition("q", 0)])
    consumer.offsets = [0]
    assert member.poll(1, 0) == ([], {})
    known.append(True)
    consumer.offsets = [0]
    assert member.poll(1, 0)[1] == {0: range(1)}


def test_r24_where_librdkafka_begins_at_a_commit_of_another_topic_the_beginning_is_sought(
    member, consumer, takes
):
    consumer.of_predecessor = TopicPartition("q", 0, 5, "kmq2:7:another:another")
    member._on_assign(consumer, [TopicPartition("q", 0)])
    consumer.offsets = [0]
    member.poll(1, 0)
    assert consumer.sought == 0


def test_what_came_with_a_record_that_shows_another_log_is_not_taken(member, consumer, takes):
    member._partitions[0].position = 2
    consumer.offsets, consumer.end = [2, 3, 0, 1], 2
    assert member.poll(4, 0) == ([], {})
    consumer.offsets = [0, 1]
    assert member.poll(4, 0)[1] == {0: range(2)}


@pytest.mark.parametrize(
    ("last_at", "continues"),
    [({0: 11}, True), ({0: 12, 1: 0}, True), ({0: 10}, False), ({0: 0, 1: 99}, False), ({0: -1}, True)],
)
def test_r24_start_markers_that_stand_before_earlier_ones_are_in_another_log(member, last_at, continues):
    apply(member, 7, at=10)
    assert member.continues_at(last_at) is continues


@pytest.mark.parametrize("committed", [5, -1001])
def test_r24_what_came_from_behind_a_commit_of_another_topic_is_no_place_to_go_on(
    member, consumer, takes, committed
):
    """Kafka may have deleted that commit since."""
    consumer.of_predecessor = TopicPartition("q", 0, committed, "kmq2:7:another:another")
    known = []
    member._ids_known = lambda _: known
    member._on_assign(consumer, [TopicPartition("q", 0)])
    consumer.offsets = [5]
    assert member.poll(1, 0) == ([], {})
    known.append(True)
    consumer.offsets = [0]
    assert member.poll(1, 0)[1] == {0: range(1)}
    assert consumer.sought == 0


def test_r24_another_markers_topic_alone_has_commits_lead_to_its_beginning(member, consumer):
    apply(member, 7, at=11)
    member.follow(TopicIds("Q", "new"))
    commit(member)
    apply(member, 8, at=3)
    commit(member)
    assert consumer.commits == [(8, "kmq2:0:Q:new"), (9, "kmq2:4:Q:new")]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3))))
def test_offsets_by_partition(steps):
    at, records, expected = {0: 0, 1: 7, 2: 3}, [], {}
    for partition, gap in steps:
        at[partition] += gap
        records.append(record(at[partition], partition))
        expected.setdefault(partition, []).append(at[partition])
    found = offsets_of_records(records)
    assert {partition: list(offsets) for partition, offsets in found.items()} == expected
    for offsets in found.values():
        assert isinstance(offsets, range) == (offsets[-1] - offsets[0] + 1 == len(offsets))


def test_offsets_that_go_back_are_no_range():
    assert offsets_of_records(list(map(record, (10, 12, 12)))) == {0: [10, 12, 12]}


class Announcements(list):
    """What is announced; `unwritten` are partitions whose ticks are not confirmed."""

    unwritten = ()

    def __call__(self, ticks):
        self.append({tick.partition: (tick.takes_from, tick.takes_again) for tick in ticks})
        return {tick.partition for tick in ticks} & set(self.unwritten)


@pytest.fixture
def announced(member):
    member._recovery._announce = Announcements()
    return member._recovery._announce


def assign(member, consumer, *partitions):
    member._partitions.clear()
    member._on_assign(consumer, [TopicPartition("q", partition) for partition in partitions])


def test_r30_partitions_say_together_from_where_their_messages_are_taken(member, consumer, takes, announced):
    consumer.committed = lambda places, timeout: [TopicPartition("q", places[0].partition, 7, "kmq2:3:Q:M")]
    assign(member, consumer, 0, 1, 2)
    member._prepare()
    member._prepare()
    assert announced == [{0: (7, False), 1: (7, False), 2: (7, False)}]
    assert member.partitions == [0, 1, 2]


@pytest.mark.parametrize(
    ("committed", "expected"),
    [
        ((5, "kmq2:3:Q:M"), (5, False)),
        ((5, ""), (5, True)),  # set back by Kafka's tools, or committed by the JVM library
        ((5, "kmq2:-:Q:M"), (5, True)),
        ((5, "kmq2:3:Q:another"), (5, False)),  # all of its markers are read
        ((5, "kmq2:3:another:M"), (0, False)),
        ((-1001, ""), (0, False)),  # likewise
    ],
)
def test_r30_who_does_not_know_what_was_taken_says_so(
    member, consumer, takes, announced, committed, expected
):
    consumer.of_predecessor = TopicPartition("q", 0, *committed)
    assign(member, consumer, 0)
    member._prepare()
    assert announced == [{0: expected}]


def test_r30_whose_markers_were_deleted_does_not_know_what_was_taken(
    member, consumer, announced, monkeypatch
):
    reached = partition_reader.ReadPosition(4, 9, 9)
    monkeypatch.setattr(partition_reader, "scan", lambda *_, **__: {0: reached})
    for markers_offset, again in [(3, True), (4, False)]:
        consumer.of_predecessor = TopicPartition("q", 0, 5, f"kmq2:{markers_offset}:Q:M")
        assign(member, consumer, 0)
        member._prepare()
        assert announced.pop() == {0: (5, again)}


@pytest.mark.parametrize("committed", ["", "kmq2:3:Q:M"], ids=["set back", "by a kmqpy"])
def test_r30_nothing_is_taken_before_it_is_written_from_where(member, consumer, takes, announced, committed):
    consumer.of_predecessor = TopicPartition("q", 0, 5, committed)
    announced.unwritten = [0]
    assign(member, consumer, 0, 1)
    consumer.offsets = [5]
    assert member.poll(1, 0) == ([], {})
    assert member.partitions == [1], "the others go on"
    announced.unwritten = []
    member._partitions[0]._retry_at = 0.0
    consumer.offsets = [5]
    assert member.poll(1, 0)[1] == {0: range(5, 6)}
    assert [set(one) for one in announced] == [{0, 1}, {0}]


def test_r30_where_no_tick_can_be_written_nothing_is_taken(member, consumer, takes):
    def unavailable(_ticks):
        raise Unavailable("the writer is closed")

    member._recovery._announce = unavailable
    consumer.committed = lambda places, timeout: [
        TopicPartition("q", places[0].partition, 5, "kmq2:0:Q:M" if places[0].partition else "")
    ]
    assign(member, consumer, 0, 1)
    member._prepare()
    assert member.partitions == []
