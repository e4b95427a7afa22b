"""The marker writer, over a producer whose queue holds little and is emptied by poll() only."""

import threading

import pytest

from kmqpy import kafka
from kmqpy.config import Connection
from kmqpy.marker_writer import MarkerWriter


class Delivered:
    def __init__(self, key, value, partition, offset):
        self._fields = key, value, partition, offset

    def key(self):
        return self._fields[0]

    def offset(self):
        return self._fields[3]


class TinyProducer:
    LIMIT = 2

    def __init__(self):
        self.queue = []
        self.written = 0
        self.answers = threading.Event()

    def produce(self, topic, value, key, partition, on_delivery, headers):
        if len(self.queue) >= self.LIMIT:
            raise BufferError
        self.queue.append((Delivered(key, value, partition, self.written), on_delivery))
        self.written += 1

    def produce_batch(self, topic, messages, partition, on_delivery):
        for count, message in enumerate(messages):
            try:
                self.produce(topic, message["value"], message["key"], partition, on_delivery, None)
            except BufferError as error:
                for rest in messages[count:]:
                    rest["_error"] = error
                return count
        return len(messages)

    def __len__(self):
        return len(self.queue)

    def poll(self, timeout):
        if not self.answers.wait(timeout):
            return
        served, self.queue = self.queue, []
        for record, report in served:
            report(None, record)

    def flush(self, timeout):
        self.poll(timeout)

    def purge(self):
        self.queue.clear()


@pytest.fixture
def producer(monkeypatch):
    tiny = TinyProducer()
    monkeypatch.setattr(kafka, "producer", lambda connection, settings: tiny)
    return tiny


@pytest.mark.parametrize("coalesce_ms", [None, 1])
def test_a_full_queue_is_no_dead_lock_once_kafka_answers_again(producer, coalesce_ms):
    writer = MarkerWriter(Connection(), "m", coalesce_ms=coalesce_ms)
    poster = threading.Thread(target=lambda: [writer.end(p, [1, 2, 3]) for p in range(10)], daemon=True)
    poster.start()
    assert writer.flush(0.2) > 0  # nobody answers yet
    producer.answers.set()
    poster.join(5)
    assert writer.flush(5) == 0
    assert producer.written == (30 if coalesce_ms is None else 10)
    assert writer.close() == 0


def test_close_comes_back_while_nobody_answers_and_tells_what_is_left(producer):
    writer = MarkerWriter(Connection(), "m", coalesce_ms=1)
    for partition in range(10):
        writer.end(partition, [1])
    assert writer.close(0.2) > 0
