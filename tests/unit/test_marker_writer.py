"""The marker writer, over a producer whose queue holds little and is emptied by poll() only."""

import threading

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.errors import ConfigError
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client import marker_writer
from kmqpy.kafka.client.marker_writer import MarkerWriter
from kmqpy.kafka.client.start_markers import StartBatch, StartOutcome
from kmqpy.kafka.client.unconfirmed_starts import UnconfirmedStarts
from kmqpy.kafka.markers.codec import (
    Marker,
    Op,
    assignment_tick,
    decode,
    decode_key,
    encode_key,
    topic_tag,
)
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

SINGLE = QueueSettings(name="q", markers_topic="m", markers="jvm")
RANGES = QueueSettings(name="q", markers_topic="m", markers="range")


class Delivered:
    def __init__(self, key, value, partition, offset):
        self._fields = key, value, partition, offset

    def key(self):
        return self._fields[0]

    def value(self):
        return self._fields[1]

    def partition(self):
        return self._fields[2]

    def offset(self):
        return self._fields[3]

    def headers(self):
        return None


class TinyProducer:
    LIMIT = 2
    fatal_error = None
    only_errors = False

    def __init__(self):
        self.queue = []
        self.log = []
        self.written = 0
        self.error = None
        self.refused = ()  # partitions whose markers fail
        self.leaderless = ()  # partitions of which nothing is heard
        self.answers = threading.Event()
        self.lock = threading.RLock()  # the writer's threads share it, each of which has its own in earnest

    def produce(self, topic, value, key, partition, on_delivery, headers):
        with self.lock:
            if len(self.queue) >= self.LIMIT:
                raise BufferError
            record = Delivered(key, value, partition, self.written)
            record.sent_headers, record.by = headers, self
            self.log.append(record)
            self.queue.append((record, on_delivery))
            self.written += 1

    def list_topics(self, *_):
        if not self.answers.is_set():
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    def produce_batch(self, topic, messages, partition, on_delivery):
        for count, message in enumerate(messages):
            try:
                self.produce(topic, message["value"], message["key"], partition, on_delivery, None)
            except BufferError:
                for rest in messages[count:]:
                    rest["_error"] = KafkaError(KafkaError._QUEUE_FULL)
                return count
        return len(messages)

    def __len__(self):
        return len(self.queue)

    def poll(self, timeout):
        if not self.answers.wait(timeout):
            return
        with self.lock:
            leaderless, refused = self.leaderless, self.refused  # tests change them meanwhile
            served, self.queue = self.queue, []
            self.queue = [one for one in served if one[0].partition() in leaderless]
            for record, report in served:
                if record.partition() in refused:
                    report(KafkaError(KafkaError._MSG_TIMED_OUT), record)
                elif record.partition() not in leaderless and not (self.only_errors and self.error is None):
                    report(self.error, record)

    def flush(self, timeout):
        self.poll(min(timeout, 0.05))  # no test has it answer during a flush

    def purge(self):
        with self.lock:
            purged, self.queue = self.queue, []
            for record, report in purged:
                report(KafkaError(KafkaError._PURGE_QUEUE), record)


class Choosy(TinyProducer):
    """Answers at once, and refuses the markers of some queue offsets."""

    LIMIT = 1_000
    refused = ()

    def poll(self, timeout):
        served, self.queue = self.queue, []
        for record, report in served:
            refused = decode_key(record.key())[1] in self.refused
            report(KafkaError(KafkaError._MSG_TIMED_OUT) if refused else None, record)


@pytest.fixture
def producer(monkeypatch):
    tiny = TinyProducer()
    monkeypatch.setattr(librdkafka, "new_producer", lambda connection, settings: tiny)
    return tiny


@pytest.mark.parametrize("queue", [SINGLE, RANGES])
def test_a_full_queue_is_no_dead_lock_once_kafka_answers_again(producer, queue):
    writer = MarkerWriter(KafkaConnection(), queue)
    poster = threading.Thread(target=lambda: [writer.end(p, [1, 2, 3]) for p in range(10)], daemon=True)
    poster.start()
    assert writer.flush(0.2) > 0  # nobody answers yet
    producer.answers.set()
    poster.join(60)
    assert writer.flush(5) == 0
    assert producer.written == (30 if queue is SINGLE else 10)
    assert writer.close() == 0


