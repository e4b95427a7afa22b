"""The marker writer, over a producer whose queue holds little and is emptied by poll() only."""

import threading

import pytest
from confluent_kafka import KafkaError

from kmqpy import kafka
from kmqpy.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.config import Connection
from kmqpy.marker_writer import MarkerWriter
from kmqpy.markers import encode_key
from kmqpy.starting import Fence, Started, Starting


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
        self.error = None
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
            report(self.error, record)

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


def test_r10_starts_of_unknown_outcome_are_settled_when_a_tick_behind_them_is_written(producer):
    writer = MarkerWriter(Connection(), "m")
    assert writer.start({0: [1]}, {}, 1_000, None, 0.02).confirmed() == Started({}, {0: 1})
    assert writer.settled(1)
    assert not writer.settled(0)
    assert not writer.settled(0)
    assert producer.written == 2  # the start and one tick
    producer.error = KafkaError(KafkaError._MSG_TIMED_OUT)
    producer.answers.set()
    assert not writer.settled(0)  # the tick failed
    producer.error = None
    assert writer.settled(0)
    assert writer.start({0: [1]}, {}, 1_000, None, 5).confirmed().failed == {}
    assert writer.settled(0)
    writer.close(1)


def test_r10_close_waits_until_nothing_started_can_come_any_more(producer):
    writer = MarkerWriter(Connection(), "m")
    assert writer.start({0: [1], 1: [5]}, {}, 1_000, None, 0.02).confirmed().failed == {0: 1, 1: 5}
    ends = threading.Thread(target=writer.close, args=(5.0,))
    ends.start()
    ends.join(0.2)
    assert ends.is_alive()
    producer.answers.set()
    ends.join(2.0)
    assert not ends.is_alive()
    assert producer.written == 4  # two starts, and a tick behind each


def test_r10_what_a_broken_producer_sent_gets_a_while_to_arrive(producer):
    clock = Jumping()
    fence = Fence("m", 0, clock)
    fence.add(producer)
    assert not fence.passed()
    producer.error = KafkaError(KafkaError._FATAL, fatal=True)
    producer.answers.set()
    assert not fence.passed()
    clock.now = 4.0
    assert not fence.passed()
    clock.now = 6.0
    assert fence.passed()


class Jumping(SystemClock):
    """A clock that stands still until it is set."""

    now = 0.0

    def monotonic(self):
        return self.now


class Quiet:
    """A producer that reports failures only, when it is polled."""

    def __init__(self):
        self.stuck = []
        self.failures = []

    def __len__(self):
        return len(self.stuck) + len(self.failures)

    def purge(self):
        self.failures, self.stuck = self.stuck, []
        self.poll(0)

    def poll(self, timeout):
        while self.failures:
            report, key = self.failures.pop()
            report(KafkaError(KafkaError._MSG_TIMED_OUT), Delivered(key, b"", 0, None))


class Starts:
    """A starts producer whose one marker stands at 70, or failed."""

    def __init__(self, error=None):
        self.error = error
        self.report = None

    def poll(self, timeout):
        report, self.report = self.report, None
        if report is not None:
            report(self.error, Delivered(encode_key(0, 9), b"", 0, 70))


@pytest.mark.parametrize(
    ("refused", "stuck", "error", "expected"),
    [
        ((), (), None, Started({0: 70}, {})),
        ((7, 5), (), None, Started({0: 70}, {0: 5})),
        ((7,), (8, 6), None, Started({0: 70}, {0: 6})),
        ((7,), (), KafkaError(KafkaError._MSG_TIMED_OUT), Started({}, {0: 3})),  # nobody knows where they are
    ],
)
def test_f1_start_markers_without_a_report_of_each_count_as_written_only_when_they_are(
    refused, stuck, error, expected
):
    starts, quiet = Starts(error), Quiet()
    settled = []
    starting = Starting(starts, SYSTEM_CLOCK, 0.05, quiet.purge, settled.append)
    report = starting.expect_quietly(quiet, 0, range(3, 9))
    quiet.failures += [(report, encode_key(0, offset)) for offset in refused]
    quiet.stuck += [(report, encode_key(0, offset)) for offset in stuck]
    starts.report = starting.expect(0, [9])
    assert starting.confirmed() == expected
    assert settled == ([] if expected.failed else [0])


def test_f1_a_start_marker_that_is_not_accepted_is_none():
    starting = Starting(Starts(), SYSTEM_CLOCK, 0.05, lambda: None, lambda _: None)
    starting.expect(0, [9])
    starting.refuse(None, encode_key(0, 9), quiet=False)
    assert starting.confirmed() == Started({}, {0: 9})
