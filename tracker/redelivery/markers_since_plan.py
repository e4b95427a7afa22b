"""Finds planned messages that are not due any more, by markers that were written after the plan was made.

A plan is the choice of messages for which a redelivery makes copies, made when their time was up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kmqpy.kafka.markers.codec import Op
from kmqpy.kafka.markers.entry import Entry, EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.message_filter import MessageFilter
from kmqpy.kafka.settings import QueueSettings
from tracker.redelivery.originals import OriginalsReader


class MarkersSincePlan:
    """Reads the markers that follow a plan, each once for all transactions of the plan.

    entries   by offset: the planned messages, whose time is up
    position  the markers offset up to which markers were read when the plan was made

    Keeps an entry and a key for each planned message, and nothing of other messages' markers.
    """

    def __init__(
        self,
        reader: OriginalsReader,
        queue: QueueSettings,
        partition: int,
        entries: Mapping[int, Entry],
        position: int,
    ) -> None:
        self._reader = reader
        self._topic = queue.markers_topic
        self._partition = partition
        self._entries = entries
        self._position = position
        self._filter: MessageFilter | None = None
        self._changed: set[int] = set()
        """Planned messages that another marker after the plan names than an end marker; only these were put
        into `_state`."""
        self._ended: set[int] = set()
        """Planned messages that an end marker after the plan has ended. If a client took one again since, the
        next plan tells whether it took it late (rule R30)."""
        self._state = InFlight(
            now_ms=max((entry.due_ms for entry in entries.values()), default=0),
            position=position,
            max_lease_ms=queue.max_lease_ms,
            max_delay_ms=queue.max_delay_ms,
        )

    def read_to(self, end: int, timeout_s: float) -> None:
        """Read on to before markers offset `end`; see OriginalsReader.read_between()."""
        self._reader.read_between(self._topic, self._partition, self._position, end, timeout_s, self._apply)
        self._position = max(self._position, end)

    def not_due(self, offsets: Iterable[int]) -> frozenset[int]:
        """Return which of `offsets` were finished, have more time, or are to become dead letters by now.

        Markers that give a message no more time change nothing: a client that writes them without end must
        not put the redelivery off for ever.
        """
        return frozenset(
            offset
            for offset in offsets
            if offset in self._ended or (offset in self._changed and not self._is_due(offset))
        )

    def named(self, offsets: Iterable[int]) -> frozenset[int]:
        """Return which of `offsets` a marker after the plan names, whatever it says."""
        return frozenset(one for one in offsets if one in self._changed or one in self._ended)

    def _is_due(self, offset: int) -> bool:
        entry = self._state.get(offset)
        if entry is None or entry.due_ms > self._state.now_ms:
            return False
        return entry.state is not EntryState.DEAD or self._entries[offset].state is EntryState.DEAD

    def _apply(self, records: list[Any]) -> None:
        if self._filter is None:
            self._filter = MessageFilter(self._partition, self._entries)
        for record, marker, about in self._filter.pick(records):
            if marker.op is Op.END:  # most are the tracker's own, of its last transactions
                self._ended.update(about)
                self._state.observe(record.offset(), record.timestamp()[1])
                continue
            new = [offset for offset in about if offset not in self._changed]
            self._changed.update(new)
            self._state.restore(self._entries[offset] for offset in new)
            self._state.apply(marker, record.offset(), record.timestamp()[1])
