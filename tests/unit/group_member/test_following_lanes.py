"""Members of the lanes of a queue, which follow that of the main lane."""

import pytest
from confluent_kafka import KafkaError, TopicPartition
from group_members import IDENTITY, FakeConsumer, active, apply, record

from kmqpy.kafka import librdkafka
from kmqpy.kafka.client import group_member
from kmqpy.kafka.client.group_member import GroupMember
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.telemetry.base import Telemetry

LANE, MAIN = QueueSettings(name="q", retry_lane=True).lanes()


class Consumer(FakeConsumer):
    """Notes topics, too."""

    def __init__(self):
        super().__init__()
        self.has = set()
        self.subscribed = False
        self.committed_of = []

    def subscribe(self, topics, **callbacks):
        self.subscribed = True

    def incremental_assign(self, places):
        self.has |= {(place.topic, place.partition) for place in places}

    def incremental_unassign(self, places):
        self.has -= {(place.topic, place.partition) for place in places}

    def commit(self, offsets, asynchronous):
        self.committed_of += [(place.topic, place.partition, place.offset) for place in offsets]

    def close(self):
        pass


@pytest.fixture
def consumers(monkeypatch):
    made = []

    def new(_connection, _settings):
        made.append(Consumer())
        return made[-1]

    monkeypatch.setattr(librdkafka, "new_consumer", new)
    monkeypatch.setattr(librdkafka, "answers", lambda *_: True)
    return made


@pytest.fixture
def members(consumers, clock):
    common = {**IDENTITY, "outcome_known": lambda _: True, "clock": clock}
    main = GroupMember(KafkaConnection(), MAIN, Telemetry(), **common)
    return main, GroupMember(KafkaConnection(), LANE, Telemetry(), **common, leader=main)


def places(*partitions):
    return [TopicPartition("q", partition) for partition in partitions]


def test_r48_a_lane_has_the_partitions_of_the_main_lane(members, consumers):
    main, _ = members
    main._on_assign(consumers[0], places(0, 2))
    assert [one.subscribed for one in consumers] == [True, False]
    assert consumers[1].has == {("q__retry", 0), ("q__retry", 2)}
    main._on_revoke(consumers[0], places(2))
    main._on_assign(consumers[0], places(1))
    assert consumers[1].has == {("q__retry", 0), ("q__retry", 1)}
    main._on_lost(consumers[0], places(0, 1))
    assert consumers[1].has == set()


def test_a_lane_that_comes_later_takes_the_partitions_that_are_there(members, consumers, clock):
    main, _ = members
    main._on_assign(consumers[0], places(0))
    late = GroupMember(
        *(KafkaConnection(), LANE, Telemetry()),
        **IDENTITY,
        outcome_known=lambda _: True,
        clock=clock,
        leader=main,
    )
    assert consumers[2].has == {("q__retry", 0)}
    late.close()
    main._on_lost(consumers[0], places(0))  # does not reach it any more
    assert consumers[2].has == {("q__retry", 0)}


def test_r48_the_leader_commits_for_its_lanes_and_before_it_gives_up(members, consumers, clock):
    main, lane = members
    main._on_assign(consumers[0], places(0))
    lane._partitions[0] = active(markers_offset=5)
    apply(lane, 5, 6, 7, at=11)
    clock.sleep(1)
    lane.maintain()
    assert (consumers[0].committed_of, consumers[1].committed_of) == ([("q__retry", 0, 8)], [])
    main._on_commit(KafkaError(KafkaError.REBALANCE_IN_PROGRESS), [TopicPartition("q__retry", 0)])
    main._on_revoke(consumers[0], places(0))
    assert consumers[0].committed_of == [("q__retry", 0, 8)] * 2


def test_r48_commits_of_a_lane_are_renewed_though_nothing_comes(members, consumers, clock):
    """Kafka forgets those for topics that the group does not subscribe to."""
    main, lane = members
    main._on_assign(consumers[0], places(0))
    lane._partitions[0] = active(markers_offset=5)
    begun_at = lane._partitions[0].commits._begun_at
    lane.maintain()
    assert consumers[0].committed_of == []
    for n in (1, 2):
        clock.sleep(group_member._RENEW_EVERY_S)
        lane.maintain()
        main.maintain()
        assert consumers[0].committed_of == [("q__retry", 0, begun_at)] * n