@pytest.mark.parametrize("queue", [SINGLE, RANGES])
def test_r24_markers_by_receipt_name_the_topic(producer, queue):
    producer.LIMIT = 100
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), queue, topic_id="T")
    writer.put([(0, [1]), (0, [2])])
    writer.put([(0, [5])], by_receipt=True)
    writer.put([(0, [4]), Marker(0, 7, Op.NACK)], by_receipt=True)
    assert writer.write([(0, [6])], 5.0, by_receipt=True) == 0
    assert writer.close() == 0
    written = [decode(one.key(), one.value(), one.sent_headers) for one in producer.log]
    named = {one.op: set() for one in written}
    for one in written:
        named[one.op] |= set(one.offsets()) if one.topic == topic_tag("T") else set()
    ends = set() if queue is SINGLE else {4, 5, 6}  # batches of librdkafka have no headers
    assert named == {Op.END: ends, Op.NACK: {7}}


def test_close_comes_back_while_nobody_answers_and_tells_what_is_left(producer):
    writer = MarkerWriter(KafkaConnection(), RANGES)
    for partition in range(10):
        writer.end(partition, [1])
    assert writer.close(0.2) > 0


def test_r26_waiting_ignores_other_partitions(producer):
    producer.LIMIT = 100
    producer.leaderless, producer.refused = (1,), (2,)
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    writer.end(1, [1])
    writer.end(2, [1])
    assert writer.write([(0, [1, 2])], 30.0) == 0
    assert writer.write([(0, [3]), (2, [3])], 0.3) > 0  # of its own some are not confirmed
    assert writer.flush(0.3) > 0
    producer.leaderless = producer.refused = ()
    assert writer.flush(30.0) == 0
    writer.close()


def test_r30_ticks_of_assignments_are_waited_for_together(producer):
    producer.LIMIT = 100
    producer.leaderless = (1, 3)
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    ticks = [assignment_tick(partition, 7, again=partition < 3) for partition in range(4)]
    began = SYSTEM_CLOCK.monotonic()
    assert writer.write_assignments(ticks, 0.3) == {1, 3}
    assert SYSTEM_CLOCK.monotonic() - began < 10, "not one after the other"
    written = [decode(one.key(), one.value(), one.sent_headers) for one in producer.log]
    assert sorted(written, key=lambda tick: tick.partition) == ticks
    assert writer.flush(5.0) == 0, "who flushes waits for none of them"
    producer.leaderless = ()
    writer.close()


def test_r26_a_flush_waits_for_nothing_that_is_posted_later(producer):
    producer.leaderless = (1,)
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    writer.end(0, [1])
    left = []
    flushing = threading.Thread(target=lambda: left.append(writer.flush(5.0)))
    flushing.start()
    while not writer._waiters:
        flushing.join(0.001)
    writer.end(1, [1])
    producer.answers.set()
    flushing.join()
    assert left == [0]
    assert writer.close(0.1) == 1


def test_r26_waiting_ends_with_the_confirmation(producer, monkeypatch):
    """Looking for it now and then costs whoever acknowledges one message after the other most of the time."""
    monkeypatch.setattr(marker_writer, "_AWAITED_POLL_S", 60)
    answer, polling = producer.poll, threading.Event()

    def poll(timeout_s):
        if timeout_s:
            polling.set()
            producer.answers.wait(timeout_s)
        answer(timeout_s)

    monkeypatch.setattr(producer, "poll", poll)
    writer, left = MarkerWriter(KafkaConnection(), RANGES), []
    waiting = threading.Thread(target=lambda: left.append(writer.write([(0, [1])], 60.0)))
    waiting.start()
    assert polling.wait(10)
    producer.answers.set()
    waiting.join(10)
    assert (left, writer._waiters) == ([0], [])
    assert writer.close() == 0


def test_r26_waiting_ends_when_the_writer_is_closed(producer):
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    left = []
    waiting = threading.Thread(target=lambda: left.append(writer.write([(0, [1])], 60.0)))
    waiting.start()
    while not producer.queue:
        waiting.join(0.01)
    assert writer.close(0.2) > 0
    waiting.join(10.0)
    assert left == [1]


