"""What each fault does, from its begin to its end."""

import signal
import time
from collections.abc import Callable, Sequence

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.topics import Topics
from kmqpy.message import Message

from .judge import Seen
from .proxy import Cut
from .requests import Api, Holder, Way
from .schedule import Fault, Kind
from .stage import Failed, Slot, Stage, until

_START_S = 180.0
"""A broker recovers its logs after kill -9, which takes a while when the machine is busy."""

_HELD_S = 60.0


class Faults:
    """Does faults to a stage. `begin` and `end` block while they work; the schedule waits in between."""

    def __init__(self, stage: Stage, second: "SecondQueue") -> None:
        self._stage = stage
        self._second = second
        trackers, consumers = stage.trackers, stage.consumers
        broker, zookeeper = stage.cluster.broker, stage.cluster.zookeeper_server
        self._actions: dict[Kind, tuple[Callable[[Fault], None], Callable[[Fault], None]]] = {
            Kind.QUIET: (_nothing, _nothing),
            Kind.TRACKER_KILL: (lambda f: _of(trackers, f).kill(), lambda f: _of(trackers, f).start()),
            Kind.TRACKER_STOP: (lambda f: _of(trackers, f).stop(), lambda f: _of(trackers, f).start()),
            Kind.TRACKER_PAUSE: _signals(trackers),
            Kind.TRACKER_JOIN: (lambda _: self._join(), lambda _: stage.more.stop()),
            Kind.ZOOKEEPER_CUT: (
                lambda f: stage.zookeeper_gates[f.target].cut(Cut(f.how)),
                lambda f: stage.zookeeper_gates[f.target].heal(),
            ),
            Kind.KAFKA_CUT: (
                lambda f: stage.kafka_gates[f.target].cut(Cut(f.how)),
                lambda f: stage.kafka_gates[f.target].heal(),
            ),
            Kind.BROKER_KILL: (
                lambda f: broker(f.target).kill(),
                lambda f: broker(f.target).start(_START_S),
            ),
            Kind.BROKER_PAUSE: (lambda f: broker(f.target).pause(), lambda f: broker(f.target).resume()),
            Kind.CONSUMER_KILL: (lambda f: _of(consumers, f).kill(), lambda f: _of(consumers, f).start()),
            Kind.CONSUMER_PAUSE: _signals(consumers),
            Kind.ZOOKEEPER_RESTART: (
                lambda f: zookeeper(f.target).kill(),
                lambda f: zookeeper(f.target).start(_START_S),
            ),
            Kind.RETENTION: (lambda _: second.delete_in_flight(), _nothing),
            Kind.REQUEST_AFTER_RESET: self._holding(Way.AFTER_RESET),
            Kind.REQUEST_LATE: self._holding(Way.LATE),
            Kind.ANSWER_LOST: self._holding(Way.UNANSWERED),
        }
        self._holders: list[tuple[int, Holder]] = []

    def begin(self, fault: Fault) -> None:
        self._actions[fault.kind][0](fault)

    def end(self, fault: Fault) -> None:
        self._actions[fault.kind][1](fault)

    def log_of_held(self) -> list[tuple[int, list[tuple[int, str, Way, float]]]]:
        """What Holder.log says, with the number of the tracker; once for each fault."""
        return [(number, holder.log) for number, holder in self._holders]

    def held(self) -> dict[str, dict[str, tuple[int, int]]]:
        """How many requests were held back, and of how many: by what was done to them and what they were."""
        found = {}
        for way in Way:
            of_way = [holder for _, holder in self._holders if holder.way is way]
            found[str(way)] = {
                api.name: (sum(one.held[api] for one in of_way), sum(one.seen[api] for one in of_way))
                for api in Api
            }
        return found

    def _holding(self, way: Way) -> tuple[Callable[[Fault], None], Callable[[Fault], None]]:
        gates = self._stage.kafka_gates
        mine: list[Holder] = []

        def begin(fault: Fault) -> None:
            mine[:] = [Holder(way, f"{fault.how}-{n}") for n in gates]
            self._holders += zip(gates, mine, strict=True)
            for gate, holder in zip(gates.values(), mine, strict=True):
                gate.holder = holder

        def end(_: Fault) -> None:
            try:  # trackers may have stood still because of another fault
                until(lambda: any(one.held[Api.END_TXN] for one in mine), _HELD_S, "an EndTxn was held back")
            finally:
                for gate in gates.values():
                    gate.holder = None

        return begin, end

    def _join(self) -> None:
        self._stage.more.start()
        self._stage.more.wait_until_it_lives()


