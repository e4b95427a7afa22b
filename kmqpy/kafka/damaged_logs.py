"""Finds logs that can't be read on, because a batch of records is damaged on a broker's disk.

Kafka checks batches when it gets them, when followers copy them, and after it was killed those that it had
not flushed. It hands out a damaged one like any other, or nothing from there on. librdkafka reports what the
checksum covers. But having found a checksum wrong, it goes on at a wrong place of the answer, and where zeros
stand there, or in place of a batch, an assertion of it ends the process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import OFFSET_END, Consumer, KafkaError, TopicPartition

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import KmqError
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.settings import KafkaConnection

_SILENT_S = 10.0
"""A partition of which nothing comes within this time can't be read."""
_POLL_S, _ASK_S = 0.1, 2.0
_READ_AT_ONCE = 1_000
_FETCH_BYTES = 65_536
_ONE_BATCH = 1
"""So few bytes are at least one batch, and no more."""
_NEAR = 1_000
"""More records than an answer of _FETCH_BYTES has."""


@dataclass(frozen=True, slots=True)
class DamagedLog:
    """A partition in which nobody can read on from `offset`, though the log goes on; `why` says it."""

    topic: str
    partition: int
    offset: int
    why: str


class _Seen(NamedTuple):
    """How far a log was read: to before `offset`. `done`: no further, for the end came, or why."""

    topic: str
    partition: int
    offset: int
    done: bool = False
    why: str = ""


def find_damage(
    connection: KafkaConnection, places: Mapping[TopicPlace, int], clock: Clock = SYSTEM_CLOCK
) -> list[DamagedLog]:
    """Return the partitions in which the next record at or behind these offsets can't be read.

    Waits 10 s where nothing comes. Raises Unavailable when Kafka does not answer, TopicError when a topic is
    gone. Damage may end the process, see DamageSearch.
    """
    return _damaged(_look(connection, places, _FETCH_BYTES, 1, _SILENT_S, clock)) if places else []


class _NoProcess(Exception):
    """Another process can't look: settings are functions of this one, or Kafka does not answer."""


