"""Remembers the problems of one partition, for /readyz."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

_CLOCK_PROBLEM_SHOWN_S = 60.0
"""/readyz shows for this many seconds that a clock was wrong."""
_CUT_SHOWN_S = 600.0
"""/readyz shows for this many seconds that the log of the queue was cut back."""
_MAX_FAILED_MARKERS_SHOWN = 10
"""/readyz shows at most this many markers that could not be applied, and omits the others."""


class PartitionProblems:
    """The current problems of a partition. The main loop notes them; any thread may call `texts`.

    takeover  why the last takeover failed, or why the partition must be taken over again
    tick      why the last tick could not be written
    ends      why Kafka could not tell the end offset of the queue
    election  why it is not known whether the queue's log was cut back at an election
    """

    def __init__(self) -> None:
        self.takeover: str | None = None
        self.tick: str | None = None
        self.ends: str | None = None
        self.election: str | None = None
        self._clock: str | None = None
        self._clock_told_at = 0.0
        self._cut: str | None = None
        self._cut_told_at = 0.0
        self._stuck: dict[int, str] = {}
        self._failed_markers: dict[int, str] = {}

    def clock_was_wrong(self, text: str, now: float) -> None:
        """Show this text for `_CLOCK_PROBLEM_SHOWN_S`."""
        self._clock, self._clock_told_at = text, now

    def log_was_cut(self, text: str, now: float) -> None:
        """Show this text for `_CUT_SHOWN_S`."""
        self._cut, self._cut_told_at = text, now

    @property
    def has_failed_markers(self) -> bool:
        """True if markers could not be applied because of a bug of kmqpy."""
        return bool(self._failed_markers)

    def marker_failed(self, at: int, error: Exception) -> None:
        """Note that the marker at this markers offset could not be applied because of a bug of kmqpy."""
        self._failed_markers[at] = f"can't be applied: {type(error).__name__}: {error}"

    def forget_markers(self) -> None:
        """Forget markers that failed, because they are read again."""
        self._failed_markers = {}

    def redelivered(self, offsets: Iterable[int], failed: Collection[int], why: str) -> None:
        """Note `why`, unless empty, for the messages that failed; forget notes about all other `offsets`."""
        for offset in offsets:
            if why and offset in failed:
                self._stuck[offset] = why
            else:
                self._stuck.pop(offset, None)

    def forget_ended(self, in_flight: Callable[[int], bool], now: float) -> None:
        """Forget a wrong clock and a cut of long ago, and failures of messages that are not in flight."""
        if now - self._clock_told_at > _CLOCK_PROBLEM_SHOWN_S:
            self._clock = None
        if now - self._cut_told_at > _CUT_SHOWN_S:
            self._cut = None
        self._stuck = {offset: why for offset, why in self._stuck.items() if in_flight(offset)}

    def texts(self, markers_topic: str) -> list[str]:
        told = (self.takeover, self.tick, self.ends, self.election, self._clock, self._cut)
        found = [text for text in told if text]
        failed = sorted(self._failed_markers.copy().items())[:_MAX_FAILED_MARKERS_SHOWN]
        found += [f"marker at offset {at} of {markers_topic} {text}" for at, text in failed]
        return found + sorted({*self._stuck.copy().values()})
