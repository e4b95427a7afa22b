"""A member of the consumer group: polls, commits, errors, and how it ends."""

import weakref

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition
from group_members import (
    GIVEN,
    IDENTITY,
    FakeConsumer,
    active,
    apply,
    commit,
    record,
)

from kmqpy.errors import AccessDenied, Fenced, TopicError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.assigned_partition import AssignedPartition, StartsFound
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.testing import ManualClock


@pytest.mark.parametrize(
    ("kafka", "credentials"),
    [
        ({}, ("", "")),
        ({"sasl.mechanism": "PLAIN", "sasl.username": "ann", "sasl.password": "s3cret"}, ("ann", "s3cret")),
    ],
)
def test_librdkafka_fetches_at_once_from_what_is_resumed(monkeypatch, kafka, credentials):
    """It looks at partitions when it is woken, and else once a second; new credentials wake it."""
    woken_by = []
    real = librdkafka.Consumer.set_sasl_credentials

    def wake(consumer, *given):
        woken_by.append(given)
        real(consumer, *given)

    monkeypatch.setattr(librdkafka.Consumer, "set_sasl_credentials", wake)
    consumer = librdkafka.new_consumer(KafkaConnection(bootstrap="127.0.0.1:1", kafka=kafka), {})
    consumer.assign([TopicPartition("q", 0)])
    consumer.pause([TopicPartition("q", 0)])
    assert not woken_by
    consumer.resume([TopicPartition("q", 0)])
    assert woken_by == [credentials]


@pytest.mark.parametrize(("partitions", "ready", "waited_s"), [(0, 0, 0.02), (2, 1, 0.02), (2, 2, 5.0)])
def test_while_partitions_are_not_ready_they_are_looked_after_often(consumer, partitions, ready, waited_s):
    consumer.consume = lambda count, timeout: consumer.waited_s.append(timeout) or []
    clock = ManualClock()
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: False, clock=clock)
    for n in range(partitions):
        member._partitions[n] = active() if n < ready else AssignedPartition(0.0)
    assert member.poll(10, 5.0) == ([], {})
    clock.sleep(60)
    member.poll(10, 5.0)
    assert consumer.waited_s == [waited_s, 0.02 if ready < partitions else 5.0]  # on standby without any


def test_a_commit_tells_where_the_starts_end_that_it_covers(member, consumer):
    apply(member, 5, 6, 7, at=11)
    commit(member)
    assert consumer.commits == [(8, "kmq2:12:Q:M")]


def test_a_commit_that_failed_is_made_again(member, consumer):
    """Even if no message comes any more: else others believe that the queue waits for its consumer."""
    apply(member, 5, 6, 7, at=11)
    commit(member)
    commit(member)
    assert len(consumer.commits) == 1
    member._on_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), [])
    commit(member)
    assert consumer.commits == [(8, "kmq2:12:Q:M")] * 2


def test_r10_after_a_failed_start_commits_lead_to_the_starts_they_do_not_cover(member, consumer):
    # The starts of 3 to 8 stand at 5 to 9, but that of 4 failed.
    member._partitions[0].commits.receive(6)
    apply(member, *range(3, 9), at=9, failed=4)
    commit(member)
    assert consumer.sought == 4
    # Taken again one by one, their new starts behind the old ones.
    for offset, at in [(4, 10), (5, 11), (6, 12), (7, 13), (8, 14), (9, 15)]:
        member._partitions[0].commits.receive(1)
        apply(member, offset, at=at)
        commit(member)
    assert consumer.commits == [
        (4, "kmq2:5:Q:M"),
        (5, "kmq2:5:Q:M"),
        (6, "kmq2:5:Q:M"),
        (7, "kmq2:5:Q:M"),
        (8, "kmq2:5:Q:M"),
        (9, "kmq2:15:Q:M"),
        (10, "kmq2:16:Q:M"),
    ]


def test_r10_what_is_recovered_and_lies_ahead_keeps_the_older_offset(member, consumer):
    known = member._partitions[0]
    known._add_found(2, StartsFound(OffsetRuns([(9, 1)])))
    apply(member, 7, at=11)
    commit(member)
    apply(member, 10, at=12)
    commit(member)
    assert consumer.commits == [(8, "kmq2:2:Q:M"), (11, "kmq2:13:Q:M")]


