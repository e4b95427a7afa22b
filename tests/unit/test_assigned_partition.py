"""An assigned partition from phase to phase, without Kafka."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.kafka.client.assigned_partition import AssignedPartition, ReceivePhase, StartsFound
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.markers.offset_runs import OffsetRuns

NOTHING = StartsFound()


def found(*started, end=0, in_flight=()):
    return StartsFound(runs(started), runs(in_flight), end)


def runs(offsets):
    return OffsetRuns((offset, 1) for offset in offsets)


def active(commit=Commit(0, 5), starts=NOTHING):  # noqa: B008
    partition = AssignedPartition(assigned_at=0.0)
    partition.finish_recovery(commit, starts)
    return partition


def received(partition, *offsets, log_start=0):
    return [offset for offset in offsets if partition.receive(offset, log_start)]


class TestRecovering:
    def test_messages_that_come_too_early_are_not_received_but_sought(self):
        partition = AssignedPartition(assigned_at=0.0)
        assert received(partition, 7, 8) == []
        partition.finish_recovery(Commit(5, 0), NOTHING)
        assert (partition.must_seek, partition.position) == (True, 5)
        assert received(partition, 4, 7, 8) == [7, 8]

    @pytest.mark.parametrize("came", [3, 7])
    def test_r39_the_commit_is_where_it_goes_on_whatever_came(self, came):
        """New messages may stand below 7 if the log was cut back since."""
        partition = AssignedPartition(assigned_at=0.0)
        received(partition, came)
        partition.finish_recovery(Commit(5, 0), NOTHING)
        assert received(partition, 4, 5, 6) == [5, 6]

    @pytest.mark.parametrize("commit", [None, Commit(9, 4)])
    def test_without_a_commit_of_this_log_it_begins_at_the_beginning(self, commit):
        partition = AssignedPartition(assigned_at=0.0, log_end=8)
        assert partition.recover_from(commit) == Commit(0, 0)
        assert partition.must_seek
        assert AssignedPartition(0.0, log_end=9).recover_from(Commit(9, 4)) == Commit(9, 4)

    def test_r10_what_a_predecessor_started_is_left_out(self):
        partition = active(Commit(2, 1), found(3, 5))
        assert received(partition, 2, 3, 4, 5, 6) == [2, 4, 6]

    def test_after_failures_it_waits_longer_each_time(self):
        partition = AssignedPartition(assigned_at=0.0)
        assert partition.needs_markers(0.0)
        partition.back_off(10.0)
        assert not partition.needs_markers(10.1)
        assert partition.needs_markers(10.2)
        partition.back_off(20.0)
        assert not partition.needs_markers(20.3)
        assert partition.needs_markers(20.4)


class TestReceiving:
    def test_usual_messages_are_expected_all_together(self):
        partition = active()
        assert not partition.expects([0, 1], log_start=0), "nothing was committed yet"
        assert received(partition, 0) == [0]
        partition.mark_started(0, markers_offset=5, count=1)
        assert partition.expects([1, 2, 4], log_start=0)
        assert not partition.expects([0, 1], log_start=0), "0 came before"
        assert not partition.expects([2, 1], log_start=0)
        assert not partition.expects([1, 2], log_start=2), "1 may be deleted"
        partition.receive_expected([1, 2, 4])
        assert partition.position == 5

    def test_what_comes_again_or_was_deleted_is_not_received(self):
        partition = active()
        assert received(partition, 0, 1, 0, 1, 2) == [0, 1, 2]
        assert received(partition, 3, 4, 5, log_start=5) == [5]

    def test_a_log_that_ends_below_what_was_read_is_another_one(self):
        partition = active()
        received(partition, 0, 1, 2)
        assert partition.shows_another_log(0, log_end=2)
        assert not partition.shows_another_log(0, log_end=3), "Kafka only sends it again"
        assert not partition.shows_another_log(3, log_end=2)

    def test_a_damaged_record_is_tried_again_after_a_pause_that_grows(self):
        partition = active()
        received(partition, 5, 6)
        for now, pause in ((0.0, 0.2), (1.0, 0.4), (2.0, 0.8)):
            partition.stand_still(now)
            assert not partition.tries_again(now + pause - 0.01)
            assert partition.stands_still
            assert partition.tries_again(now + pause)
            assert (partition.stands_still, partition.position) == (False, 7)


class TestCommitting:
    def test_what_is_skipped_is_committed_when_what_came_before_is_started(self):
        partition = active(starts=found(1))
        received(partition, 0, 1)
        assert not partition.commits.is_due
        partition.mark_started(0, markers_offset=7, count=1)
        assert partition.make_commit() == Commit(2, 8)
        assert not partition.commits.is_due
        partition.commits.repeat()
        assert partition.commits.is_due

    def test_r10_starts_ahead_keep_the_markers_offset_of_the_predecessor(self):
        partition = active(Commit(0, 5), found(4))
        received(partition, 0, 1)
        partition.mark_started(1, markers_offset=9, count=2)
        assert partition.make_commit() == Commit(2, 5)
        received(partition, 4)
        assert partition.make_commit() == Commit(5, 10)

    def test_r24_with_other_markers_commits_lead_to_their_beginning(self):
        partition = active(Commit(0, 5), found(4, end=20))
        received(partition, 0)
        partition.mark_started(0, markers_offset=30, count=1)
        assert not partition.continues_at(3)
        partition.begin_markers_anew()
        assert partition.continues_at(3)
        assert partition.make_commit() == Commit(1, 0)

    def test_a_partition_of_another_kind_of_client_has_no_markers_offset(self):
        partition = active(Commit(0, None))
        assert received(partition, 0, log_start=1) == []
        assert partition.make_commit() == Commit(1, None)


class TestChecking:
    def failed(self):
        """Of messages 0 to 3 the starts of 2 and 3 failed."""
        partition = active(Commit(0, 5))
        received(partition, 0, 1, 2, 3)
        partition.mark_uncertain([2, 3])
        partition.mark_started(1, markers_offset=6, count=2)
        partition.rewind(2, now=10.0)
        return partition

    def test_r18_it_waits_and_then_reads_where_the_starts_may_be(self):
        partition = self.failed()
        assert partition.phase is ReceivePhase.CHECKING
        assert received(partition, 2, 3) == []
        assert not partition.needs_markers(10.1)
        assert partition.needs_markers(10.2)
        assert partition.check_from == (5, 2)

    def test_what_was_written_after_all_is_left_out_and_told(self):
        partition = self.failed()
        assert partition.finish_check(found(2, 9, end=9, in_flight=[2, 9])) == [2]
        assert partition.phase is ReceivePhase.ACTIVE
        assert received(partition, 2, 3) == [3]

    def test_what_was_written_and_finished_by_others_is_nobodys(self):
        assert self.failed().finish_check(found(2, end=9)) == []

    def test_r10_commits_lead_to_uncertain_starts_until_they_are_passed(self):
        partition = self.failed()
        assert partition.make_commit() == Commit(2, 5)
        partition.finish_check(found(end=9))
        received(partition, 2, 3)
        partition.mark_started(2, markers_offset=9, count=1)
        assert partition.make_commit() == Commit(3, 5)
        partition.mark_started(3, markers_offset=10, count=1)
        assert partition.make_commit() == Commit(4, 11)

    def test_a_success_ends_the_series_of_failures(self):
        partition = self.failed()
        partition.finish_check(found(end=9))
        received(partition, 2)
        partition.mark_started(2, markers_offset=9, count=1)
        partition.mark_uncertain([3])
        partition.rewind(3, now=20.0)
        assert partition.needs_markers(20.2)


BATCHES = st.lists(
    st.tuples(
        st.integers(1, 5).flatmap(lambda size: st.lists(st.booleans(), min_size=size, max_size=size)),
        st.integers(0, 5),
        st.booleans(),
    )
)
"""Of each batch: which failed starts are written all the same, how many do not fail, is it committed."""


@given(BATCHES, st.sets(st.integers(0, 30)), st.integers(0, 3))
def test_r10_every_start_ahead_of_a_commit_is_behind_its_markers_offset(batches, by_predecessor, gap):
    """And no message is received that has a start marker."""
    markers = [-1] * gap + sorted(by_predecessor)  # the queue offset that each marker names
    partition = AssignedPartition(0.0)

    def starts_from(markers_offset, first_offset):
        ahead = [offset for offset in markers[markers_offset:] if offset >= first_offset]
        return found(*ahead, end=len(markers), in_flight=ahead)

    partition.finish_recovery(Commit(0, gap), starts_from(gap, 0))
    for written, confirmed, commit in batches:
        coming = range(partition.position, partition.position + len(written))
        batch = received(partition, *coming)
        assert not set(batch) & set(markers)
        confirmed = min(confirmed, len(batch))
        uncertain = batch[confirmed:]
        markers += batch[:confirmed]
        if uncertain:
            partition.mark_uncertain(uncertain)
        if confirmed:
            partition.mark_started(batch[confirmed - 1], len(markers) - 1, confirmed)
        markers += [offset for offset, is_written in zip(uncertain, written, strict=False) if is_written]
        if uncertain:
            partition.rewind(uncertain[0], now=0.0)
        if commit and partition.commits.is_due:
            made = partition.make_commit()
            assert all(at >= made.markers_offset for at, one in enumerate(markers) if one >= made.offset)
        if uncertain:
            orphaned = partition.finish_check(starts_from(*partition.check_from))
            assert orphaned == [offset for offset in uncertain if offset in markers]
