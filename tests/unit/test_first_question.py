"""Readers of parts of topics ask again soon where librdkafka has lost the first question."""

from confluent_kafka import KafkaError, KafkaException

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
