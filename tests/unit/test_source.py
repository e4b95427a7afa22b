"""What a member of the group commits, with a consumer that only writes down what it is asked."""

from typing import NamedTuple

import pytest
from confluent_kafka import Message, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from kmqpy import kafka
from kmqpy.config import Connection, QueueSettings
from kmqpy.records import by_partition
from kmqpy.source import QueueSource, _Partition
from kmqpy.telemetry import Telemetry


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

    def consume(self, count, timeout):
        self.polls += 1
        if not self.offsets:
            return [FakeRecord(0, 100 + self.polls)]
        some, self.offsets = self.offsets[:count], self.offsets[count:]
        return [record(at) for at in some]

    def get_watermark_offsets(self, place, cached):
        return 0, self.end

    def subscribe(self, topics, **callbacks):
        pass

    def seek(self, place):
        self.sought = place.offset

    def pause(self, places):
        pass

    def commit(self, offsets, asynchronous):
        self.commits += [(place.offset, place.metadata) for place in offsets]

    def incremental_unassign(self, places):
        pass


@pytest.fixture
def consumer(monkeypatch):
    fake = FakeConsumer()
    monkeypatch.setattr(kafka, "consumer", lambda connection, settings: fake)
    return fake


@pytest.fixture
def source(consumer):
    made = QueueSource(Connection(), QueueSettings(name="q"), Telemetry(), settled=lambda _: True)
    made._partitions[0] = _Partition(recovered=True, markers_offset=5)
    return made


def commit(source):
    source._last_commit = -1_000.0
    source.maintain()


def test_a_commit_tells_where_the_starts_end_that_it_covers(source, consumer):
    source.taken(0, 7, markers_offset=11, count=3)
    commit(source)
    assert consumer.commits == [(8, "kmq1:12")]


def test_r10_after_a_failed_start_commits_lead_to_the_starts_they_do_not_cover(source, consumer):
    # The starts of 3 to 8 stand at 5 to 9, but that of 4 failed.
    source._partitions[0].pending = 6
    source.hold_back(0, range(4, 9))
    source.taken(0, 3, markers_offset=9, count=1)
    source.rewind(0, 4)
    commit(source)
    assert consumer.sought == 4
    # Taken again one by one, their new starts behind the old ones.
    for offset, at in [(4, 10), (5, 11), (6, 12), (7, 13), (8, 14), (9, 15)]:
        source._partitions[0].pending = 1
        source.taken(0, offset, markers_offset=at)
        commit(source)
    assert consumer.commits == [
        (4, "kmq1:5"),
        (5, "kmq1:5"),
        (6, "kmq1:5"),
        (7, "kmq1:5"),
        (8, "kmq1:5"),
        (9, "kmq1:15"),
        (10, "kmq1:16"),
    ]


def test_r10_what_is_recovered_and_lies_ahead_keeps_the_older_offset(source, consumer):
    known = source._partitions[0]
    known.recovered_from, known.started = 2, {9}
    source.taken(0, 7, markers_offset=11)
    commit(source)
    source.taken(0, 10, markers_offset=12)
    commit(source)
    assert consumer.commits == [(8, "kmq1:2"), (11, "kmq1:13")]


class SleepingClock:
    now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.mark.parametrize(("settles_at", "given_up_at"), [(0.5, 0.5), (1_000.0, 2.0)])
def test_r10_a_partition_is_given_up_when_nothing_started_can_come_any_more(
    consumer, settles_at, given_up_at
):
    clock = SleepingClock()
    source = QueueSource(
        Connection(),
        QueueSettings(name="q"),
        Telemetry(),
        settled=lambda partition: partition == 1 or clock.now >= settles_at,
        clock=clock,
    )
    source._partitions = {0: _Partition(recovered=True), 1: _Partition(recovered=True)}
    source._on_revoke(consumer, [TopicPartition("q", 1)])
    assert clock.now == 0.0
    source._on_revoke(consumer, [TopicPartition("q", 0)])
    assert clock.now == pytest.approx(given_up_at, abs=0.05)  # a rebalance does not wait for ever
    assert source.partitions == []


def test_a_partition_is_given_up_whatever_is_raised_on_the_way(consumer):
    def interrupted(partition):
        raise KeyboardInterrupt

    given_up = []
    consumer.incremental_unassign = given_up.extend
    source = QueueSource(Connection(), QueueSettings(name="q"), Telemetry(), settled=interrupted)
    source._partitions = {0: _Partition(recovered=True), 1: _Partition(recovered=True)}
    with pytest.raises(KeyboardInterrupt):
        source._on_revoke(consumer, [TopicPartition("q", 0)])
    source.start_over()  # what the client does after an error
    assert list(source._partitions) == [1]
    assert given_up == [TopicPartition("q", 0)]


def test_a_busy_member_keeps_polling_although_something_came(source, consumer):
    # Else it would be no member any more after max.poll.interval.ms.
    for _ in range(3):
        source._last_poll = -1_000.0
        source.keep_alive()
    assert consumer.polls == 3
    assert [record.at for record in source._stash] == [101, 102, 103]
    source._seek(0, 102)
    assert source._stash == []  # it will be read again


@pytest.mark.parametrize("usual", [True, False])
def test_what_librdkafka_reads_again_is_not_taken_again(source, consumer, usual):
    known = source._partitions[0]
    if usual:  # nothing to look at in single records
        known.next_offset = 0
    consumer.offsets = [0, 1, 2, 5, 6]
    _, found = source.poll(5, 0)
    assert found == {0: [0, 1, 2, 5, 6]}
    consumer.offsets = [7, 0, 1, 2, 5, 6, 7, 8]  # from the beginning, in the middle of a batch
    _, found = source.poll(3, 0)
    assert found == {0: range(7, 8)}
    _, found = source.poll(5, 0)
    assert found == {0: range(8, 9)}


def test_a_topic_made_anew_is_read_from_its_beginning(source, consumer):
    consumer.offsets, consumer.end = [70, 71], 72
    source.poll(2, 0)
    consumer.offsets, consumer.end = [0, 1, 2], 3
    _, found = source.poll(3, 0)
    assert found == {0: range(3)}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3))))
def test_offsets_by_partition(steps):
    at, records, expected = {0: 0, 1: 7, 2: 3}, [], {}
    for partition, gap in steps:
        at[partition] += gap
        records.append(record(at[partition], partition))
        expected.setdefault(partition, []).append(at[partition])
    found = by_partition(records)
    assert {partition: list(offsets) for partition, offsets in found.items()} == expected
    for offsets in found.values():
        assert isinstance(offsets, range) == (offsets[-1] - offsets[0] + 1 == len(offsets))


def test_offsets_that_go_back_are_no_range():
    assert by_partition(list(map(record, (10, 12, 12)))) == {0: [10, 12, 12]}
