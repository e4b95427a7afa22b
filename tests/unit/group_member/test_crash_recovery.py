"""What a member reads of the markers of partitions that are assigned to it (rules R10, R24, R30)."""

import itertools
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, TopicPartition
from group_members import (
    GIVEN,
    IDENTITY,
    active,
    apply,
    assign,
    record,
    take_one,
)

from kmqpy.errors import Unavailable
from kmqpy.kafka import partition_reader
from kmqpy.kafka.client import commit_check
from kmqpy.kafka.client.assigned_partition import AssignedPartition
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.markers.log_cuts import Cut
from kmqpy.testing import ManualClock


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
    consumer.offsets, consumer.end = [2, 3, 1_000], 1_001
    assert member.poll(3, 0)[1] == {0: [2, 1_000]}


@pytest.mark.parametrize("wrong", [5, 4_000])
def test_an_offset_that_is_wrong_still_when_read_again_is_damaged(member, consumer, takes, caplog, wrong):
    """No checksum covers that of a batch."""
    consumer.end = 10
    assign(member, consumer, 0)
    for expected in ({}, {0: range(2)}, {}):
        consumer.offsets = [0, 1, wrong, 3, 4]
        assert member.poll(5, 0)[1] == expected
        told = str([one.__dict__ for one in caplog.records])
        assert (f"a batch says offset {wrong}" in told) == bool(expected)
        caplog.clear()


def _after_an_election(monkeypatch, consumer, cut=None, commit="kmq3:0:Q:M:0::0", epoch=1):
    """The log ends at 4, and has a leader epoch above that of the commit; returns what is searched for."""
    ends = [TopicPartition(topic, 0, 4, leader_epoch=of) for topic, of in (("q", epoch), ("q__markers", 0))]
    consumer.offsets_for_times = lambda places, timeout: ends
    consumer.of_predecessor = TopicPartition("q", 0, 3, commit)
    monkeypatch.setattr(partition_reader, "bounds", lambda *_, **__: {0: (0, 4)})
    searched = []

    def find_cut(*_, offset, epoch, **__):
        searched.append((offset, epoch))
        return cut if cut is not None and offset >= cut.start and epoch <= cut.above else None

    monkeypatch.setattr(commit_check, "find_cut", find_cut)
    return searched


def test_r39_a_take_of_what_is_not_there_after_an_election_has_the_log_searched(
    member, consumer, takes, monkeypatch
):
    """The message was cut away, and nobody has sent one to its offset yet."""
    takes.update({0: 3, 1: 5})
    _after_an_election(monkeypatch, consumer, Cut(1, 4, 0))
    assign(member, consumer, 0)
    consumer.offsets = [4]
    assert member.poll(1, 0)[1] == {0: range(Cut(1, 0, 0).base + 4, Cut(1, 0, 0).base + 5)}


def test_r39_a_commit_is_sought_since_the_end_of_a_transaction_behind_it_may_be_cut_away(
    member, consumer, takes, monkeypatch
):
    """librdkafka has passed that record, and would not see the message that is at its offset now."""
    _after_an_election(monkeypatch, consumer)
    assign(member, consumer, 0)
    consumer.offsets = [3]
    assert member.poll(1, 0)[1] == {0: range(3, 4)}
    assert consumer.sought == 3


def test_r39_a_take_of_what_is_not_there_has_the_epoch_asked_for_again(member, consumer, takes, monkeypatch):
    """The log was cut back when its end had been asked for: what was taken behind the cut is no lie."""
    takes.update({0: 5})
    epochs = iter((0, 1))

    def ends(places, timeout):
        epoch = next(epochs)
        return [TopicPartition(place.topic, 0, 4, leader_epoch=epoch) for place in places]

    _after_an_election(monkeypatch, consumer)
    consumer.offsets_for_times = ends
    assign(member, consumer, 0)
    member._prepare()
    assert member.partitions == []


_TICK = codec.encode(codec.assignment_tick(0, 3, epoch=2))
_CLAIM = codec.encode(codec.tick(0, epoch=0))
_KEY, _END, _BY_TRACKER = codec.encode(Marker(0, 0, Op.END, by_tracker=True))
_COPIED_TO_3 = _KEY, _END, [*_BY_TRACKER, (COPY, b"0:3")]


