"""confluent_kafka's consumers over the simulated broker: of one partition, of markers, and of the group."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from .connection import Connection, no_topic
from .model import GROUP_SESSION_MS, Log, NoTopic, OutOfRange, Record, part_of
from .world import Steps


class _EndOfLog:
    """What librdkafka gives at the end of a partition."""

    def __init__(self, log: Log, position: int) -> None:
        self._log = log
        self._position = position

    def error(self) -> KafkaError:
        return KafkaError(KafkaError._PARTITION_EOF)

    def offset(self) -> int:
        return self._position

    def partition(self) -> int:
        return self._log.partition


def _ends(connection: Connection, places: Sequence[TopicPartition], *, uncommitted: bool = False) -> Steps:
    """Where logs end, and their latest epochs: what is asked for with OFFSET_END."""
    yield from connection.reach()
    if any(place.topic in connection.broker.missing for place in places):
        raise no_topic()
    logs = [connection.broker.logs[place.topic, place.partition] for place in places]
    found = [
        TopicPartition(
            log.topic, log.partition, log.end if uncommitted else log.stable, leader_epoch=log.epoch
        )
        for log in logs
    ]
    yield connection.world.latency()
    return found


class Reader:
    """Reads one assigned partition; joins no group."""

    def __init__(self, connection: Connection, *, uncommitted: bool = False) -> None:
        self._connection = connection
        self._uncommitted = uncommitted
        self._world = connection.world
        self._place: tuple[str, int] | None = None
        self._position = 0
        self._told_end = -1

    def get_watermark_offsets(self, place: TopicPartition) -> Steps:
        yield from self._connection.reach()
        if place.topic in self._connection.broker.missing:
            raise no_topic()
        log = self._connection.broker.logs[place.topic, place.partition]
        return log.start, log.stable

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float) -> Steps:
        return (yield from _ends(self._connection, places, uncommitted=self._uncommitted))

    def assign(self, places: Sequence[TopicPartition]) -> None:
        (place,) = places
        self._place = place.topic, place.partition
        self._position = place.offset
        self._told_end = -1

    def seek(self, place: TopicPartition) -> None:
        self._position = place.offset

    def unassign(self) -> None:
        self._place = None

    def consume(self, limit: int, timeout_s: float) -> Steps:
        yield self._world.latency()
        place, world, broker = self._place, self._world, self._connection.broker
        assert place is not None
        log = broker.logs[place]
        if place[0] in broker.missing:
            raise no_topic()
        if self._connection.process.kafka_cut_until > world.now:
            yield timeout_s * 1000
            return []
        if not log.start <= self._position <= log.end:
            raise KafkaException(KafkaError(KafkaError._AUTO_OFFSET_RESET))
        some = 1 + int(limit * world.random())
        found, position = log.read(self._position, some, uncommitted=self._uncommitted)
        self._position = position
        result: list[Any] = list(found)
        if not found:
            if self._told_end != position:
                self._told_end = position
                return [_EndOfLog(log, position)]
            yield timeout_s * 1000
        return result

    def close(self) -> None:
        self._place = None


class MarkersConsumer:
    """The markers consumer of a tracker: many partitions, read without waiting."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._world = connection.world
        self._positions: dict[tuple[str, int], int] = {}

    def incremental_assign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions[place.topic, place.partition] = place.offset

    def incremental_unassign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions.pop((place.topic, place.partition), None)

    def consume(self, limit: int, _timeout_s: float) -> list[Record]:
        world, found = self._world, []
        if self._connection.process.kafka_cut_until > world.now:
            return []
        for place, position in self._positions.items():
            log = self._connection.broker.logs[place]
            if place[0] in self._connection.broker.missing:
                found.append(NoTopic(log))
                continue
            if not log.start <= position <= log.end:
                found.append(OutOfRange(log))
                continue
            if position >= log.stable:
                continue
            if world.faults and world.random() < 0.01:  # a reset, after a change of leaders
                position = max(log.start, position - int(10 * world.random()))
            records, self._positions[place] = log.read(position, limit - len(found))
            found += records
            if len(found) >= limit:
                break
        return found

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int]:
        log = self._connection.broker.logs[place.topic, place.partition]
        return log.start, log.end

    def close(self) -> None:
        self._positions.clear()