@pytest.mark.parametrize(("settles_at", "given_up_at"), [(0.5, 0.5), (1_000.0, 2.0)])
def test_r10_a_partition_is_given_up_when_nothing_started_can_come_any_more(
    consumer, settles_at, given_up_at
):
    clock = ManualClock()
    member = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=lambda partition: partition == 1 or clock.monotonic() >= settles_at,
        clock=clock,
    )
    member._partitions = {0: active(), 1: active()}
    member._on_revoke(consumer, [TopicPartition("q", 1)])
    assert clock.monotonic() == 0.0
    member._on_revoke(consumer, [TopicPartition("q", 0)])
    assert clock.monotonic() == pytest.approx(given_up_at, abs=0.05)  # a rebalance does not wait for ever
    assert member.partitions == []


def test_a_partition_is_given_up_whatever_is_raised_on_the_way(consumer):
    def interrupted(partition):
        raise KeyboardInterrupt

    given_up = []
    consumer.incremental_unassign = given_up.extend
    member = GroupMember(
        *GIVEN,
        **IDENTITY,
        outcome_known=interrupted,
    )
    member._partitions = {0: active(), 1: active()}
    with pytest.raises(KeyboardInterrupt):
        member._on_revoke(consumer, [TopicPartition("q", 0)])
    member.start_over()  # what the client does after an error
    assert list(member._partitions) == [1]
    assert given_up == [TopicPartition("q", 0)]


def test_a_busy_member_keeps_polling_although_something_came(member, consumer):
    # Else it would be no member any more after max.poll.interval.ms.
    for _ in range(3):
        member._last_poll = -1_000.0
        member.keep_alive()
    assert consumer.polls == 3
    assert [record.at for record in member._fetcher._ahead] == [101, 102, 103]
    member._fetcher.seek(0, 102)
    assert member._fetcher._ahead == []  # it will be read again


def test_what_came_to_a_busy_member_is_received_when_it_asks_again_however_little(member, consumer):
    consumer.offsets = [*range(6)]
    for _ in range(3):
        member.serve()
    assert member._fetcher.kept == 3
    assert [member.poll(1, 0)[1] for _ in range(3)] == [{0: range(at, at + 1)} for at in range(3)]


def test_a_member_with_records_kept_hears_of_rebalances_and_errors_at_each_poll(member, consumer):
    """They are told inside the consumer's own polls."""
    consumer.offsets = [*range(6)]
    for _ in range(3):
        member.serve()
    for at in range(3):
        before = consumer.polls
        assert member.poll(1, 0)[1] == {0: range(at, at + 1)}
        assert consumer.polls == before + 1
    consumer.consume = lambda *_: [Message(error=KafkaError(KafkaError._FATAL))]
    with pytest.raises(Fenced):
        member.poll(1, 0)


def test_a_partition_that_is_not_fetched_yet_is_fetched_from_where_it_is_sought(member, consumer):
    def seek(place):
        raise KafkaException(KafkaError(KafkaError._STATE))

    assigned = []
    consumer.seek, consumer.incremental_assign = seek, assigned.extend
    apply(member, 4, failed=4)
    assert [(place.partition, place.offset) for place in assigned] == [(0, 4)]


def failing(code):
    return lambda count, timeout: [Message(topic="q", error=KafkaError(code))]


@pytest.mark.parametrize(
    ("code", "raised"),
    [
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AccessDenied),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, TopicError),
        (KafkaError._UNKNOWN_TOPIC, TopicError),
    ],
)
def test_an_error_that_waiting_does_not_mend_is_raised(member, consumer, code, raised):
    consumer.consume = failing(code)
    with pytest.raises(raised):
        member.poll(1, 0)


def test_after_an_error_that_passes_it_goes_on(member, consumer):
    consume, consumer.consume = consumer.consume, failing(KafkaError._TRANSPORT)
    assert member.poll(1, 0) == ([], {})
    consumer.consume, consumer.offsets = consume, [0]
    assert member.poll(1, 0)[1] == {0: range(1)}


def test_who_is_fenced_receives_nothing_more(member, consumer):
    """Others have its partitions."""
    consume, consumer.consume = consumer.consume, failing(KafkaError._FATAL)
    with pytest.raises(Fenced):
        member.poll(1, 0)
    consumer.consume, consumer.offsets = consume, [0]
    with pytest.raises(Fenced):
        member.poll(1, 0)