def test_r26_an_interrupt_ends_waiting(producer, monkeypatch):
    """Else the writer's thread looks every ms, and nothing is collected, for as long as the client lives."""
    writer = MarkerWriter(KafkaConnection(), SINGLE)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer._wait(writer._put_apart([(0, [1])]), 60.0)
    assert not writer._waiters
    producer.answers.set()
    assert writer.close() == 0


def test_r26_a_marker_that_can_not_be_encoded_is_its_callers_fault(producer):
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    with pytest.raises(AttributeError):
        writer.put_one(Marker(0, 1, Op.NACK, reason=7))
    assert writer.write([Marker(0, 1, Op.NACK, reason="7")], 5.0) == 0
    assert writer.close() == 0


def test_r26_what_an_unknown_error_prevents_is_not_taken_for_written(producer, monkeypatch):
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    monkeypatch.setattr(producer, "produce", lambda *_, **__: 1 / 0)
    assert writer.write([(0, [1])], 0.2) == 1
    monkeypatch.undo()
    assert writer.write([(0, [2])], 5.0) == 0
    assert writer.close(0.2) == 1


def test_r10_the_outcome_of_starts_is_known_when_a_tick_behind_them_is_written(producer):
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    assert writer.starts.start({0: [1]}, {}, 1_000, None, 0.02).wait_until_confirmed() == StartOutcome(
        {}, {0: 1}
    )
    assert writer.starts.outcome_known(1)
    assert not writer.starts.outcome_known(0)
    assert not writer.starts.outcome_known(0)
    assert producer.written == 2  # the start and one tick
    producer.error = KafkaError(KafkaError._MSG_TIMED_OUT)
    producer.answers.set()
    assert not writer.starts.outcome_known(0)  # the tick failed
    producer.error = None
    assert writer.starts.outcome_known(0)
    assert writer.starts.start({0: [1]}, {}, 1_000, None, 5).wait_until_confirmed().failed == {}
    assert writer.starts.outcome_known(0)
    writer.close(1)


@pytest.mark.parametrize("queue", [SINGLE, RANGES])
def test_r11_what_is_confirmed_too_late_is_given_back_right_behind_its_start(producer, monkeypatch, queue):
    """Before anybody knows that it stands there, and by the same producer, which writes in order."""

    def one_of_three(connection, settings):
        made = TinyProducer()
        made.LIMIT, made.log, made.answers = 1_000, producer.log, producer.answers
        made.only_errors = settings.get("delivery.report.only.error", False)
        return made

    monkeypatch.setattr(librdkafka, "new_producer", one_of_three)
    writer = MarkerWriter(KafkaConnection(), queue)
    takes = {0: list(range(300)), 1: [5]}  # many of one partition, which have no report of each
    batch = writer.starts.start(takes, {(1, 9): 60_000}, 1_000, None, 5.0, hand_out_until=0.0)
    waiting = threading.Thread(target=lambda: found.append(batch.wait_until_confirmed()))
    found = []
    waiting.start()
    while not batch._given_back:
        waiting.join(0.001)
    assert waiting.is_alive()
    producer.answers.set()
    waiting.join()
    assert (found[0].failed, found[0].given_back) == ({}, True)
    written = {}
    for at, record in enumerate(producer.log):
        marker = decode(record.key(), record.value(), record.sent_headers)
        written |= {(marker.op, marker.partition, offset): (at, record.by) for offset in marker.offsets()}
        assert marker.op is not Op.NACK or not marker.counts
    for partition, offsets in takes.items():
        for offset in offsets:
            take, nack = (written[op, partition, offset] for op in (Op.TAKE, Op.NACK))
            assert take[0] < nack[0]
            assert take[1] is nack[1]
    assert (Op.NACK, 1, 9) not in written
    writer.close(1)


def test_r11_what_is_confirmed_in_time_is_not_given_back(producer):
    producer.answers.set()
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    batch = writer.starts.start({0: [1]}, {}, 1_000, None, 5.0, SYSTEM_CLOCK.monotonic() + 60)
    assert not batch.wait_until_confirmed().given_back
    assert len(producer.log) == 1
    writer.close(1)


