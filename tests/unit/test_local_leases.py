"""The leases of a client's messages, against a naive model."""

from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from kmqpy.kafka.client.local_leases import LocalLeases

PLACES = st.tuples(st.integers(0, 1), st.integers(0, 12))
OFFSETS = st.sets(st.integers(0, 12), min_size=1)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(0, 1), st.sets(st.integers(0, 12), min_size=1), st.integers(1, 9)
        ),
        st.tuples(st.just("extend"), st.sets(PLACES, min_size=1), st.integers(1, 9)),
        st.tuples(st.just("discard"), st.integers(0, 1), OFFSETS),
        st.tuples(st.just("wait"), st.integers(0, 5)),
    ),
    max_size=30,
)


@given(STEPS, st.sampled_from([1, 3, 64]))
def test_it_holds_what_was_added_until_it_is_discarded_or_its_lease_ends(steps, whole):
    with patch("kmqpy.kafka.client.local_leases._MIN_RUN_LENGTH", whole):
        check_against_model(steps)


def check_against_model(steps):
    held, until, now = LocalLeases(), {}, 0
    for step in steps:
        match step:
            case ("add", partition, offsets, lease):
                # A client takes what it holds only after having lost it.
                held.discard(partition, sorted(offsets))
                held.add(partition, sorted(offsets), now + lease)
                until.update({(partition, offset): now + lease for offset in offsets})
            case ("extend", places, lease):
                held.extend(places, now + lease)
                until.update({place: now + lease for place in places if place in until})
            case ("discard", partition, offsets):
                ascending = sorted(offsets)
                run = range(ascending[0], ascending[-1] + 1)  # what is taken and acknowledged as one
                held.discard(partition, run if len(run) == len(offsets) else ascending)
                for offset in offsets:
                    until.pop((partition, offset), None)
            case ("wait", seconds):
                now += seconds
        held.expire(now)
        until = {place: end for place, end in until.items() if end > now}
        # A lease of the past may end a later one early: then fewer count, never more.
        assert len(held) <= len(until)
        if not any(kind == "add" for kind, *_ in steps[1:]):
            assert len(held) == len(until)


def test_batches_take_no_memory_for_what_follows_each_other():
    held = LocalLeases()
    for first in range(0, 1_000_000, 1_000):
        offsets = list(range(first, first + 1_000))
        held.add(0, offsets, until=30.0)
        held.discard(0, offsets)
    assert len(held) == 0
    assert all(isinstance(offsets, range) for _, _, _, offsets in held._deadlines)


def test_an_extension_outlives_the_batch():
    held = LocalLeases()
    held.add(0, [1, 2, 3], until=10.0)
    held.extend([(0, 2), (0, 9)], until=20.0)
    held.expire(15.0)
    assert len(held) == 1
    held.expire(20.0)
    assert len(held) == 0


def test_leases_of_what_is_finished_are_forgotten():
    held = LocalLeases()
    for offset in range(0, 40_000, 2):
        held.add(0, [offset], until=1_000.0)
        held.extend([(0, offset)], until=2_000.0)
        held.discard(0, [offset])
    assert len(held._deadlines) < 5_000
    assert held._extended == {}
