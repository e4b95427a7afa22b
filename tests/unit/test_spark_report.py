"""Reports of tasks, as text and as one; they cost little, however many messages they tell of."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.errors import DecodeError
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.spark.report import BatchReport, merged

RUNS = st.lists(st.tuples(st.integers(0, 5_000) | st.integers(0, 2**60), st.integers(1, 30)), max_size=40)


def batch(first, count, *, but_every):
    """Of a batch of which one message in so many has failed."""
    done = OffsetRuns([(first, count)])
    left = OffsetRuns((offset, 1) for offset in range(first, first + count, but_every))
    return BatchReport(done={0: done - left}, left={0: left}, next={0: (first + count, first)})


@given(RUNS, RUNS)
def test_a_report_is_read_as_it_was_written(done, left):
    done, left = OffsetRuns(done), OffsetRuns(left)
    report = BatchReport(done={3: done - left} if done else {}, left={3: left} if left else {})
    found = merged([str(report)])
    assert found.done.get(3, OffsetRuns()) == done - left
    assert found.left.get(3, OffsetRuns()) == left


def test_a_report_of_messages_far_apart_is_short():
    places = OffsetRuns((number * 1_000_000, 1) for number in range(1_000))
    assert len(str(BatchReport(done={0: places}))) < 30_000


def test_two_million_messages_with_failures_cost_little():
    texts = [str(batch(first, 10_000, but_every=97)) for first in range(0, 2_000_000, 10_000)]
    tracemalloc.start()
    found = merged(texts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.done[0]) + len(found.left[0]) == 2_000_000
    assert peak < 5_000_000


@pytest.mark.parametrize(
    "text", ["", "[]", "5", '{"done": 1}', '{"done": [[0]]}', '{"done": [[0, 1, "xyz"]]}', '{"next": [[0]]}']
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(DecodeError, match="report of a task"):
        merged([text])
