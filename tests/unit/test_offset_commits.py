"""What a commit says, and when it is made."""

import pytest
from confluent_kafka import TopicPartition

from kmqpy.kafka.client.offset_commits import (
    Commit,
    CommitSchedule,
    PartitionCommits,
    commit_metadata,
    commit_of,
)
from kmqpy.kafka.markers.log_cuts import NO_CUTS, Cut, LogCuts
from kmqpy.kafka.topic_identity import TopicIds

IDS = TopicIds("Q", "M")


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ("kmq2:7:Q:M", Commit(5, 7)),
        ("kmq2:-:Q:M", Commit(5, None)),
        ("kmq2:7:Q:another", Commit(5, 0)),  # where starts stand is not known
        ("kmq2:7:another:M", None),
        ("kmq2:7:another:another", None),
        ("kmq1:7", Commit(5, 7)),  # of an older kmqpy
        ("", Commit(5, None)),  # of the JVM library
        ("kmq2:9223372036854775808:Q:M", Commit(5, None)),
        ("kmq3:7:Q:M:2::", Commit(5, 7, 2)),
        ("kmq3:7:Q:M:2:8<9@4,7<8@5:", Commit(5, 7)),  # cuts that can't be
        ("kmq3:7:Q:M:4:1<2@5,3<4@9:3", Commit(5, 7, 4, LogCuts((Cut(2, 5, 1), Cut(4, 9, 3))), 3)),
        ("kmq3:7:another:M:2::", None),
        ("kmq4:7:Q:M", Commit(5, None)),
    ],
)
def test_r24_a_commit_counts_for_the_topic_that_it_names(metadata, expected):
    assert commit_of(TopicPartition("q", 0, 5, metadata), IDS) == expected


FORGED = LogCuts((Cut(3, 4, 0), Cut(9, 6, 5)))


@pytest.mark.parametrize(
    ("commit", "believed"),
    [
        (Commit(10, 7, 4), Commit(10, 7, 4)),
        (Commit(50, 7, 3), Commit(50, 7, 3)),  # of a log that was cut back since
        (Commit(50, 7, 4), Commit(0, 0)),
        (Commit(50, 7, 600_000), Commit(0, 0)),
        (Commit(50, None), Commit(0, 0)),
        (Commit(8, 7, 5), Commit(8, 7)),
        (Commit(8, 7, 4, FORGED), Commit(8, 7, None, LogCuts(FORGED.cuts[:1]))),
    ],
)
def test_r25_of_a_commit_counts_what_its_log_can_have_had(commit, believed):
    assert commit.within(10, 4) == believed


@pytest.mark.parametrize("epoch", [None, -1])
def test_r25_where_kafka_names_no_epoch_all_are_believed(epoch):
    for offset in (8, 50):
        assert Commit(offset, 7, 5, FORGED).within(10, epoch) == Commit(offset, 7, 5, FORGED)


@pytest.mark.parametrize("markers_offset", [None, 0, 7, 2**63 - 1])
def test_a_commit_is_read_as_it_was_written(markers_offset):
    for commit in (
        Commit(5, markers_offset),
        Commit(5, markers_offset, 7, NO_CUTS.with_cut(Cut(3, 4, 2)), 8),
    ):
        place = TopicPartition("q", 0, 5, commit_metadata(commit, IDS))
        assert commit_of(place, IDS) == commit


def test_no_commit_without_an_offset():
    assert commit_of(TopicPartition("q", 0, -1001), IDS) is None


def test_a_commit_is_due_after_a_while_or_many_messages():
    schedule = CommitSchedule(now=100.0)
    assert not schedule.is_due(100.1)
    assert schedule.is_due(100.2)
    schedule.add(9_999)
    assert not schedule.is_due(100.1)
    schedule.add(1)
    assert schedule.is_due(100.1)
    schedule.note_commit(100.1)
    assert not schedule.is_due(100.2)


def test_r41_a_commit_leads_behind_what_was_passed_over_when_what_came_before_is_started():
    commits = PartitionCommits()
    commits.begin(0)
    commits.receive(3)  # 0 and 2 are taken, 1 and 3 passed over
    commits.receive(1)
    commits.pass_over(1, 1)
    assert commits.next_offset is None
    commits.pass_over(1, 3)
    commits.mark_started(2, 7, 2)
    assert commits.make() == Commit(4, 8)
    commits.receive(2)
    commits.pass_over(2, 5)
    assert commits.is_due
    assert commits.make() == Commit(6, 8)


def test_r41_what_was_passed_over_is_read_again_when_start_markers_before_it_failed():
    commits = PartitionCommits()
    commits.begin(0)
    commits.receive(2)
    commits.pass_over(1, 1)
    commits.mark_uncertain(0, 0)
    commits.rewind()
    assert commits.next_offset is None
    commits.receive(2)
    commits.mark_started(1, 3, 2)
    assert commits.make() == Commit(2, 4)
