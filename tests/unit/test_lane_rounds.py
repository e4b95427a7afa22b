"""What a round of a client with lanes hands out when much happens between its polls."""

from types import SimpleNamespace

import pytest

from kmqpy.core.throttle import Throttle
from kmqpy.errors import AccessDenied, Unavailable
from kmqpy.kafka.client import lanes
from kmqpy.kafka.client.lanes import LanesConsumer
from kmqpy.testing import ManualClock


class Consumer:
    """Of one lane; `calls` are those of all lanes, in order."""

    def __init__(self, name, calls):
        self.name = name
        self.calls = calls
        self.partitions = {0: object(), 1: object()}
        self.waiting = []
        self.while_polling = lambda: None
        self.started = {}
        self.served = 0
        self.has_heard = True
        self.receiver = self

    def join(self):
        return self

    def serve(self):
        self.while_polling()
        self.served += 1

    def assigned(self, partition):
        return self.partitions.get(partition)

    def poll(self, most, _wait_s):
        self.calls.append(f"poll {self.name}")
        self.while_polling()
        some, self.waiting = self.waiting[:most], self.waiting[most:]
        offsets = {}
        for record in some:
            offsets.setdefault(record.partition(), []).append(record.offset)
        return some, offsets

    def start(self, records, offsets, _lease_ms):
        assert [one.offset for one in records] == [one for ones in offsets.values() for one in ones]
        self.started = offsets

    def confirm(self):
        self.calls.append(f"confirm {self.name}")

    def hand_out(self):
        self.calls.append(f"hand out {self.name}")
        return []


class Telemetry:
    def __init__(self):
        self.failures = []

    def failed(self, queue, what):
        self.failures.append((queue, what))


def record(partition, offset):
    return SimpleNamespace(partition=lambda: partition, offset=offset)


@pytest.fixture
def client():
    made = object.__new__(LanesConsumer)
    calls = []
    made._lanes = [lanes._Lane(Consumer(name, calls), 0.75) for name in ("retry", "main")]
    made.retry, made.main = (lane.consumer for lane in made._lanes)
    made._main = made.main
    made._telemetry = Telemetry()
    made._clock = ManualClock()
    made._warnings = Throttle(lanes._WARN_EVERY_S, made._clock)
    return made


def test_r48_one_by_one_too_the_main_lane_is_served_and_what_it_loses_is_not_started(client):
    """Only its consumer hears of rebalances, and that the group goes on without this client."""
    client.retry.waiting = [record(0, 1), record(0, 2)]
    client._round(1, 0.0, 1_000)
    assert (client.main.served, client.retry.started) == (1, {0: [1]})
    client.main.while_polling = lambda: client.retry.partitions.pop(0, None)
    client._round(1, 0.0, 1_000)
    assert (client.main.served, client.retry.started) == (2, {})


def test_r48_an_iteration_that_looks_at_higher_lanes_serves_the_main_lane(client):
    client._round(3, 0.0, 1_000, client._lanes[:1])
    assert client.main.served == 1


def test_r48_what_was_polled_of_partitions_that_the_next_poll_loses_is_not_started(client):
    """Another client has them, and takes these messages."""
    client.retry.waiting = [record(0, 1), record(1, 2)]
    client.main.waiting = [record(1, 3)]
    client.main.while_polling = lambda: client.retry.partitions.pop(0, None)
    client._round(10, 0.0, 1_000)
    assert (client.retry.started, client.main.started) == ({1: [2]}, {1: [3]})


def test_r48_what_a_partition_gives_again_when_it_was_begun_anew_is_started_once(client):
    client.retry.waiting = [record(0, offset) for offset in range(8)]

    def begin_anew():
        client.main.while_polling = lambda: None
        client.retry.partitions[0] = object()
        client.retry.waiting = [record(0, offset) for offset in range(2)]

    client.main.while_polling = begin_anew
    client._round(10, 0.0, 1_000)
    assert client.retry.started == {0: [0, 1]}


def test_a_lane_waits_until_kafka_has_told_what_the_higher_ones_have(client):
    """It is served meanwhile, so it is ready then."""
    client.retry.has_heard = False
    client.main.waiting = [record(0, 1)]
    client._round(10, 0.01, 1_000)
    assert (client.main.started, client.main.served) == ({}, 1)
    assert client.retry.calls.count("poll retry") == 2  # the second one waits, as there is nothing yet

    def answers():
        client.retry.has_heard = True
        client.retry.waiting = [record(0, 1)]
        client.retry.while_polling = lambda: None

    client.retry.while_polling = answers
    client._round(10, 0.01, 1_000)
    assert (client.retry.started, client.main.started, client.main.served) == ({0: [1]}, {0: [1]}, 1)


def test_a_round_in_which_kafka_tells_what_a_lane_has_takes_no_more_than_it_may(client):
    client.main.waiting = [record(0, 1)]
    client.retry.has_heard = False

    def answers_the_second():
        client.retry.has_heard = client.retry.calls.count("poll retry") == 2
        client.retry.waiting = [record(0, 1)] if client.retry.has_heard else []

    client.retry.while_polling = answers_the_second
    client._round(1, 0.01, 1_000)
    assert (client.retry.started, client.main.started) == ({0: [1]}, {})


def test_a_lane_waits_for_none_that_can_not_be_read(client):
    client.retry.has_heard = False
    client.main.waiting = [record(0, 1)]

    def fails():
        raise Unavailable("no leader")

    client.retry.while_polling = fails
    client.retry.start_over = lambda: None
    with pytest.raises(Unavailable):  # since this main lane hands out nothing
        client._round(10, 0.01, 1_000)
    assert client.main.started == {0: [1]}


def test_of_a_lane_that_can_not_be_read_is_told_though_others_have_messages(client, caplog):
    """Nobody would hear of it: its error is raised only when the others have nothing."""

    def fails(*_):
        raise AccessDenied("Read is denied")

    broken = client.retry
    broken.poll = fails
    broken.start_over = lambda: None
    for lane in client._lanes:
        lane.consumer.hand_out = lambda: ["a message"]
    for _ in range(3):
        assert client._round(1, 0.0, 1_000)
    told = [(one.levelname, one.queue, one.error) for one in caplog.records]
    assert told == [("WARNING", broken.name, "Read is denied")]
    assert client._telemetry.failures == [(broken.name, "receive")] * 3
    client._clock.sleep(lanes._WARN_EVERY_S)
    assert client._round(1, 0.0, 1_000)
    assert len(caplog.records) == 2


def test_r11_no_lane_is_waited_for_when_another_has_handed_out(client):
    """Else the leases of the first lane's messages would run down meanwhile."""
    client._round(10, 0.0, 1_000)
    assert client.retry.calls[-4:] == ["confirm retry", "confirm main", "hand out retry", "hand out main"]
