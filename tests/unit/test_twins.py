"""Which messages of a partition are twins of others that were taken, beside a naive reading of the rule."""

from hypothesis import given
from hypothesis import strategies as st

from kmqpy.kafka.client.twins import Twins

_DIGESTS = st.sampled_from([b"a", b"b", b"c"])


@given(
    st.lists(
        st.tuples(st.lists(_DIGESTS, min_size=1, max_size=4), st.integers(0, 5), st.integers(1, 4)),
        max_size=12,
    )
)
def test_r41_nothing_that_was_sent_when_its_twin_was_taken_is_passed_over(batches):
    """Each batch: what is read, how much more stands in the log then, and how many digests are kept."""
    twins, offset, taken = Twins(), 0, {}
    for digests, waiting, most in batches:
        read = []
        for digest in digests:
            ends = [end for first, end in taken.get(digest, []) if first < offset < end]
            first = twins.is_first(digest, offset)
            if not first:
                # It waited when one of its kind was taken: in this batch, or below the end then.
                assert digest in read or ends
            elif most == 4:  # enough for all kinds, so nothing was forgotten
                assert digest not in read
            if first:
                read.append(digest)
                taken.setdefault(digest, []).append((offset, 0))
            offset += 1
        end = offset + waiting
        for digest in read:
            first, _ = taken[digest][-1]
            taken[digest][-1] = first, end
        twins.note_end(end, offset, most)
        assert len(twins) <= most


def test_what_is_kept_is_what_may_have_twins_that_wait():
    twins = Twins()
    for offset, digest in enumerate([b"a", b"b", b"c"]):
        assert twins.is_first(digest, offset)
    twins.note_end(5, 3, 10)
    assert len(twins) == 3
    assert not twins.is_first(b"a", 3)
    assert twins.is_first(b"d", 4)
    twins.note_end(7, 5, 10)
    assert len(twins) == 1  # what stood below 5 is read
    assert not twins.is_first(b"d", 6)
    assert twins.is_first(b"d", 7)
    twins.note_end(7, 8, 10)
    assert len(twins) == 0


def test_those_that_were_taken_first_are_forgotten_first():
    twins = Twins()
    for offset, digest in enumerate([b"a", b"b"]):
        twins.is_first(digest, offset)
    twins.note_end(99, 2, 10)
    twins.is_first(b"c", 2)
    twins.note_end(99, 3, 2)
    assert [twins.is_first(digest, 3) for digest in (b"b", b"c", b"a")] == [False, False, True]


def test_after_clear_nothing_is_known():
    twins = Twins()
    twins.is_first(b"a", 0)
    twins.clear()
    assert twins.is_first(b"a", 1)
    twins.note_end(9, 2, 10)
    twins.clear()
    assert twins.is_first(b"a", 2)
