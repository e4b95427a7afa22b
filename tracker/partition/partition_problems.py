"""Problems of one partition, as /readyz shows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

_CLOCK_SHOWN_S = 60.0
"""How long a wrong clock is shown."""
_MAX_FAILED_SHOWN = 10
"""Failed markers that are shown."""


class PartitionProblems:
    """Kept by the main loop; `texts` is for any thread.

    takeover  why the last takeover failed, or why another one is needed
    tick      why the last tick could not be written
    ends      why it is not known where the queue ends
    """

    def __init__(self) -> None:
        self.takeover: str | None = None
        self.tick: str | None = None
        self.ends: str | None = None
        self._clock: str | None = None
        self._clock_told_at = 0.0
        self._stuck: dict[int, str] = {}
        self._failed_markers: dict[int, str] = {}

    def clock_was_wrong(self, text: str, now: float) -> None:
        """Show for a while that a clock was wrong."""
        self._clock, self._clock_told_at = text, now

    @property
    def has_failed_markers(self) -> bool:
        """True if there are markers that could not be applied, by a bug of kmqpy."""
        return bool(self._failed_markers)

    def marker_failed(self, at: int, error: Exception) -> None:
        """Note that the marker at this markers offset could not be applied, by a bug of kmqpy."""
        self._failed_markers[at] = f"can't be applied: {type(error).__name__}: {error}"

    def forget_markers(self) -> None:
        """Forget markers that failed: they are read again."""
        self._failed_markers = {}

    def redelivered(self, offsets: Iterable[int], failed: Collection[int], why: str) -> None:
        """Note why these messages failed; forget what was noted of the others, which are redelivered."""
        for offset in offsets:
            if why and offset in failed:
                self._stuck[offset] = why
            else:
                self._stuck.pop(offset, None)

    def forget_ended(self, in_flight: Callable[[int], bool], now: float) -> None:
        """Forget problems that are over: old ones of clocks, and those of messages no longer in flight."""
        if now - self._clock_told_at > _CLOCK_SHOWN_S:
            self._clock = None
        self._stuck = {offset: why for offset, why in self._stuck.items() if in_flight(offset)}

    def texts(self, markers_topic: str) -> list[str]:
        """All problems there are."""
        found = [text for text in (self.takeover, self.tick, self.ends, self._clock) if text]
        failed = sorted(self._failed_markers.copy().items())[:_MAX_FAILED_SHOWN]
        found += [f"marker at offset {at} of {markers_topic} {text}" for at, text in failed]
        return found + sorted({*self._stuck.copy().values()})