class GroupConsumer:
    """A member of the queue's consumer group."""

    def __init__(self, connection: Connection, on_commit: Callable[..., None]) -> None:
        self._connection = connection
        self.process = connection.process
        self._world = connection.world
        self._group = connection.group
        self._logs: dict[int, Log] = {}
        self._on_commit = on_commit
        self._positions: dict[int, int | None] = {}
        self._paused: set[int] = set()
        self._eager: set[int] = set()
        self._kept: dict[int, list[Record]] = {}
        """What it has fetched of logs that were cut back since."""
        self._bounds: dict[int, tuple[int, int]] = {}
        """Where these logs began and ended then."""
        self._answered: set[int] = set()
        """The partitions for which Kafka has answered a fetch since they were assigned."""
        self._epochs: dict[int, int] = {}
        """The leader epoch of the last record that it gave, where it did not begin anew since."""
        self._topic = ""
        self._is_subscribed = False
        """False: it follows one of another lane, and is no member."""
        self._failed_commit = False
        self._free_at = 0.0
        self._generation = 0

    def subscribe(self, topics: Sequence[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        (self._topic,) = topics
        self._is_subscribed = True
        self._on_assign, self._on_revoke, self._on_lost = on_assign, on_revoke, on_lost
        self._group.join(self)

    def assignment(self) -> list[int]:
        return list(self._positions)

    def unsubscribe(self) -> None:
        """Give up what one has; takes effect at once."""
        if not self._is_subscribed:
            return
        self._notice_losses()
        for _ in self._give_up([p for p, owner in self._group.owner.items() if owner is self]):
            raise AssertionError("who leaves the group has waited before")

    def wake(self) -> None:
        self._world.wake(self.process.main, self._world.latency())

    def consume(self, limit: int, _timeout_s: float) -> Steps:
        yield self._world.latency()
        if self.process.kafka_cut_until > self._world.now:
            return []
        if self._is_subscribed:
            yield from self._rebalance()
        if self._failed_commit:
            self._failed_commit = False
            self._on_commit(KafkaError(KafkaError.UNKNOWN_MEMBER_ID), [])
        found: list[Record] = []
        if self._topic in self._connection.broker.missing:
            logs = [self._connection.broker.logs[self._topic, partition] for partition in self._positions]
            return [NoTopic(log) for log in logs if self._world.topics_rng.random() < 0.3]
        for partition in list(self._positions):
            # What came before the pause was noticed is delivered.
            eager = partition in self._eager and self._world.random() < 0.5
            if partition in self._paused and not eager:
                continue
            self._eager.discard(partition)
            some = 1 + int(limit * self._world.random())
            found += self._fetch(partition, min(some, limit - len(found)))
        return found

    def _fetch(self, partition: int, limit: int) -> list[Record]:
        self._answered.add(partition)
        log = self._connection.broker.logs[self._topic, partition]
        position = self._positions[partition]
        if self._world.cut_logs:
            if kept := self._take_kept(partition, limit):
                return kept
            if self._is_truncated(partition, log):
                self._world.trace(self.process.name, f"finds {partition} cut back, begins at {log.start}")
                position = log.start
        if position is None:
            position = self._group.committed.get(part_of(self._topic, partition), (0, ""))[0]
        elif self._world.faults and self._world.random() < 0.01:  # librdkafka repeats a look-up, too late
            position = int(position * self._world.random())
        if position > log.end:  # of a topic that was longer: auto.offset.reset earliest
            position = log.start
        found, self._positions[partition] = log.read(max(position, log.start), limit)
        if found and self._world.cut_logs:
            self._epochs[partition] = found[-1].epoch
        return found

    def keep_fetched(self, partition: int, limit: int) -> None:
        """The log is about to be cut back: keep some of what comes next, as if it were fetched already."""
        position = self._positions.get(partition)
        if position is None or partition in self._kept or partition in self._paused:
            return
        log = self._connection.broker.logs[self._topic, partition]
        self._bounds[partition] = log.start, log.end
        self._kept[partition] = log.read(max(position, log.start), limit)[0]

    def _take_kept(self, partition: int, limit: int) -> list[Record]:
        kept = self._kept.get(partition, [])[:limit]
        if kept:
            self._kept[partition] = self._kept[partition][limit:]
            self._positions[partition] = kept[-1].at + 1
            self._epochs[partition] = kept[-1].epoch
        else:
            self._drop_kept(partition)
        return kept

    def _drop_kept(self, partition: int) -> None:
        self._kept.pop(partition, None)
        self._bounds.pop(partition, None)

    def _is_truncated(self, partition: int, log: Log) -> bool:
        """Whether it finds that its position is not in this log any more, when it hears of a new leader."""
        position, epoch = self._positions[partition], self._epochs.get(partition)
        if position is None or epoch is None or not self._world.validates:
            return False
        if position <= log.epoch_end(epoch):
            return False
        del self._epochs[partition]
        return True

    def _rebalance(self) -> Steps:
        group, me = self._group, self
        self._notice_losses()
        if me not in group.members:
            self._generation += 1
            group.join(me)
            for other in group.members:
                other.wake()
        mine = [p for p, owner in group.owner.items() if owner is me]
        gone = self._topic in self._connection.broker.missing
        if gone and mine and self._world.topics_rng.random() < 0.1:  # noticed before it is there again
            yield from self._give_up(mine)
            return
        yield from self._give_up([p for p in mine if group.target(p) is not me])
        free = [p for p in range(group.partitions) if p not in group.owner and not gone]
        got = [p for p in free if group.target(p) is me]
        if got:
            for p in got:
                group.assign(p, me)
            self._world.trace(self.process.name, f"got {got}")
            self._on_assign(me, [TopicPartition(self._topic, p) for p in got])
            self._eager.update(got)

    def _notice_losses(self) -> None:
        """What was taken away while nothing was heard of us."""
        lost = [p for p in self._positions if self._group.owner.get(p) is not self]
        if lost:
            self._world.trace(self.process.name, f"lost {lost}")
            self._on_lost(self, [TopicPartition(self._topic, p) for p in lost])

    def _give_up(self, partitions: list[int]) -> Steps:
        if not partitions:
            return
        yield from self._on_revoke(self, [TopicPartition(self._topic, p) for p in partitions])
        for p in partitions:
            if self._group.owner.get(p) is self:  # nobody has thrown us out meanwhile
                del self._group.owner[p]
        self._world.trace(self.process.name, f"gave up {partitions}")
        for other in self._group.members:
            other.wake()

    def incremental_assign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._topic = place.topic
            self._positions[place.partition] = place.offset if place.offset >= 0 else None
            self._paused.discard(place.partition)
            self._answered.discard(place.partition)
            self._drop_kept(place.partition)
            self._epochs.pop(place.partition, None)

    def incremental_unassign(self, places: Iterable[TopicPartition]) -> None:
        for place in places:
            self._positions.pop(place.partition, None)
            self._drop_kept(place.partition)

    def pause(self, places: Iterable[TopicPartition]) -> None:
        self._paused.update(place.partition for place in places)
        for place in places:
            self._drop_kept(place.partition)

    def resume(self, places: Iterable[TopicPartition]) -> None:
        self._paused.difference_update(place.partition for place in places)

    def seek(self, place: TopicPartition) -> None:
        if self._positions.get(place.partition) is None:
            raise KafkaException(KafkaError(KafkaError._STATE))
        self._positions[place.partition] = place.offset
        self._drop_kept(place.partition)
        self._epochs.pop(place.partition, None)

    def committed(self, places: Sequence[TopicPartition], timeout: float) -> Steps:
        yield from self._connection.reach()
        (place,) = places
        part = part_of(place.topic, place.partition)
        offset, metadata = self._group.committed.get(part, (-1001, ""))
        yield self._world.latency()
        return [TopicPartition(place.topic, place.partition, offset, metadata)]

    def offsets_for_times(self, places: Sequence[TopicPartition], timeout: float) -> Steps:
        return (yield from _ends(self._connection, places))

    def get_watermark_offsets(self, place: TopicPartition, *, cached: bool) -> tuple[int, int] | None:
        if place.partition not in self._answered:
            return None
        log = self._connection.broker.logs[place.topic, place.partition]
        return self._bounds.get(place.partition) or (log.start, log.end)

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> None:
        world, process = self._world, self.process
        wanted = [
            (part_of(place.topic, place.partition), place.offset, place.metadata or "") for place in offsets
        ]
        topics = {place.topic for place in offsets}

        generation = self._generation

        def arrive() -> bool:
            lost = self._generation != generation or process.kafka_cut_until > world.now or world.unlucky()
            lost = lost or not topics.isdisjoint(self._connection.broker.missing)
            return not lost and self._group.commit(self, wanted)

        def arrive_later() -> None:
            if not arrive():
                self._failed_commit = True

        if asynchronous:
            self._free_at = max(self._free_at, world.now + world.latency())
            world.at(self._free_at - world.now, arrive_later)
        elif not arrive():
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_MEMBER_ID))

    def leave_later(self) -> None:
        """Nothing is heard of us: the group removes us."""
        self._world.at(GROUP_SESSION_MS, lambda: self._group.leave(self))

    def close(self) -> None:
        self.unsubscribe()
        self._group.leave(self)
