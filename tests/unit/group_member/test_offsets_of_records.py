"""The offsets of records that came together."""

from group_members import record
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.kafka.markers.records import offsets_of_records


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
