"""Calls of Kafka that are tried again."""

import gc
import weakref

from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka import kafka_errors
from kmqpy.kafka.settings import KafkaConnection

NOWHERE = KafkaConnection(bootstrap="127.0.0.1:1")


class Answer:
    pass


def test_what_failed_first_keeps_nothing_alive():
    failures = [KafkaException(KafkaError(KafkaError._TIMED_OUT))]

    def ask_and_tell():
        mine = Answer()

        def ask(try_s):
            if failures:
                raise failures.pop()
            return mine

        assert kafka_errors.retrying(ask, 5, NOWHERE) is mine
        return weakref.ref(mine)

    gc.disable()
    try:
        kept = ask_and_tell()
        assert kept() is None
    finally:
        gc.enable()
