"""Tells which messages a query has skipped: Kafka had deleted them before the query read them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_log = logging.getLogger(__name__)

OnSkipped = Callable[[int], None]
"""Called with the number of offsets that a query has skipped: those of messages, and of control records."""


class SkippedMessages:
    """Compares where micro-batches begin with where the log began before they were read.

    The log may lose messages that a micro-batch has read, so only the earlier look at it counts.
    """

    def __init__(
        self,
        connection: KafkaConnection,
        queue: QueueSettings,
        partitions: int,
        on_skipped: OnSkipped | None = None,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._partitions = partitions
        self._lows: Mapping[int, int] = {}
        self._told: dict[int, int] = {}
        self._on_skipped = on_skipped

    def look(self) -> None:
        """Read where each partition's log begins; without an answer, what was known stays."""
        with contextlib.suppress(KmqError):
            found = partition_reader.bounds(self._connection, self._queue.name, range(self._partitions))
            self._lows = {partition: low for partition, (low, _) in found.items()}

    def report(self, sources: Iterable[Any]) -> None:
        """Log what a micro-batch has skipped, call `on_skipped`, and look at the log for the next one.

        sources  of the progress of the micro-batch; format("kmq") tells by itself what it skips
        """
        for source in sources:
            for partition, start in _offsets(source.startOffset, self._queue.name).items():
                low, start = self._lows.get(partition, 0), max(start, self._told.get(partition, 0))
                if low <= start:
                    continue
                self._told[partition] = low
                _log.error(
                    "messages were deleted before they were read",
                    extra={"queue": self._queue.name, "partition": partition, "from": start, "to": low},
                )
                if self._on_skipped is not None:
                    self._on_skipped(low - start)
        self.look()


def _offsets(position: str | None, topic: str) -> dict[int, int]:
    """The offsets in a position of Spark's Kafka source; none in positions of other sources."""
    try:
        found = json.loads(position or "{}").get(topic, {})
        return {int(partition): int(offset) for partition, offset in found.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
