"""A consumer that only writes down what it is asked, and a member of the group over it."""

from typing import NamedTuple

from confluent_kafka import Message, TopicPartition

from kmqpy.kafka.client.assigned_partition import AssignedPartition, StartsFound
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.client.start_markers import StartOutcome
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.telemetry.base import Telemetry

GIVEN = (KafkaConnection(), QueueSettings(name="q"), Telemetry())
IDENTITY = {"ids": TopicIds("Q", "M"), "ids_known": lambda _: True, "write_assignment_ticks": lambda _: ()}


class FakeRecord(NamedTuple):
    place: int
    at: int

    def error(self):
        return None

    def partition(self):
        return self.place

    def offset(self):
        return self.at

    def leader_epoch(self):
        return None


def record(offset, partition=0):
    return Message(topic="q", value=b"", partition=partition, offset=offset)


class FakeConsumer:
    def __init__(self):
        self.commits = []
        self.polls = 0
        self.offsets = []  # to come first
        self.end = 1_000
        self.of_predecessor = TopicPartition("q", 0)
        self.paused = set()
        self.waited_s = []

    def consume(self, count, timeout):
        self.polls += 1
        self.waited_s.append(timeout)
        if not self.offsets:
            return [FakeRecord(0, 100 + self.polls)]
        if 0 in self.paused:
            return []
        some, self.offsets = self.offsets[:count], self.offsets[count:]
        return [record(at) for at in some]

    def get_watermark_offsets(self, place, cached=False, timeout=None):
        return 0, self.end

    def subscribe(self, topics, **callbacks):
        pass

    def seek(self, place):
        self.sought = place.offset

    def committed(self, places, timeout):
        return [self.of_predecessor]

    def offsets_for_times(self, places, timeout):
        return [TopicPartition(place.topic, place.partition, self.end) for place in places]

    def incremental_assign(self, places):
        pass

    def pause(self, places):
        self.paused |= {place.partition for place in places}

    def resume(self, places):
        self.paused -= {place.partition for place in places}

    def commit(self, offsets, asynchronous):
        self.commits += [(place.offset, place.metadata) for place in offsets]

    def incremental_unassign(self, places):
        pass


def active(markers_offset=None):
    """A partition whose predecessor's commit says this markers offset."""
    made = AssignedPartition(0.0)
    made.finish_recovery(Commit(0, markers_offset), StartsFound())
    return made


def apply(member, *offsets, at=None, failed=None):
    """The start markers of messages below `failed` are confirmed, the last at this markers offset."""
    outcome = StartOutcome({} if at is None else {0: at}, {} if failed is None else {0: failed})
    member.apply_start_outcome({0: offsets}, outcome)


def commit(member):
    member._commit_schedule.note_commit(-1_000.0)
    member.maintain()


def take_one(member, consumer, offset, markers_offset):
    """Poll and take a message, and commit."""
    consumer.offsets = [offset]
    assert member.poll(1, 0)[1] == {0: range(offset, offset + 1)}
    apply(member, offset, at=markers_offset)
    commit(member)


def assign(member, consumer, *partitions):
    member._partitions.clear()
    member._on_assign(consumer, [TopicPartition("q", partition) for partition in partitions])