def test_a_busy_member_fetches_nothing_until_it_is_asked_again(member, consumer):
    """Else keep_alive() would pile up records for as long as the user's code is busy."""
    member._partitions[1] = active()
    for offset in (3, 4):
        consumer.offsets = [offset]
        assert member.poll(1, 0)[1] == {0: range(offset, offset + 1)}
        assert consumer.paused == set()
        member.keep_alive()
        assert consumer.paused == set(), "it is not busy yet"
        member._last_poll = -1_000.0
        member.keep_alive()
        assert consumer.paused == {0, 1}
        member._fetcher.drop_ahead([0, 1])


@pytest.mark.usefixtures("takes")
def test_what_is_kept_of_partitions_that_do_not_start_over_is_received(member, consumer):
    """librdkafka does not give it again."""
    member._partitions[1] = active()
    consumer.consume = lambda *_: [record(0, 0), record(3, 1)]
    member.serve()
    consumer.consume = lambda *_: []
    member.start_over([0])
    assert member.poll(10, 0)[1] == {1: range(3, 4)}


def test_a_member_that_is_only_served_keeps_so_many_records_and_no_more(member, consumer):
    consumer.offsets = [*range(300)]
    for _ in range(101):
        member.serve()
    assert consumer.paused == {0}
    assert member.poll(1, 0)[1] == {0: range(1)}
    assert consumer.paused == {0}, "Kafka would send all of it anew, each time for one record"
    assert len(member.poll(100, 0)[0]) == 100
    assert consumer.paused == set()


@pytest.mark.usefixtures("takes")
@pytest.mark.parametrize("ready", [True, False])
def test_a_member_that_is_only_served_gets_new_partitions_ready_however_much_is_kept(member, consumer, ready):
    consumer.offsets = [*range(300)]
    for _ in range(101):
        member.serve()
    member._on_assign(consumer, [TopicPartition("q", 1)])
    if ready:
        member.serve()
    else:  # in time for the user, who is busy
        member._last_poll = -1_000.0
        member.keep_alive()
    assert member.partitions == ([0, 1] if ready else [0])
    assert consumer.paused == {0, 1}, "nothing more is kept"


@pytest.mark.parametrize("usual", [True, False])
def test_what_librdkafka_reads_again_is_not_taken_again(member, consumer, usual):
    known = member._partitions[0]
    if usual:  # nothing to look at in single records
        known.commits.skip(-1)
    consumer.offsets = [0, 1, 2, 5, 6]
    _, found = member.poll(5, 0)
    assert found == {0: [0, 1, 2, 5, 6]}
    consumer.offsets = [7, 0, 1, 2, 5, 6, 7, 8]  # from the beginning, in the middle of a batch
    _, found = member.poll(3, 0)
    assert found == {0: range(7, 8)}
    _, found = member.poll(5, 0)
    assert found == {0: range(8, 9)}


def test_a_consumer_that_is_cut_off_ends_although_somebody_keeps_an_error_of_it(monkeypatch):
    """It ends when Python frees it, and a traceback refers to what its functions referred to."""
    monkeypatch.setattr(librdkafka, "new_consumer", lambda connection, settings: FakeConsumer())
    member = GroupMember(*GIVEN, **IDENTITY, outcome_known=lambda _: True)
    former = weakref.ref(member.consumer)
    former().end = None  # so that reading it raises
    member._partitions[0] = active(markers_offset=5)
    with pytest.raises(TypeError) as kept:
        member.poll(1, 0)
    member.join_again()
    assert former() is None
    assert kept.tb


@pytest.mark.parametrize(
    ("last_at", "back_in"),
    [({0: 11}, []), ({0: 12, 1: 0}, []), ({0: 10}, [0]), ({0: 0, 1: 99}, [0]), ({0: -1}, [])],
)
def test_r24_start_markers_that_stand_before_earlier_ones_are_in_another_log(member, last_at, back_in):
    apply(member, 7, at=10)
    assert member.goes_back_in(last_at) == back_in


def test_r24_another_markers_topic_alone_has_commits_lead_to_its_beginning(member, consumer):
    apply(member, 7, at=11)
    member.follow(TopicIds("Q", "new"))
    commit(member)
    apply(member, 8, at=3)
    commit(member)
    assert consumer.commits == [(8, "kmq2:0:Q:new"), (9, "kmq2:4:Q:new")]
