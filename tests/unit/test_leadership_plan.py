"""What a tracker does next, from what it sees: no server needed."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from tracker.leadership.assignment import Partition, Plan, next_actions

P0, P1, P2 = ("q", 0), ("q", 1), ("q", 2)
DELAY = 3.0


def decide(
    me: str = "a",
    ranking: Mapping[Partition, tuple[str, ...]] | None = None,
    held: frozenset[Partition] = frozenset(),
    unowned: Mapping[Partition, float] | None = None,
    stand_in: frozenset[Partition] = frozenset(),
    deleting: tuple[str, ...] = (),
    now: float = 100.0,
) -> Plan:
    return next_actions(
        me,
        ranking or {},
        held=held,
        deleting=deleting,
        unowned_since=unowned or {},
        stand_in=stand_in,
        now=now,
        takeover_delay=DELAY,
    )


def test_takes_what_is_proposed_to_it_at_once():
    todo = decide(ranking={P0: ("a", "b"), P1: ("b", "a")}, unowned={P0: 100.0, P1: 100.0})
    assert todo.acquire == (P0,)
    assert todo.next_due == 100.0 + DELAY
    assert todo.releasing == frozenset()


def test_leaves_what_another_still_holds():
    todo = decide(ranking={P0: ("a", "b")})
    assert todo.acquire == ()
    assert todo.next_due is None


def test_releases_what_is_proposed_to_another():
    todo = decide(ranking={P0: ("b", "a"), P1: ("a", "b")}, held=frozenset({P0, P1}))
    assert todo.releasing == {P0}


def test_keeps_what_nobody_can_serve():
    assert decide(held=frozenset({P0})).releasing == frozenset()


def test_releases_a_queue_that_is_being_removed_and_takes_none_of_it():
    todo = decide(ranking={P1: ("a",)}, held=frozenset({P0}), unowned={P1: 0.0}, deleting=("q",))
    assert todo.releasing == {P0}
    assert todo.acquire == ()


def test_the_next_in_rank_takes_what_nobody_took():
    ranking = {P0: ("b", "a", "c")}
    assert decide(ranking=ranking, unowned={P0: 100.0}, now=102.9).acquire == ()
    todo = decide(ranking=ranking, unowned={P0: 100.0}, now=103.0)
    assert todo.acquire == (P0,)
    assert todo.stand_in == {P0}
    assert decide("c", ranking, unowned={P0: 100.0}, now=105.9).next_due == 106.0


def test_a_stand_in_keeps_its_partition_until_the_membership_changes():
    ranking = {P0: ("b", "a")}
    todo = decide(ranking=ranking, held=frozenset({P0}), stand_in=frozenset({P0}))
    assert todo.releasing == frozenset()
    assert todo.stand_in == {P0}
    assert decide(ranking=ranking, held=frozenset({P0})).releasing == {P0}


def test_a_stand_in_that_lost_its_partition_is_none_any_more():
    assert decide(ranking={P0: ("b", "a")}, stand_in=frozenset({P0})).stand_in == frozenset()


PARTITIONS = st.sampled_from([P0, P1, P2])
RANKS = st.permutations(["a", "b", "c"]).map(tuple)


@given(
    st.dictionaries(PARTITIONS, RANKS),
    st.dictionaries(PARTITIONS, st.sampled_from(["a", "b", "c"])),
    st.integers(0, 20),
)
def test_at_most_one_takes_at_once_and_everything_is_taken_in_the_end(ranking, holders, waited):
    unowned = {p: 100.0 for p in ranking if p not in holders}
    plans = {
        me: decide(
            me,
            ranking,
            held=frozenset(p for p, holder in holders.items() if holder == me),
            unowned=unowned,
            now=100.0 + waited,
        )
        for me in ("a", "b", "c")
    }
    for me, todo in plans.items():
        assert not set(todo.acquire) & set(holders)
        assert all(holders[p] == me for p in todo.releasing)
    for partition in unowned:
        takers = [me for me, todo in plans.items() if partition in todo.acquire]
        assert ranking[partition][0] in takers
        assert len(takers) == min(3, 1 + int(waited // DELAY))
