"""What a call says when some of its messages were not sent, with a producer that makes up the answers."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.poll_turns import PollTurns
from kmqpy.errors import (
    ConfigError,
    KmqError,
    MessageError,
    NotSupported,
    TopicError,
    Unavailable,
    Unfinished,
)
from kmqpy.kafka import librdkafka
from kmqpy.kafka.client.client_options import DEFAULT_LIMITS, SendLimits
from kmqpy.kafka.client.sender import QueueSender, partition_of
from kmqpy.kafka.cut_off import RenewedProducer
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.shared_connections import SharedConnections
from kmqpy.message import OutgoingMessage
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import NO_ZOOKEEPER

SENT, TOO_LARGE, TIMED_OUT = 0, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError._MSG_TIMED_OUT
GONE = KafkaError._UNKNOWN_PARTITION
LOCAL, LOCALLY_GONE = -1, -2  # librdkafka refuses them at once


class FakeProducer:
    """Answers each message as its body says."""

    fatal_error = None
    topic_error = None

    def __init__(self):
        self.turns = PollTurns()
        self.reports = []
        self.bodies = []
        self.partitions = []

    def produce(self, _topic, value, _key=None, partition=-1, *, on_delivery, **__):
        self.partitions.append(partition)
        answer = int(value)
        if answer in (LOCAL, LOCALLY_GONE):
            raise KafkaException(KafkaError(TOO_LARGE if answer == LOCAL else GONE))
        self.bodies.append(value)
        place = SimpleNamespace(partition=lambda: 0, offset=lambda: 7)
        self.reports.append((on_delivery, KafkaError(answer) if answer else None, place))

    def list_topics(self, *_):
        if self.topic_error is None:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return SimpleNamespace(topics={"q": SimpleNamespace(error=KafkaError(self.topic_error))})

    def poll(self, _timeout):
        while self.reports:
            report, error, place = self.reports.pop()
            report(error, place)


@pytest.fixture
def fake():
    return FakeProducer()


def sender_with(fake, limits=DEFAULT_LIMITS, telemetry=None):
    producers = RenewedProducer(lambda: fake)
    return QueueSender(
        QueueSettings(name="q"), KafkaConnection(), lambda _: producers, limits, telemetry=telemetry
    )


@pytest.mark.parametrize(
    ("given", "error", "shown"),
    [
        ({"key": 5}, MessageError, "key: int 5 is neither"),
        ({"headers": {"a": 1}}, MessageError, "headers: 'a': int 1 is neither"),
        ({"bodies": [{"a": 1}]}, MessageError, "body: dict is neither bytes nor text; encode it"),
        ({"bodies": "text"}, MessageError, "bodies: str is one body, not several"),
        ({"bodies": Exception("secret")}, MessageError, "bodies: Exception is one body, not several"),
        ({"priority": 3}, NotSupported, "priority: queue 'q' has none"),
        ({"bodies": [OutgoingMessage("1", dedup_id="a")]}, NotSupported, "have none; let the handler know"),
        ({"bodies": ["0", OutgoingMessage("1", priority=10)]}, MessageError, "priority: 10 is no"),
        ({"bodies": ["0", OutgoingMessage("1", key=5)]}, MessageError, "key: int 5 is neither"),
        ({"partition": "1"}, ConfigError, "partition: '1' is not a whole number"),
    ],
)
def test_of_the_issue_what_is_of_a_wrong_type_is_named(fake, given, error, shown):
    with pytest.raises(error, match=shown):
        sender_with(fake).send_many(**{"bodies": ["0"], **given})
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ([TOO_LARGE, TOO_LARGE], MessageError),
        ([LOCAL], MessageError),
        ([SENT, TOO_LARGE], Unfinished),
        ([TOO_LARGE, SENT], Unfinished),
        ([SENT, LOCAL], Unfinished),
        ([SENT, TIMED_OUT], Unavailable),
        ([TIMED_OUT, TOO_LARGE], Unavailable),  # those may have been sent
        ([TOO_LARGE, TIMED_OUT], Unavailable),
    ],
)
def test_a_message_error_says_that_none_was_sent(fake, answers, error):
    """`kmq send` sends them again, one by one."""
    with pytest.raises(error) as raised:
        sender_with(fake).send_many([str(answer) for answer in answers])
    assert type(raised.value) is error
    if error is Unfinished:
        assert raised.value.done == 1
        assert "1 of these 2 messages were sent" in str(raised.value)


@pytest.mark.parametrize("answer", [GONE, LOCALLY_GONE])
@pytest.mark.parametrize(("partition", "error"), [(9, ConfigError), (None, TopicError)])
def test_a_deleted_queue_is_no_fault_of_a_partition_that_nobody_named(fake, answer, partition, error):
    with pytest.raises(error, match="no such partition: 9" if partition else "does not exist"):
        sender_with(fake).send_many([str(answer)], partition=partition)


def test_what_times_out_since_the_queue_was_deleted_says_so(fake):
    fake.topic_error = KafkaError.UNKNOWN_TOPIC_OR_PART
    with pytest.raises(TopicError, match="does not exist"):
        sender_with(fake).send_many([str(TIMED_OUT)])


def test_none_is_sent_when_one_becomes_too_large_by_what_telemetry_adds(fake):
    class Adds(Telemetry):
        def sending(self, queue, headers):
            return super().sending(queue, (*headers, ("traceparent", b"x" * 50)))

    producer = sender_with(fake, SendLimits(max_message_bytes=100), Adds())
    with pytest.raises(MessageError):
        producer.send_many(["0", "0" * 90])
    assert fake.bodies == []


def test_headers_count_with_what_frames_them(fake):
    """Else a message could be sent that no copy of it fits the topic."""
    producer = sender_with(fake, SendLimits(max_message_bytes=100))
    producer.send_many(["00"], headers={"é" * 44: b""})
    for headers in ({"é" * 44: b"v"}, {str(number): b"" for number in range(10)}):
        with pytest.raises(MessageError, match="limit is 100 bytes"):
            producer.send_many(["00"], headers=headers)


def test_a_single_message_waits_for_no_others_and_a_batch_gathers(monkeypatch):
    """A linger costs each single message its time, none costs a batch more requests."""
    made = []

    def new_producer(_connection, settings, **_):
        made.append(settings["linger.ms"])
        return FakeProducer()

    monkeypatch.setattr(librdkafka, "new_producer", new_producer)
    shared = SharedConnections(KafkaConnection(), NO_ZOOKEEPER)
    sender = QueueSender(QueueSettings(name="q"), KafkaConnection(), shared.producer)
    for bodies in (["0"], ["0", "0"], ["0"], ["0"] * 3):
        sender.send_many(bodies)
    assert made == [0, 1]


def test_r47_what_was_confirmed_late_in_a_lane_that_may_be_gone_is_refused(fake):
    """Whoever removed the lane has perhaps not seen it."""
    asked, is_safe = [], True

    def keeps(lanes, since):
        asked.append((lanes, since))
        return is_safe

    queue = QueueSettings(name="q", priorities=2)
    producers = RenewedProducer(lambda: fake)
    clock = SimpleNamespace(monotonic=lambda: 7.0)
    sender = QueueSender(queue, KafkaConnection(), lambda _: producers, keeps=keeps, clock=clock)
    sender.send_many(["0"])
    assert asked == []
    sender.send_many(["0", OutgoingMessage("0", priority=5)])
    assert asked == [({"q__priority1"}, 7.0)]
    is_safe = False
    with pytest.raises(Unavailable, match=r"q__priority1: .* send them again"):
        sender.send_many(["0"], priority=1)


@pytest.mark.parametrize("answer", [KafkaError.TOPIC_AUTHORIZATION_FAILED, TOO_LARGE, TIMED_OUT])
def test_what_a_lane_refuses_names_its_topic(fake, answer):
    """Else a right would be looked for that the sender has."""
    producers = RenewedProducer(lambda: fake)
    sender = QueueSender(QueueSettings(name="q", priorities=2), KafkaConnection(), lambda _: producers)
    with pytest.raises(KmqError, match=r"send to q__priority1: "):
        sender.send_many([str(answer)], priority=1)


class TestCollapse:
    """Rule R41: equal messages get into one partition."""

    @pytest.fixture
    def asked(self):
        return []

    @pytest.fixture
    def sender(self, fake, asked):
        def partitions():
            asked.append(clock.now)
            if not asked[1:] or clock.now > 50:
                return 4
            raise Unavailable("Kafka does not answer")

        clock = self.clock = SimpleNamespace(now=1.0, monotonic=lambda: clock.now)
        producers = RenewedProducer(lambda: fake)
        return QueueSender(
            QueueSettings(name="q", collapse=True),
            KafkaConnection(),
            lambda _: producers,
            partitions=partitions,
            clock=clock,
        )

    def test_by_what_their_bodies_mean(self, fake, sender):
        sender.send_many(["0", OutgoingMessage(" 0", key="k"), "-0"], key="another", headers={"h": "1"})
        assert {*fake.partitions} == {partition_of(b"0", 4)}
        assert {partition_of(b"%d" % number, 4) for number in range(99)} == {0, 1, 2, 3}

    def test_a_partition_that_the_caller_names_counts(self, fake, sender, asked):
        sender.send_many(["0"], partition=7)
        assert (fake.partitions, asked) == ([7], [])

    def test_partitions_are_counted_from_time_to_time_as_far_as_kafka_answers(self, sender, asked):
        for now in (1.0, 30.9, 31.0, 31.1, 61.0, 61.1):
            self.clock.now = now
            sender.send_many(["0"])
        assert asked == [1.0, 31.0, 61.0]
        with pytest.raises(KmqError):
            sender.send_many([f"{GONE}"])
        sender.send_many(["0"])
        assert asked == [1.0, 31.0, 61.0, 61.1]
