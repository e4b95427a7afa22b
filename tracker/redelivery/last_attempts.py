"""Finds out which copies an earlier consumer has acknowledged, before they become dead letters.

A copy here is the record with which a tracker redelivers a message. The consumer of an earlier delivery may
acknowledge the message after it was copied (rule R32 of docs/rules.md).
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from kmqpy.core.clock import Clock
from kmqpy.kafka.copies.late_acks import CheckedCopies, LateAckCheck
from kmqpy.kafka.markers.late_operations import CopyHeaders
from kmqpy.kafka.settings import KafkaConnection, QueueSettings

_PAUSE_FACTOR = 4
"""After a call of examine() that could not read all markers in time, no call reads markers for this many
times the duration of that call."""

_Key = tuple[str, int, tuple[str, str], tuple[str, ...]]
"""The name of the markers topic, the partition, the ids of the topics, and the lanes of the queue, since one
that is added is to be read, too."""


@dataclass(slots=True)
class _KeptCheck:
    """The LateAckCheck of a partition; it reads markers from the monotonic time `not_before` on."""

    check: LateAckCheck
    not_before: float = 0.0


class PartitionAttempts(NamedTuple):
    """A LastAttempts, bound to one partition of a queue. `topic_ids`: those of its topic and its markers."""

    last_attempts: LastAttempts
    queue: QueueSettings
    partition: int
    topic_ids: tuple[str, str]

    def examine(self, copies: Mapping[int, CopyHeaders], within_s: float) -> CheckedCopies:
        return self.last_attempts.examine(self.queue, self.partition, self.topic_ids, copies, within_s)


class LastAttempts:
    """Reads the markers of partitions in which copies become dead letters. Safe to use from any thread.

    Keeps the markers that were read, and a connection, for each of the `max_kept` partitions that were
    examined last. As a rule one thread examines a partition at a time. If a partition was lost and acquired
    again, the former job may still run: then both read, and the LateAckCheck of the last to end is kept.
    """

    def __init__(self, connection: KafkaConnection, clock: Clock, max_kept: int) -> None:
        self._connection = connection
        self._clock = clock
        self._max_kept = max_kept
        self._lock = threading.Lock()
        self._idle: dict[_Key, _KeptCheck] = {}
        """Those that no thread uses now, the last used last."""

    def examine(
        self,
        queue: QueueSettings,
        partition: int,
        topic_ids: tuple[str, str],
        copies: Mapping[int, CopyHeaders],
        within_s: float,
    ) -> CheckedCopies:
        """Examine copies of one partition, for `within_s` and at most 2 s; see LateAckCheck.examine().

        copies  by offset of a copy: what its headers say

        After a call of examine() that could not read all markers in time, copies count as unread for
        `_PAUSE_FACTOR` times the duration of that call. So forged records that make calls slow use a fifth of
        the time at most.
        """
        key = queue.markers_topic, partition, topic_ids, tuple(queue.lane_markers)
        with self._lock:
            kept = self._idle.pop(key, None)
        if kept is None:
            kept = _KeptCheck(LateAckCheck(self._connection, queue, self._clock, lambda: topic_ids[0]))
        begun = self._clock.monotonic()
        try:
            if begun < kept.not_before:
                return CheckedCopies(unread=[(partition, offset) for offset in copies])
            checked = kept.check.examine({partition: copies}, within_s)
            if checked.unread:
                now = self._clock.monotonic()
                kept.not_before = now + _PAUSE_FACTOR * (now - begun)
            return checked
        finally:
            self._keep(key, kept)

    def close(self) -> None:
        """Release all connections."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for kept in idle:
            kept.check.close()

    def _keep(self, key: _Key, kept: _KeptCheck) -> None:
        with self._lock:
            replaced = self._idle.pop(key, None)
            self._idle[key] = kept
            dropped = [] if replaced is None else [replaced]
            while len(self._idle) > self._max_kept:
                dropped.append(self._idle.pop(next(iter(self._idle))))
        for one in dropped:
            one.check.close()