class DamageSearch:
    """Does the same in a process of its own, which is started anew when damage has ended it; close() it.

    to_end  reads logs to their ends, and finds the first damage of each, since clients read ahead
    """

    def __init__(self, connection: KafkaConnection, *, to_end: bool = False) -> None:
        self._connection = connection
        self._to_end = to_end
        self._child: subprocess.Popen[str] | None = None

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            self._child.communicate()

    def find(self, places: Mapping[TopicPlace, int]) -> list[DamagedLog]:
        """See find_damage()."""
        try:
            return self._find(places) if places else []
        except _NoProcess:
            return find_damage(self._connection, places)

    def _find(self, places: Mapping[TopicPlace, int]) -> list[DamagedLog]:
        seen, survived = self._run(places, _FETCH_BYTES, None if self._to_end else 1)
        found = _damaged(seen)
        if not survived:
            reached = {**places, **{(one.topic, one.partition): one.offset for one in seen}}
            for one in seen:
                if one.done:
                    del reached[one.topic, one.partition]
            left = [*reached.items()]
            if len(places) == 1:
                return [*found, *(one for at in left for one in self._find_at(*at))]
            for half in left[::2], left[1::2]:
                found += self._find(dict(half)) if half else []
        return found

    def _find_at(self, place: TopicPlace, offset: int) -> list[DamagedLog]:
        """Find batch by batch what has ended the process that read on from this offset."""
        while True:
            seen, survived = self._run({place: offset}, _ONE_BATCH, _NEAR)
            if found := _damaged(seen):
                return found
            reached = seen[-1].offset if seen else offset
            if survived or reached == offset:  # survived: together with what follows it is deadly
                return [DamagedLog(*place, offset, "what stands there ends each process that reads it")]
            offset = reached

    def _run(
        self, places: Mapping[TopicPlace, int], fetch_bytes: int, records: int | None
    ) -> tuple[list[_Seen], bool]:
        """Return what the other process has seen, and whether that has not ended it."""
        job = {"connection": asdict(self._connection), "places": [*places.items()], "silent_s": _SILENT_S}
        try:
            text = json.dumps({**job, "fetch_bytes": fetch_bytes, "records": records})
            if self._child is None:
                self._child = subprocess.Popen(
                    [sys.executable, "-P", "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                    text=True,
                )
            assert self._child.stdin is not None
            self._child.stdin.write(f"{text}\n")
            self._child.stdin.flush()
        except (OSError, TypeError) as error:
            raise _NoProcess from error
        seen: list[_Seen] = []
        assert self._child.stdout is not None
        for line in self._child.stdout:
            match json.loads(line):
                case "done":
                    return seen, True
                case "failed":
                    raise _NoProcess
                case step:
                    seen.append(_Seen(*step))
        child, self._child = self._child, None
        child.communicate()
        if child.returncode == 1:  # Python's, not that of an assertion
            raise _NoProcess
        return seen, False


def _main() -> None:
    """Do what another process asks for: answer each line by one for each step."""
    for line in sys.stdin:
        job = json.loads(line)
        places = {(topic, partition): offset for (topic, partition), offset in job.pop("places")}
        answer = "done"
        try:
            for seen in _look(KafkaConnection(**job.pop("connection")), places, **job):
                print(json.dumps(seen), flush=True)
        except KmqError:
            answer = "failed"
        print(json.dumps(answer), flush=True)


def _damaged(seen: Iterable[_Seen]) -> list[DamagedLog]:
    return [DamagedLog(one.topic, one.partition, one.offset, one.why) for one in seen if one.why]


def _look(
    connection: KafkaConnection,
    places: Mapping[TopicPlace, int],
    fetch_bytes: int,
    records: int | None,
    silent_s: float,
    clock: Clock = SYSTEM_CLOCK,
) -> Iterator[_Seen]:
    """Read so many records from each of these offsets on, or all."""
    settings = {
        "enable.partition.eof": True,
        "fetch.wait.max.ms": 20,
        "fetch.message.max.bytes": fetch_bytes,
        "queued.min.messages": 1,
    }
    with (
        closing(librdkafka.new_consumer(connection, settings)) as consumer,
        kafka_errors.translating("look for damaged logs", connection),
    ):
        epochs: dict[TopicPlace, int] = {}
        reached, left = dict(places), dict.fromkeys(places, sys.maxsize if records is None else records)
        consumer.assign([TopicPartition(*place, offset) for place, offset in places.items()])
        deadline = clock.monotonic() + silent_s
        while left and clock.monotonic() < deadline:
            seen: dict[TopicPlace, _Seen] = {}
            fetched = consumer.consume(1, _POLL_S)
            for record in fetched and fetched + consumer.consume(_READ_AT_ONCE, 0):
                place, error = (str(record.topic()), record.partition() or 0), record.error()
                damaged = kafka_errors.is_damage(error)
                if place not in left or not (
                    error is None or damaged or error.code() == KafkaError._PARTITION_EOF
                ):
                    continue
                why = error.str() if error is not None and damaged else ""
                if error is None and not (why := _contradiction(consumer, record, reached[place], epochs)):
                    reached[place], left[place] = (record.offset() or 0) + 1, left[place] - 1
                if done := error is not None or bool(why) or not left[place]:
                    del left[place]
                    consumer.pause([TopicPartition(*place)])
                seen[place] = _Seen(*place, reached[place], done=done, why=why)
                deadline = clock.monotonic() + silent_s
            yield from seen.values()
        for place in left:
            ask = partial(librdkafka.watermarks, consumer, *place)
            low, end = kafka_errors.retrying(ask, connection.timeout_s, connection, clock=clock)
            silent = low <= reached[place] < end
            why = f"nothing comes, though the log goes on to offset {end}" if silent else ""
            yield _Seen(*place, reached[place], done=True, why=why)


def _contradiction(consumer: Consumer, record: Any, least: int, epochs: dict[TopicPlace, int]) -> str:
    """Return what in a record can't be true and no checksum covers; empty: nothing.

    `least` is the lowest offset that it may have; `epochs` keeps the leader epochs for which Kafka was asked.
    """
    topic, partition, offset, epoch = (
        record.topic(),
        record.partition(),
        record.offset(),
        record.leader_epoch(),
    )
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), cached=True)
    if not least <= offset < end:
        return f"a batch says offset {offset}, but the log ends at {end}, and lower ones were read"
    if epoch is not None and epoch > epochs.get((topic, partition), -1):
        asked = [TopicPartition(topic, partition, OFFSET_END)]
        (there,) = consumer.offsets_for_times(asked, timeout=_ASK_S)
        if there.error is None and there.leader_epoch is not None:
            epochs[topic, partition] = there.leader_epoch
            if epoch > there.leader_epoch:
                return f"a batch says leader epoch {epoch}, but it is {there.leader_epoch}"
    return ""


if __name__ == "__main__":
    _main()
