"""When offsets are written."""

from tracker.leadership.offset_znodes import EARLY_WRITE_MARKERS, OffsetWriteSchedule

KEY = ("q", 0)


def test_few_partitions_are_written_at_the_set_interval():
    pace = OffsetWriteSchedule(5.0, 500)
    assert pace.interval_s(2_500) == 5.0
    assert pace.is_due(KEY, 1, 10, 100.0)
    pace.written([KEY], 100.0)
    assert not pace.is_due(KEY, 1, 10, 104.9)
    assert pace.is_due(KEY, 1, 10, 105.0)


def test_many_partitions_share_the_writes_per_second():
    pace = OffsetWriteSchedule(5.0, 500)
    assert pace.interval_s(100_000) == 200.0
    assert not pace.is_due(KEY, 1, 100_000, 100.0)
    assert not pace.is_due(KEY, 1, 100_000, 294.9)
    assert pace.is_due(KEY, 1, 100_000, 295.0)


def test_a_busy_partition_does_not_wait_for_the_others():
    pace = OffsetWriteSchedule(5.0, 500)
    pace.written([KEY], 100.0)
    assert not pace.is_due(KEY, EARLY_WRITE_MARKERS, 100_000, 104.9)
    assert pace.is_due(KEY, EARLY_WRITE_MARKERS, 100_000, 105.0)
    assert not pace.is_due(KEY, EARLY_WRITE_MARKERS - 1, 100_000, 105.0)


def test_what_is_not_ours_any_more_begins_anew():
    pace = OffsetWriteSchedule(5.0, 500)
    pace.written([KEY], 100.0)
    pace.forget([])
    assert pace.is_due(KEY, 1, 10, 101.0)