def _nothing(_: Fault) -> None:
    pass


def _of(slots: Sequence[Slot], fault: Fault) -> Slot:
    return slots[fault.target - 1]


def _signals(slots: Sequence[Slot]) -> tuple[Callable[[Fault], None], Callable[[Fault], None]]:
    return (
        lambda fault: _of(slots, fault).signal(signal.SIGSTOP),
        lambda fault: _of(slots, fault).signal(signal.SIGCONT),
    )


class SecondQueue:
    """A small queue whose retention removes messages in flight (DeleteRecords)."""

    def __init__(self, stage: Stage) -> None:
        self.seen = Seen()
        self._queue = stage.second
        self._connection, self._zookeeper = stage.connection, stage.zookeeper
        self._topics = Topics(stage.connection)
        self._next = 0
        self._client: KmqClient | None = None

    def delete_in_flight(self, count: int = 30) -> None:
        """Take `count` messages, acknowledge a third, delete half; `finish` sees the rest come again."""
        if self._client is None:
            self._client = KmqClient(self._queue, self._connection)
        self.finish()
        numbers = range(self._next, self._next + count)
        self._next += count
        self.seen.attempted.update(numbers)
        with KmqClient(self._queue, self._connection) as producer:
            producer.send_many([str(number) for number in numbers], partition=0)
        self.seen.sent.update(numbers)
        taken = sorted(self._receive(count, lease=10.0), key=lambda message: message.offset)
        done, kept = taken[::3], [message for message in taken if message not in taken[::3]]
        self._ack(done)
        below = taken[count // 2].offset
        deleted = [message for message in kept if message.offset < below]
        self._topics.delete_records(self._queue.name, {0: below})
        self.seen.deleted.update((message.partition, message.offset) for message in deleted)
        self.seen.deleted_bodies.update(int(message.body) for message in taken if message.offset < below)
        # What was deleted is finished when the tracker has seen that it is gone: judged at the end.

    def finish(self) -> None:
        """Acknowledge whatever is left, when an earlier call was interrupted for example."""

        def is_empty() -> bool:
            if self._client is not None:
                self._ack(self._take(100, 0.3))
            try:
                with Admin(self._connection, self._zookeeper) as admin:
                    stats = admin.stats(self._queue)
            except KmqError:
                return False
            return stats.depth == stats.in_flight == 0

        until(is_empty, 120.0, f"{self._queue.name} is empty")

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _receive(self, count: int, *, lease: float = 60.0, timeout_s: float = 120.0) -> list[Message]:
        found: list[Message] = []
        deadline = time.monotonic() + timeout_s
        while len(found) < count:
            if time.monotonic() > deadline:
                raise Failed(f"{self._queue.name}: {len(found)} of {count} messages in {timeout_s:.0f} s")
            found += self._take(count - len(found), 0.5, lease)
        return found

    def _take(self, count: int, wait: float, lease: float = 60.0) -> list[Message]:
        assert self._client is not None
        found = self._client.receive(count, wait=wait, lease=lease)
        for message in found:
            self.seen.handed_out[message.partition, message.offset] += 1
            self.seen.delivered[int(message.body)] += 1
        return found

    def _ack(self, messages: list[Message]) -> None:
        assert self._client is not None
        self.seen.acked.update(int(message.body) for message in messages)
        self._client.ack(*messages)
        try:
            self._client.flush(60)
        except KmqError as error:
            raise Failed(str(error)) from error
