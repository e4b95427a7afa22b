"""Calls of Kafka that are tried again."""

import gc
import weakref

from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection

NOWHERE = KafkaConnection(bootstrap="127.0.0.1:1")


class Answer:
    pass


def test_what_failed_first_keeps_nothing_alive():
    failures = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]
    mine = Answer()

    def ask(try_s):
        if failures:
            raise failures.pop()
        return mine

    gc.disable()
    try:
        assert librdkafka.retrying(ask, 5, NOWHERE) is mine
        kept = weakref.ref(mine)
        del mine, ask
        assert kept() is None
    finally:
        gc.enable()
