"""The assignment: what every tracker computes for itself must be the same and fair."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tracker.leadership import assignment
from tracker.leadership.assignment import Member, assign, capacity

QUEUES = ("orders", "mail", "audit")
IDS = st.sampled_from([f"tracker-{n}" for n in range(8)])
PARTITIONS = st.sets(st.tuples(st.sampled_from(QUEUES), st.integers(0, 30)), max_size=60)
MEMBERS = st.lists(
    st.builds(
        Member,
        id=IDS,
        queues=st.none() | st.frozensets(st.sampled_from(QUEUES)),
        kafka_ok=st.booleans(),
    ),
    unique_by=lambda member: member.id,
    max_size=8,
)
EQUAL_MEMBERS = st.sets(IDS, min_size=1).map(lambda ids: [Member(i) for i in sorted(ids)])


@settings(deadline=None)
@given(PARTITIONS, MEMBERS, st.randoms())
def test_everyone_computes_the_same(partitions, members, random):
    ranking = assign(partitions, members)
    shuffled_partitions, shuffled_members = list(partitions), list(members)
    random.shuffle(shuffled_partitions)
    random.shuffle(shuffled_members)
    assert assign(shuffled_partitions, shuffled_members) == ranking


@settings(deadline=None)
@given(PARTITIONS, MEMBERS)
def test_a_ranking_holds_every_eligible_member_once_and_no_other(partitions, members):
    ranking = assign(partitions, members)
    for partition in partitions:
        eligible = {member.id for member in members if member.serves(partition[0])}
        rank = ranking.get(partition, ())
        assert set(rank) == eligible
        assert len(rank) == len(eligible)
    assert ranking.keys() <= partitions


@settings(deadline=None)
@given(PARTITIONS, EQUAL_MEMBERS)
def test_nobody_is_proposed_more_than_its_bound(partitions, members):
    load = Counter(rank[0] for rank in assign(partitions, members).values())
    assert load.total() == len(partitions)
    assert all(n <= capacity(len(partitions), len(members)) for n in load.values())


@settings(deadline=None)
@given(st.text(min_size=1, max_size=20), st.sets(st.text(min_size=1, max_size=9), min_size=2, max_size=2))
def test_four_partitions_on_two_trackers_are_shared(queue, ids):
    members = [Member(member) for member in sorted(ids)]
    load = Counter(rank[0] for rank in assign([(queue, p) for p in range(4)], members).values())
    assert sorted(load.values()) in ([1, 3], [2, 2])


@settings(max_examples=50, deadline=None)
@given(st.integers(20, 120), st.integers(3, 8), st.data())
def test_when_a_member_leaves_little_else_moves(partitions, count, data):
    members = [Member(f"tracker-{n}") for n in range(count)]
    leaver = data.draw(st.sampled_from(members))
    names = [("orders", p) for p in range(partitions)]
    before = {p: rank[0] for p, rank in assign(names, members).items()}
    after = {p: rank[0] for p, rank in assign(names, [m for m in members if m != leaver]).items()}
    survivors = [p for p in names if before[p] != leaver.id]
    moved = [p for p in survivors if before[p] != after[p]]
    assert len(moved) <= len(survivors) * 0.3


def test_no_member_nothing_proposed():
    assert assign([("orders", 0)], []) == {}
    assert assign([("orders", 0)], [Member("a", kafka_ok=False)]) == {}
    assert assign([("orders", 0)], [Member("a", frozenset({"mail"}))]) == {}
    assert assign([], [Member("a")]) == {}


def test_a_partition_that_only_a_full_member_serves_is_still_proposed_to_it():
    members = [Member("a"), Member("b", frozenset({"mail"}))]
    ranking = assign([("orders", p) for p in range(10)] + [("mail", 0)], members)
    assert all(ranking["orders", p] == ("a",) for p in range(10))
    assert ranking["mail", 0][0] == "b"


def test_the_assignment_is_the_same_in_every_version():
    members = [Member("a"), Member("b"), Member("c")]
    assert assign([("orders", p) for p in range(3)], members) == {
        ("orders", 0): ("c", "b", "a"),
        ("orders", 1): ("b", "a", "c"),
        ("orders", 2): ("c", "a", "b"),
    }
    # Here the bound decides, too: 13 of them meet member a first, which takes 11 at most.
    owners = assign([("orders", p) for p in range(23)], members).owners
    assert "".join(owners["orders", p] for p in range(23)) == "cbccabbaaccabbaaaaababa"


@settings(deadline=None)
@given(PARTITIONS, MEMBERS, IDS, st.integers(1, 4))
def test_near_is_where_a_member_is_among_the_first(partitions, members, member, count):
    ranking = assign(partitions, members)
    assert ranking.near(member, count) == {
        partition: rank[:count] for partition, rank in ranking.items() if member in rank[:count]
    }


@settings(deadline=None)
@given(PARTITIONS, EQUAL_MEMBERS)
def test_members_are_passed_over_only_at_their_bound(partitions, members):
    """Without bounds each partition is its first choice's; nobody prefers another that prefers it."""
    ranking = assign(partitions, members)
    bound = capacity(len(partitions), len(members))
    load = Counter(ranking.owners.values())
    for partition, owner in ranking.owners.items():
        first = assign([partition], members).owners[partition]
        assert first == owner or load[first] == bound


def test_at_1000_trackers_little_moves_besides_what_must():
    """100,000 partitions: the size of docs/scale.md."""
    members = [Member(f"tracker-{n}") for n in range(1_000)]
    names = [(f"queue-{q}", p) for q in range(100) for p in range(1_000)]
    before = assign(names, members).owners
    after = assign(names, members[100:]).owners
    dead = {member.id for member in members[:100]}
    must = sum(before[name] in dead for name in names)
    assert must <= sum(before[name] != after[name] for name in names) <= 1.1 * must


def test_whether_a_partition_is_in_it_is_told_without_a_ranking(monkeypatch):
    """At 1,000 trackers and 100 partitions of one's own that took a quarter of a second at each change."""
    proposal = assign([("orders", p) for p in range(10)], [Member("a"), Member("b")])
    monkeypatch.delattr(assignment._Ring, "walk")
    mine = {("orders", 3), ("orders", 99), ("mail", 0)}
    assert mine & proposal.keys() == {("orders", 3)}
