"""Readers of parts of topics ask again soon where librdkafka has lost the first question."""

import pytest
from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.settings import KafkaConnection


class Deaf:
    """A consumer whose first question is lost."""

    def __init__(self):
        self.limits_s = []

    def get_watermark_offsets(self, place, timeout):
        self.limits_s.append(timeout)
        if len(self.limits_s) == 1:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return 3, 7

    def poll(self, timeout):
        assert timeout == 0

    def close(self):
        pass


def test_the_first_question_of_a_reader_is_given_up_soon_and_no_other(monkeypatch):
    consumer = Deaf()
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: consumer)
    assert partition_reader.bounds(KafkaConnection(), "t", [0, 1]) == {0: (3, 7), 1: (3, 7)}
    first, *others = consumer.limits_s
    assert first <= 0.2
    assert len(others) == 2
    assert min(others) > 1


class Telling(Deaf):
    """A consumer that tells where partitions begin and end, each by itself or all at once."""

    def __init__(self, *lacking):
        super().__init__()
        self.lacking, self.singles, self.closed, self.assigned = lacking, [], 0, []

    def get_watermark_offsets(self, place, timeout):
        self.singles.append(place.partition)
        return place.partition, 10 + place.partition

    def offsets_for_times(self, places, timeout):
        if "all" in self.lacking:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return [
            TopicPartition(
                one.topic,
                one.partition,
                -1 if one.partition in self.lacking else one.partition + 10 * (one.offset == OFFSET_END),
            )
            for one in places
        ]

    def assign(self, places):
        self.assigned = places

    def assignment(self):
        return self.assigned

    def unassign(self):
        self.assigned = []

    def resume(self, _):
        assert not self.assigned, "a fetch would go out"

    def close(self):
        self.closed += 1


@pytest.mark.parametrize(("lacking", "singles"), [((), [0]), ((3,), [0, 3]), (("all",), [0, 1, 2, 3])])
def test_partitions_are_asked_for_at_once_and_what_that_lacks_by_itself(monkeypatch, lacking, singles):
    consumer = Telling(*lacking)
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: consumer)
    assert partition_reader.bounds(KafkaConnection(), "t", range(4)) == {n: (n, 10 + n) for n in range(4)}
    assert consumer.singles == singles
    assert partition_reader.bounds(KafkaConnection(), "t", []) == {}


def test_consumers_are_kept_for_the_next_reader_unless_they_are_no_good(monkeypatch):
    made = []
    monkeypatch.setattr(librdkafka, "new_consumer", lambda *_: made.append(Telling()) or made[-1])
    with partition_reader.KeptConsumers(KafkaConnection()) as kept:
        partition_reader.bounds(kept, "t", [0])
        partition_reader.scan(kept, "other", {0: 10}, pytest.fail)
        assert len(made) == 1
        partition_reader.bounds(kept, "t", [0], uncommitted=True)
        assert len(made) == 2
        made[0].get_watermark_offsets = None
        with pytest.raises(TypeError):
            partition_reader.bounds(kept, "t", [0])
        assert [one.closed for one in made] == [1, 0]
        partition_reader.bounds(kept, "t", [0])
        made[2].assignment = made[1].close = _raise_fatal
        partition_reader.bounds(kept, "t", [0])
        assert [one.closed for one in made] == [1, 0, 1], "what was read counts"
        partition_reader.bounds(kept, "t", [0])
        with pytest.raises(KafkaException):
            kept.close()
        assert [one.closed for one in made] == [1, 0, 1, 1]


def _raise_fatal():
    raise KafkaException(KafkaError(KafkaError._FATAL))
