"""The finished messages of a partition, as far as a consumer may still take one of them late (rule R30).

Pure: no I/O, no clock. A client that was paused between fetching messages and writing their start markers
goes on after others have taken and ended these messages. It had fetched them before their partition was
assigned to another client, so they lie above the offset from which that one takes, and not far above: so
only those ends are noted that lie in a *window*, the `WINDOW` messages from there on.

One bit a message, and 100 bytes for every 1,024 messages: at most 0.25 bytes a message, 64 kB a window, for
`MOST_WINDOWS` windows. Forgetting is always allowed: a message that is forgotten and taken late is
redelivered, as all were before there was this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.offset_runs import OffsetRuns

WINDOW = 1 << 18
"""Messages of a window; a client can have fetched some 100,000 whose start markers are not written."""

MOST_WINDOWS = 8

_MOST_STORED_RUNS = 2_000
"""A run takes a few bytes; all of them are stored beside the safe offset, which must stay small."""

Runs = tuple[tuple[int, int], ...]


class StoredFinished(NamedTuple):
    """The windows (where each begins, the oldest first) and the messages ended in them, for a successor."""

    windows: tuple[int, ...] = ()
    runs: Runs = ()

    def below(self, end: int) -> StoredFinished:
        """Return a copy without messages at or above queue offset `end`: they don't exist."""
        runs = tuple((first, min(count, end - first)) for first, count in self.runs if first < end)
        return self._replace(runs=runs)

    def to_json(self) -> dict[str, list[int]]:
        """Return the JSON form: the windows; the first run, then pairs of a gap and a count."""
        numbers: list[int] = []
        end = 0
        for first, count in self.runs:
            numbers += (first - end, count)
            end = first + count
        return {"windows": list(self.windows), "runs": numbers}

    @classmethod
    def from_json(cls, values: Any) -> StoredFinished:
        """Read the output of to_json(). Raises ValueError for anything else."""
        if not isinstance(values, dict):
            raise ValueError("finished: not an object")  # noqa: TRY004 - what is stored, not an argument
        windows, numbers = _numbers(values, "windows"), _numbers(values, "runs")
        if len(numbers) % 2:
            raise ValueError("finished: a gap without a count")
        if len(windows) > MOST_WINDOWS or len(numbers) > 2 * _MOST_STORED_RUNS:
            raise ValueError("finished: too much")
        runs: list[tuple[int, int]] = []
        end = 0
        for gap, count in zip(numbers[::2], numbers[1::2], strict=True):
            if not 0 < count <= MOST_WINDOWS * WINDOW or end + gap + count > INT64_MAX:
                raise ValueError("finished: a number out of its range")
            runs.append((end + gap, count))
            end += gap + count
        return cls(tuple(windows), tuple(runs))


NONE_FINISHED = StoredFinished()


class FinishedMessages:
    """The messages that were in flight and ended, in the windows of the latest assignments."""

    __slots__ = ("_end", "_first", "_has_gaps", "_offsets", "_stored", "_windows")

    def __init__(self) -> None:
        self._offsets = OffsetRuns()
        self._windows: list[int] = []
        """Where they begin, the one of the latest assignment last."""
        self._first = self._end = 0
        """All windows lie from here to there."""
        self._has_gaps = False
        """True if not all that lies there is in a window."""
        self._stored: StoredFinished | None = NONE_FINISHED

    def __contains__(self, offset: int) -> bool:
        return self._first <= offset < self._end and offset in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def assigned(self, takes_from: int, *, again: bool) -> None:
        """Note an assignment whose client takes messages from this offset on.

        `again`: also messages that were taken before. What was ended from there on may be taken again, and
        must be redelivered if its taker dies; so it is forgotten.
        """
        if again:
            self._offsets.discard_from(takes_from)
        # Assignments close to each other share a window, so that they don't use up all windows.
        near = [first for first in self._windows if first <= takes_from <= first + WINDOW // 2]
        window = near[-1] if near else takes_from
        self._set_windows([first for first in self._windows if first != window] + [window])

    def touches(self, first: int, count: int) -> bool:
        """Return True if ends of these messages may have to be added; the usual answer is no, and cheap."""
        return first < self._end and first + count > self._first

    def add(self, offset: int) -> None:
        """Note that this message was in flight and is finished."""
        if self._first <= offset < self._end and (not self._has_gaps or self._is_in_window(offset)):
            self._offsets.add(offset)
            self._stored = None

    def add_all(self, ended: OffsetRuns, first: int, count: int) -> None:
        """Like add(), for many messages, all among the `count` messages from `first` on."""
        if self._has_gaps or first < self._first or first + count > self._end:
            ended &= OffsetRuns(self._in_windows(((first, count),)))
        self._offsets.update(ended)
        self._stored = None

    def stored(self) -> StoredFinished:
        """Return what a successor reads: every run, or the most important ones if there are too many."""
        if self._stored is None:
            runs = list(self._offsets.runs())
            if len(runs) > _MOST_STORED_RUNS:
                runs = self._most_important(runs)
            self._stored = StoredFinished(tuple(self._windows), tuple(runs))
        return self._stored

    def restore(self, stored: StoredFinished) -> None:
        """Begin with what was stored."""
        self._set_windows(list(stored.windows)[-MOST_WINDOWS:])
        self._offsets = OffsetRuns(self._in_windows(stored.runs))

    def _most_important(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the lowest messages of the latest window, then of earlier ones.

        A paused client had fetched these.
        """
        kept: set[tuple[int, int]] = set()
        for window in reversed(self._windows):
            for run in runs:
                if len(kept) < _MOST_STORED_RUNS and window <= run[0] < window + WINDOW:
                    kept.add(run)
        return sorted(kept)

    def _set_windows(self, windows: list[int]) -> None:
        dropped = windows[:-MOST_WINDOWS]
        self._windows = windows[-MOST_WINDOWS:]
        self._first = min(self._windows, default=0)
        self._end = max(self._windows, default=-WINDOW) + WINDOW
        ascending = sorted(self._windows)
        self._has_gaps = any(second > first + WINDOW for first, second in pairwise(ascending))
        if dropped:
            self._offsets &= OffsetRuns((first, WINDOW) for first in self._windows)
        self._stored = None

    def _is_in_window(self, offset: int) -> bool:
        return any(first <= offset < first + WINDOW for first in self._windows)

    def _in_windows(self, runs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for first, count in runs:
            for window in self._windows:
                low, end = max(first, window), min(first + count, window + WINDOW)
                if low < end:
                    yield low, end - low


def _numbers(values: dict[str, Any], key: str) -> list[int]:
    found = values.get(key)
    if isinstance(found, list) and all(type(one) is int and 0 <= one <= INT64_MAX for one in found):
        return found
    raise ValueError(f"finished: {key}: not a list of numbers")