@pytest.mark.parametrize(
    ("markers", "searched_since"),
    [
        pytest.param((_CLAIM, _COPIED_TO_3), 1, id="its commit says so"),
        pytest.param((_CLAIM, _COPIED_TO_3, _TICK), None, id="its tick says so"),
        pytest.param((_CLAIM, _TICK, _COPIED_TO_3), None, id="the copy is of a transaction that is aborted"),
    ],
)
def test_r39_a_copy_for_which_a_client_has_looked_tells_only_of_later_cuts(
    member, consumer, takes, monkeypatch, markers, searched_since
):
    """Others have taken the message that is at its offset now."""
    takes.update(enumerate(markers))
    searched = _after_an_election(monkeypatch, consumer, commit="kmq3:0:Q:M:1::0", epoch=2)
    assign(member, consumer, 0)
    member._prepare()
    assert member.partitions == [0]
    assert [epoch for offset, epoch in searched if offset == 3] == (
        [] if searched_since is None else [searched_since]
    )


def test_r40_markers_are_no_others_because_the_queue_was_cut_back(member, consumer, takes, monkeypatch):
    """The start marker before the commit is still there: it names the message before the commit as it was."""
    ends = [TopicPartition(topic, 0, 4, leader_epoch=1) for topic in ("q", "q__markers")]
    consumer.offsets_for_times = lambda places, timeout: ends
    consumer.of_predecessor = TopicPartition("q", 0, 3, "kmq3:2:Q:M:0::0")
    asked = []

    def find_cut(_connection, topic, *_, starts=None, **__):
        asked.append((topic, starts))
        return Cut(1, 1, 0) if topic == "q" else None

    monkeypatch.setattr(commit_check, "find_cut", find_cut)
    assign(member, consumer, 0)
    consumer.offsets = [1]
    assert member.poll(1, 0)[1] == {0: range(Cut(1, 0, 0).base + 1, Cut(1, 0, 0).base + 2)}
    assert ("q__markers", 2) in asked


@pytest.mark.parametrize("untold", ["q", "q__markers"])
@pytest.mark.parametrize(
    "error", [None, KafkaError(KafkaError.LEADER_NOT_AVAILABLE)], ids=["no offset", "no leader"]
)
def test_r40_markers_cut_away_are_noticed_while_kafka_tells_nothing_of_other_partitions(
    member, consumer, untold, error
):
    for partition in (0, 1):
        member._partitions[partition] = active(markers_offset=5)
        member._partitions[partition].markers_epoch = 0

    def ends(places, timeout):
        return [
            SimpleNamespace(topic=untold, partition=0, offset=-1, error=error)
            if (place.topic, place.partition) == (untold, 0)
            else TopicPartition(place.topic, place.partition, consumer.end, leader_epoch=1)
            for place in places
        ]

    consumer.offsets_for_times = ends
    member._look_at = 0.0
    member._look_for_cuts()
    assert member.partitions == [0]


def test_r24_where_the_markers_end_before_a_commit_they_are_read_from_their_beginning(
    member, consumer, takes
):
    """The markers topic was recreated or cut short."""
    takes.update({0: 5, 1: 7})
    consumer.of_predecessor = TopicPartition("q", 0, 5, "kmq2:9:Q:M")
    assign(member, consumer, 0)
    consumer.offsets = [5, 6, 7, 8]
    assert member.poll(4, 0)[1] == {0: [6, 8]}


def test_r18_a_partition_whose_starts_fail_again_and_again_waits_longer_each_time(consumer, takes):
    clock = ManualClock()
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: True, clock=clock)
    member._partitions[0] = active(markers_offset=5)

    def waits():
        apply(member, 4, failed=4)
        began = clock.monotonic()
        while member.partitions != [0]:
            clock.sleep(0.05)
            consumer.offsets = [4]
            member.poll(1, 0)
        return clock.monotonic() - began

    waited = [waits() for _ in range(9)]
    assert 0 < waited[0] < 0.5
    assert all(later > 1.5 * wait or later >= 9.9 for wait, later in itertools.pairwise(waited))
    assert waited[-1] == pytest.approx(10, abs=0.1)
    member._partitions[0].commits.receive(1)
    apply(member, 4, at=20)
    assert waits() == pytest.approx(waited[0], abs=0.1)


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


class Announcements(list):
    """What is announced; `unwritten` are partitions whose ticks are not confirmed."""

    unwritten = ()

    def __call__(self, ticks):
        self.append({tick.partition: (tick.takes_from, tick.takes_again) for tick in ticks})
        return {tick.partition for tick in ticks} & set(self.unwritten)


@pytest.fixture
def announced(member):
    member._recovery._write_assignment_ticks = Announcements()
    return member._recovery._write_assignment_ticks


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

    member._recovery._write_assignment_ticks = unavailable
    consumer.committed = lambda places, timeout: [
        TopicPartition("q", places[0].partition, 5, "kmq2:0:Q:M" if places[0].partition else "")
    ]
    assign(member, consumer, 0, 1)
    member._prepare()
    assert member.partitions == []
