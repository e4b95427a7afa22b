"""What a client polls of a queue that collapses, over partitions that come and go."""

import pytest
from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from kmqpy.kafka.client import collapsing
from kmqpy.kafka.client.assigned_partition import AssignedPartition, StartsFound
from kmqpy.kafka.client.collapsing import Collapsing
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.telemetry.base import Telemetry


class Member:
    """A group member whose polls are given: of each partition, the bodies that come; None: it is lost.

    Capitals are bodies of copies.
    """

    def __init__(self, *polls):
        self.polls = list(polls)
        self.asked = []
        self.partitions = {}

    def assigned(self, partition):
        return self.partitions.get(partition)

    def poll(self, max_records, wait_s):
        self.asked.append((max_records, wait_s))
        records, offsets = [], {}
        for partition, bodies in (self.polls.pop(0) if self.polls else {}).items():
            if bodies is None:
                del self.partitions[partition]
                continue
            if partition not in self.partitions:
                self.partitions[partition] = AssignedPartition(0.0)
                self.partitions[partition].finish_recovery(Commit(0, 0), StartsFound())
            assigned = self.partitions[partition]
            numbers = range(assigned.position, assigned.position + len(bodies))
            assigned.receive_expected(numbers)
            offsets[partition] = numbers
            for number, body in zip(numbers, bodies, strict=True):
                headers = [("kmq-ancestors", b"0:0")] if body.isupper() else []
                records.append(
                    Message(
                        topic="q",
                        value=body.lower().encode(),
                        headers=headers,
                        partition=partition,
                        offset=number,
                    )
                )
        return records, offsets


class Ends:
    """A consumer that knows where the logs end."""

    def __init__(self, **ends):
        self.ends = {int(name[1:]): end for name, end in ends.items()}

    def offsets_for_times(self, places, timeout):
        if not self.ends:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [TopicPartition(one.topic, one.partition, self.ends[one.partition]) for one in places]


@pytest.fixture
def client(monkeypatch):
    def make(**ends):
        monkeypatch.setattr(collapsing.librdkafka, "new_consumer", lambda *_: Ends(**ends))
        return Collapsing(KafkaConnection(), QueueSettings(name="q", collapse=True), Telemetry())

    return make


def polled(client, member, most=10):
    records, numbers = client.poll(member, most, 1.0)
    client.note_ends() if records else None
    return [record.value().decode() for record in records], {n: list(ones) for n, ones in numbers.items()}


def test_it_reads_on_behind_twins_until_it_has_as_many_as_it_may(client):
    member = Member({0: "aab"}, {0: "bb"}, {0: "cd"}, {0: "e"})
    assert polled(client(p0=99), member, 4) == (["a", "b", "c", "d"], {0: [0, 2, 5, 6]})
    assert member.asked == [(4, 1.0), (2, 0.0), (2, 0.0)]


def test_it_waits_no_longer_where_nothing_was_passed_over(client):
    member = Member({0: "ab"})
    assert polled(client(p0=99), member) == (["a", "b"], {0: [0, 1]})
    assert len(member.asked) == 1


def test_only_what_stood_below_the_end_is_passed_over(client):
    member = Member({0: "a"}, {0: "aaa"})
    one = client(p0=3)
    polled(one, member)
    assert polled(one, member) == (["a"], {0: [3]})


def test_without_an_answer_what_was_read_with_it_is_passed_over(client):
    member = Member({0: "aa"}, {0: "a"})
    one = client()
    assert polled(one, member) == (["a"], {0: [0]})
    member.polls = [{0: "a"}]
    assert polled(one, member) == (["a"], {0: [3]})


def test_copies_are_no_twins_and_have_none(client):
    assert polled(client(p0=99), Member({0: "AaAaA"})) == (["a", "a", "a", "a"], {0: [0, 1, 2, 4]})


def test_what_came_of_a_partition_that_is_lost_meanwhile_is_not_taken(client):
    member = Member({0: "aa", 1: "xx"}, {0: None, 1: "xy"})
    assert polled(client(p1=99), member) == (["x", "y"], {1: [0, 3]})


def test_what_came_of_a_partition_that_was_begun_anew_is_not_taken(client):
    member = Member({0: "aa"}, {0: None}, {0: "ab"})
    assert polled(client(p0=99), member) == ([], {})
    assert polled(client(p0=99), member) == (["a", "b"], {0: [0, 1]})


def test_a_partition_of_twins_only_is_committed(client):
    member = Member({0: "ab"}, {0: "ab"})
    one = client(p0=99)
    polled(one, member)
    assigned = member.partitions[0]
    assigned.mark_started(1, 5, 2)
    assert assigned.make_commit().offset == 2
    assert polled(one, member) == ([], {})
    assert assigned.commits.is_due
    assert assigned.make_commit().offset == 4


def test_what_is_kept_of_all_partitions_has_a_limit(client, monkeypatch):
    monkeypatch.setattr(collapsing, "MAX_DIGESTS", 4)
    member = Member({0: "abcd", 1: "abcd"})
    polled(client(p0=99, p1=99), member)
    assert [len(one.twins) for one in member.partitions.values()] == [2, 2]


def test_when_start_markers_fail_nothing_is_known_any_more(client):
    member = Member({0: "a"})
    polled(client(p0=99), member)
    assigned = member.partitions[0]
    assigned.mark_uncertain([0])
    assigned.rewind(0, 0.0)
    assert not len(assigned.twins)
