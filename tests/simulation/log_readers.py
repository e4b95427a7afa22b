"""Simulated kmqpy.kafka.partition_reader and tracker.reading.queue_ends: what stands in a partition now."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import KafkaException

from kmqpy.errors import TopicError, Unavailable
from kmqpy.kafka.log_ends import LogEnd
from kmqpy.kafka.partition_reader import ReadPosition

from .connection import Connection
from .model import Record, part_of
from .world import Steps


class LogReader:
    """Stands where kmqpy.kafka.partition_reader is imported."""

    @staticmethod
    def bounds(
        connection: Connection,
        topic: str,
        partitions: Sequence[int],
        _timeout_s: float = 0,
        *,
        uncommitted: bool = False,
    ) -> dict[int, tuple[int, int]]:
        if topic in connection.broker.missing:
            is_own = topic in (connection.queue_topic, connection.markers_topic)
            raise TopicError("there is no such topic") if is_own else Unavailable("it is away for a while")
        logs = {partition: connection.broker.logs[topic, partition] for partition in partitions}
        return {p: (log.start, log.end if uncommitted else log.stable) for p, log in logs.items()}

    @staticmethod
    def scan_since(
        connection: Connection,
        topic: str,
        times_ms: Mapping[int, int],
        visit: Callable[[int, list[Record]], bool],
        *,
        clock: Any,
    ) -> Steps:
        """Read partitions up to where they end now, from the first record with this or a later time."""
        for partition, since_ms in times_ms.items():
            try:
                yield from connection.reach()
            except KafkaException as exception:
                raise Unavailable(str(exception)) from exception
            log = connection.broker.logs[topic, partition]
            start = next((record.at for record in log.records if record.ms >= since_ms), log.end)
            found, _ = log.read(start, max(0, log.stable - start), uncommitted=False)
            visit(partition, found)

    @staticmethod
    def scan(
        connection: Connection,
        topic: str,
        starts: Mapping[int, int],
        visit: Callable[[Record], None],
        *,
        limit: int | None = None,
        uncommitted: bool,
        timeout_s: float,
        clock: Any,
        recovers: bool = True,
    ) -> Steps:
        """Read one partition up to where it ends now, in some pieces.

        recovers  a client reads what was started before it got the partition
        """
        ((partition, start),) = starts.items()
        world = connection.world
        try:
            yield from connection.reach()
        except KafkaException as exception:
            raise Unavailable(str(exception)) from exception
        log = connection.broker.logs[topic, partition]
        end = log.end if uncommitted else log.stable
        if recovers:
            connection.process.recovered[part_of(topic, partition)] = log, end
        reached = ReadPosition(log.start, min(max(start, log.start), max(end, log.start)), end)
        while not reached.done:
            yield world.latency()
            if topic in connection.broker.missing:
                raise TopicError("there is no such topic")
            log = connection.broker.logs[topic, partition]
            # In a log that was recreated, and is shorter, nothing stands there.
            if connection.process.kafka_cut_until > world.now or reached.position >= log.end:
                yield timeout_s * 1000
                raise Unavailable("sends nothing")
            some = min(end - reached.position, 1 + int(100 * world.random()))
            found, reached.position = log.read(reached.position, some, uncommitted=uncommitted)
            for record in found:
                if record.offset() < end:
                    visit(record)
                    if limit is not None:
                        return {partition: reached}
        return {partition: reached}

    @staticmethod
    def read_at(
        connection: Connection, topic: str, places: Iterable[tuple[int, int]], *, clock: Any
    ) -> Steps:
        """The committed records at these places, as far as they exist."""
        found: dict[tuple[int, int], Record] = {}
        for partition, offset in places:
            try:
                yield from connection.reach()
            except KafkaException as exception:
                raise Unavailable(str(exception)) from exception
            log = connection.broker.logs[topic, partition]
            if log.start <= offset < log.stable and (record := log.records[offset]).is_data:
                found[partition, offset] = record
        return found


class RepeatedReader:
    """kmqpy.kafka.partition_reader.RepeatedReader: each partition, one after the other."""

    def __init__(
        self, connection: Connection, topic: str, *, uncommitted: bool, timeout_s: float, clock: Any
    ) -> None:
        self.connection = connection
        self.topic = topic
        self._how = {"uncommitted": uncommitted, "timeout_s": timeout_s, "clock": clock}

    def scan(self, starts: Mapping[int, int], visit: Callable[[int, list[Record]], bool]) -> Steps:
        reached: dict[int, ReadPosition] = {}
        for partition, start in starts.items():
            found: list[Record] = []
            reached |= yield from LogReader.scan(
                self.connection, self.topic, {partition: start}, found.append, recovers=False, **self._how
            )
            if found:
                visit(partition, found)
        return reached

    def close(self) -> None:
        pass


class QueueEnds:
    """Stands where tracker.reading.queue_ends is imported."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def end_beyond(self, place: tuple[str, int], _offset: int) -> LogEnd:
        return self.end_of(place)

    def end_of(self, place: tuple[str, int]) -> LogEnd:
        (end,) = self.with_epochs([place], anew=False).values()
        if isinstance(end, Unavailable):
            raise end
        return end

    def with_epochs(
        self, places: Iterable[tuple[str, int]], *, anew: bool = False
    ) -> dict[tuple[str, int], LogEnd | Unavailable]:
        connection, places = self._connection, list(places)
        if connection.process.kafka_cut_until > connection.world.now or connection.world.unlucky():
            return dict.fromkeys(places, Unavailable("does not answer"))
        if connection.queue_topic in connection.broker.missing:
            return dict.fromkeys(places, Unavailable("there is no such topic"))
        return {
            place: LogEnd(connection.broker.logs[place].end, connection.broker.logs[place].epoch)
            for place in places
        }

    def close(self) -> None:
        pass