def test_r10_close_waits_until_nothing_started_can_come_any_more(producer):
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    assert writer.starts.start({0: [1], 1: [5]}, {}, 1_000, None, 0.02).wait_until_confirmed().failed == {
        0: 1,
        1: 5,
    }
    ends = threading.Thread(target=writer.close, args=(5.0,))
    ends.start()
    ends.join(0.2)
    assert ends.is_alive()
    producer.answers.set()
    ends.join(60)
    assert not ends.is_alive()
    assert producer.written == 4  # two starts, and a tick behind each


def test_producers_that_end_at_once_are_not_made_all_the_time(monkeypatch):
    """As where Kafka does not let us write."""
    made, tries, tried = [], [], threading.Event()

    def ended(*_, **__):
        tries.append(len(made))
        if len(tries) > 20:
            tried.set()
        raise KafkaException(KafkaError(KafkaError._FATAL))

    def another(connection, settings):
        made.append(TinyProducer())
        made[-1].produce = ended
        return made[-1]

    monkeypatch.setattr(librdkafka, "new_producer", another)
    monkeypatch.setattr(marker_writer, "_SEND_AGAIN_AFTER_S", 0.001)
    monkeypatch.setattr(marker_writer, "_REPLACE_EVERY_S", 60.0)
    writer = MarkerWriter(KafkaConnection(), RANGES)
    writer.end(0, [1])
    assert tried.wait(60)
    writer.abandon()
    assert len(made) == 2


def test_r26_no_marker_is_lost_while_no_producer_can_be_made(monkeypatch, caplog):
    """As while a file of certificates is being changed."""
    made, tries = [], []

    def ended(*_, **__):
        raise KafkaException(KafkaError(KafkaError._FATAL))

    def another(connection, settings):
        tries.append(len(made))
        if 1 < len(tries) < 4:
            raise ConfigError("ssl.ca.location: there is no 'ca.pem'")
        made.append(TinyProducer())
        made[-1].answers.set()
        return made[-1]

    monkeypatch.setattr(librdkafka, "new_producer", another)
    monkeypatch.setattr(marker_writer, "_REPLACE_EVERY_S", 0.01)
    writer = MarkerWriter(KafkaConnection(), RANGES)
    made[0].produce = ended
    assert writer.write([(0, [1]), Marker(0, 2, Op.NACK), (1, [3])], 5.0) == 0
    assert {decode_key(one.key()) for one in made[1].log} == {(0, 1), (0, 2), (1, 3)}
    assert [one.error for one in caplog.records if "can be made" in one.message] == [
        "ssl.ca.location: there is no 'ca.pem'"
    ]
    assert writer.close() == 0


@pytest.mark.parametrize("confirmed", [True, False])
def test_start_markers_go_to_another_producer_once_theirs_has_ended(monkeypatch, confirmed):
    """Not each report says so: records that were not sent yet are dropped."""
    made = []

    def another(connection, settings):
        made.append(TinyProducer())
        made[-1].answers.set()
        return made[-1]

    monkeypatch.setattr(librdkafka, "new_producer", another)
    writer = MarkerWriter(KafkaConnection(), SINGLE)
    batch = writer.starts.start({0: [1]}, {}, 1_000, None, 5.0)
    made[1].error = None if confirmed else KafkaError(KafkaError._PURGE_QUEUE)
    if not confirmed:
        made[1].fatal_error = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True)
    assert batch.wait_until_confirmed().failed == ({} if confirmed else {0: 1})
    if confirmed:  # what ends it comes later, by a tick
        made[1].fatal_error = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, fatal=True)
        assert writer.starts.producers() == [made[1]]
        writer.starts.start({0: [2]}, {}, 1_000, None, 5.0)
    assert writer.starts.producers() == made[2:]
    writer.abandon()


def test_r10_what_a_broken_producer_sent_gets_a_while_to_arrive(producer):
    clock = Jumping()
    unconfirmed = UnconfirmedStarts("m", 0, clock)
    unconfirmed.add(producer)
    assert not unconfirmed.passed()
    producer.error = KafkaError(KafkaError._FATAL, fatal=True)
    producer.answers.set()
    assert not unconfirmed.passed()
    clock.now = 4.0
    assert not unconfirmed.passed()
    clock.now = 6.0
    assert unconfirmed.passed()


