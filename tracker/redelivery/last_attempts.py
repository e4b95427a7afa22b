"""Finds out which copies an earlier consumer has acknowledged, before they become dead letters (rule R32)."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kmqpy.core.clock import Clock
from kmqpy.kafka.copies.copy_check import CheckedCopies, CopyCheck
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_PAUSE = 4
"""After a reading that was not finished, none begins for this many times as long as it took."""

_Key = tuple[str, int, str]
"""The markers topic, the partition, the topic id."""


@dataclass(slots=True)
class _Kept:
    """The markers that were read of a partition. Reading goes on at the monotonic time `not_before`, in s."""

    check: CopyCheck
    not_before: float = 0.0


class PartitionAttempts(NamedTuple):
    """LastAttempts, for one partition of a queue whose markers topic has this id."""

    last_attempts: LastAttempts
    queue: QueueSettings
    partition: int
    markers_id: str

    def examine(self, copies: Mapping[int, int], within_s: float) -> CheckedCopies:
        """See LastAttempts.examine()."""
        return self.last_attempts.examine(self.queue, self.partition, self.markers_id, copies, within_s)


class LastAttempts:
    """Reads markers of partitions in which copies become dead letters; safe to use from any thread.

    What was read is kept for the `most` partitions that needed it last, each with a connection of its own.
    One thread examines a partition at a time, except while a redeliverer that has just lost the partition
    still does.
    """

    def __init__(self, connection: KafkaConnection, clock: Clock, most: int) -> None:
        self._connection = connection
        self._clock = clock
        self._most = most
        self._lock = threading.Lock()
        self._idle: dict[_Key, _Kept] = {}
        """The one that was used last is last."""

    def examine(
        self,
        queue: QueueSettings,
        partition: int,
        markers_id: str,
        copies: Mapping[int, int],
        within_s: float,
    ) -> CheckedCopies:
        """Examine these copies; see CopyCheck.examine(), whose limits of time hold.

        copies  their offsets, and the markers offset from which to look for acknowledgements

        After a look that was not finished, copies count as unread for a while. So forged records that make
        looks long take a fifth of the time at most.
        """
        key = queue.markers_topic, partition, markers_id
        with self._lock:
            kept = self._idle.pop(key, None)
        if kept is None:
            kept = _Kept(CopyCheck(self._connection, queue, self._clock))
        begun = self._clock.monotonic()
        try:
            if begun < kept.not_before:
                return CheckedCopies(unread=[(partition, offset) for offset in copies])
            checked = kept.check.examine({partition: copies}, within_s)
            if checked.unread:
                now = self._clock.monotonic()
                kept.not_before = now + _PAUSE * (now - begun)
            return checked
        finally:
            self._keep(key, kept)

    def close(self) -> None:
        """Release all connections."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for kept in idle:
            kept.check.close()

    def _keep(self, key: _Key, kept: _Kept) -> None:
        with self._lock:
            replaced = self._idle.pop(key, None)
            self._idle[key] = kept
            dropped = [] if replaced is None else [replaced]
            while len(self._idle) > self._most:
                dropped.append(self._idle.pop(next(iter(self._idle))))
        for one in dropped:
            one.check.close()
