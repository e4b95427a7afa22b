"""What a member of the group commits, with a consumer that only writes down what it is asked."""

import pytest

from kmqpy import kafka
from kmqpy.config import Connection, QueueSettings
from kmqpy.source import QueueSource, _Partition
from kmqpy.telemetry import Telemetry


class FakeConsumer:
    def __init__(self):
        self.commits = []

    def subscribe(self, topics, **callbacks):
        pass

    def seek(self, place):
        self.sought = place.offset

    def pause(self, places):
        pass

    def commit(self, offsets, asynchronous):
        self.commits += [(place.offset, place.metadata) for place in offsets]


@pytest.fixture
def consumer(monkeypatch):
    fake = FakeConsumer()
    monkeypatch.setattr(kafka, "consumer", lambda connection, settings: fake)
    return fake


@pytest.fixture
def source(consumer):
    made = QueueSource(Connection(), QueueSettings(name="q"), Telemetry())
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
    source.hold_back(0, highest=8)
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