def test_r10_what_a_producer_sent_that_is_cut_off_gets_a_while_to_arrive(producer):
    """Its own tick never comes: its start markers are not waited for until that does."""
    clock = Jumping()
    writer = MarkerWriter(KafkaConnection(), SINGLE, clock=clock)
    starts = writer.starts
    batch = starts.start({0: [1]}, {}, 1_000, None, 5.0)
    clock.now = 5.0
    assert batch.wait_until_confirmed().failed == {0: 1}
    assert not starts.outcome_known(0)
    assert starts.producers_in_use() == {producer}
    starts.replace([producer])
    clock.now = 9.0
    assert not starts.outcome_known(0)
    clock.now = 11.0
    assert starts.outcome_known(0)
    assert starts.producers_in_use() == set()
    writer.abandon()


class Jumping(SystemClock):
    """A clock that stands still until it is set."""

    now = 0.0

    def monotonic(self):
        return self.now


class Quiet:
    """A producer that reports failures only, when it is polled."""

    fatal_error = None

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

    fatal_error = None

    def __init__(self, error=None):
        self.error = error
        self.report = None

    def poll(self, timeout):
        report, self.report = self.report, None
        if report is not None:
            report(self.error, Delivered(encode_key(0, 9), b"", 0, 70))


@pytest.mark.parametrize("queue", [SINGLE, RANGES])
@pytest.mark.parametrize("refused", [(2, 4), (4, 2), (1, 2, 3, 4), (3, 5, 6)])
def test_r18_of_several_starts_that_failed_the_lowest_is_told(monkeypatch, queue, refused):
    """The client reads again from there: above the lowest, messages would be lost."""
    apart = 100_000  # too far for one range marker
    choosy = Choosy()
    choosy.refused = {number * apart for number in refused}
    monkeypatch.setattr(librdkafka, "new_producer", lambda connection, settings: choosy)
    writer = MarkerWriter(KafkaConnection(), queue)
    takes = {0: [number * apart for number in range(1, 5)], 1: [7, 8]}
    delays = {(0, number * apart): 500 for number in (5, 6)}
    started = writer.starts.start(takes, delays, 1_000, None, 5).wait_until_confirmed()
    assert started.failed == {0: min(refused) * apart}
    assert started.last_at.keys() == {0, 1}


@pytest.mark.parametrize(
    ("refused", "stuck", "error", "expected"),
    [
        ((), (), None, StartOutcome({0: 70}, {})),
        ((7, 5), (), None, StartOutcome({0: 70}, {0: 5})),
        ((5, 7), (), None, StartOutcome({0: 70}, {0: 5})),
        ((7,), (8, 6), None, StartOutcome({0: 70}, {0: 6})),
        (
            (7,),
            (),
            KafkaError(KafkaError._MSG_TIMED_OUT),
            StartOutcome({}, {0: 3}),
        ),  # nobody knows where they are
    ],
)
def test_f1_start_markers_without_a_report_of_each_count_as_written_only_when_they_are(
    refused, stuck, error, expected
):
    starts, quiet = Starts(error), Quiet()
    all_confirmed = []
    batch = StartBatch(starts, SYSTEM_CLOCK, 0.05, quiet.purge, all_confirmed.append)
    report = batch.expect_errors_only(quiet, 0, range(3, 9))
    quiet.failures += [(report, encode_key(0, offset)) for offset in refused]
    quiet.stuck += [(report, encode_key(0, offset)) for offset in stuck]
    starts.report = batch.expect(0, [9])
    assert batch.wait_until_confirmed() == expected
    assert all_confirmed == ([] if expected.failed else [0])


def test_f1_a_refused_start_marker_has_failed():
    batch = StartBatch(Starts(), SYSTEM_CLOCK, 0.05, lambda: None, lambda _: None)
    batch.expect(0, [9])
    batch.refuse(None)
    assert batch.wait_until_confirmed() == StartOutcome({}, {0: 9})