@pytest.mark.parametrize("which", [0, 1])
def test_after_a_consumer_was_cut_off_lane_and_main_lane_agree_again(members, consumers, which):
    main, lane = members
    main._on_assign(consumers[0], places(0, 1))
    members[which].join_again()
    if which == 0:
        assert not lane._partitions
        main._on_assign(consumers[2], places(1))
    assert lane._partitions.keys() == main._partitions.keys()
    assert {partition for _, partition in lane.consumer.has} == set(main._partitions)


@pytest.mark.parametrize(
    ("end_at_begin", "known", "heard"),
    [(5, None, True), (6, None, False), (6, (0, 5), False), (6, (0, 6), True), (6, (0, 9), True)],
    ids=["nothing was there", "no answer", "an answer to an earlier fetch", "an answer", "more came"],
)
def test_a_member_has_heard_of_its_partitions_when_kafka_has_answered(
    members, consumers, clock, monkeypatch, end_at_begin, known, heard
):
    main, lane = members
    assert lane.has_heard  # without partitions, it has no messages to wait for
    main._on_assign(consumers[0], places(0, 1))
    for consumer in consumers:
        consumer.consume = lambda *_: []
    for member in members:
        for partition in (0, 1):
            member._partitions[partition] = active()
            member._partitions[partition].position = 5
    lane._partitions[0].end_at_begin = end_at_begin
    consumers[1].get_watermark_offsets = lambda *_, cached: known
    lane.poll(1, 0)
    assert lane.has_heard == (heard and known is None)
    lane.poll(1, 0)  # librdkafka has unpacked the answer by now
    assert lane.has_heard == heard
    clock.sleep(1.0)
    lane.poll(1, 0)
    assert lane.has_heard
    main._on_assign(consumers[0], places(2))
    assert not lane.has_heard


def test_a_member_to_which_records_come_has_heard_of_its_partitions(members, consumers):
    main, lane = members
    main._on_assign(consumers[0], places(0))
    lane._partitions[0] = active()
    lane._partitions[0].end_at_begin = 2
    consumers[1].get_watermark_offsets = lambda *_, cached: None
    consumers[1].consume = lambda *_: []
    lane.poll(1, 0)
    assert not lane.has_heard
    consumers[1].consume = lambda *_: [record(0)]
    lane.poll(1, 0)
    assert lane.has_heard


@pytest.mark.usefixtures("takes")
def test_a_member_has_a_second_from_when_its_partitions_are_ready(members, consumers, clock):
    main, lane = members
    main._on_assign(consumers[0], places(0))
    consumers[1].consume = lambda *_: []
    consumers[1].get_watermark_offsets = lambda *_, cached: None
    clock.sleep(5.0)  # for so long, say, it has read markers
    for elapsed_s in (0.0, 0.9):
        clock.sleep(elapsed_s)
        lane.poll(1, 0)
        assert (lane.partitions, lane.has_heard) == ([0], False)
    clock.sleep(0.1)
    lane.poll(1, 0)
    assert lane.has_heard


def test_a_higher_lane_is_not_paused_while_the_user_is_busy_until_it_keeps_a_record(members, consumers):
    """Else Kafka may answer first for the lowest lane afterwards."""
    members[0]._on_assign(consumers[0], places(0))
    for member, consumer in zip(members, consumers, strict=True):
        member._partitions[0] = active()
        consumer.consume = lambda *_: []
        member.poll(1, 0)
        assert consumer.paused == set()

    def paused_while_busy():
        for member in members:
            member._last_poll = -1_000.0
            member.keep_alive()
        return [consumer.paused for consumer in consumers]

    assert paused_while_busy() == [{0}, set()]
    consumers[1].consume = lambda *_: [record(0)]
    assert paused_while_busy() == [{0}, set()]
    assert paused_while_busy() == [{0}, {0}]
