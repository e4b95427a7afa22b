"""Remembers which finished messages of a partition a client may still take. Pure: no I/O, no clock.

A client may pause after it has fetched messages and before it writes their start markers. Meanwhile other
clients take and end these messages. Then the paused client goes on, and takes finished messages: it takes
them late (rule R30 of docs/rules.md). It fetched them before Kafka assigned their partition to another
client, so they lie at or soon after the offset from which that other client takes messages. For each
assignment the tracker therefore notes the finished messages in a *window*: the `WINDOW` messages from that
offset on.

Memory: one bit for each message, and 100 bytes for every 1,024 messages. That is at most 0.25 bytes for each
message and 64 kB for each of up to `MAX_WINDOWS` windows. If a message is forgotten, it is not lost, but
rule R30 no longer holds for it: when a client takes it late, trackers redeliver it, although it was finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.markers.offset_runs import OffsetRuns

WINDOW = 1 << 18
"""The number of messages in a window. A client may have fetched some 100,000 messages whose start markers it
has not written."""

MAX_WINDOWS = 8
"""FinishedMessages holds at most this many windows. It first forgets the one with the oldest assignment, with
its messages."""

_MAX_STORED_RUNS = 2_000
"""At most this many runs are stored; `_most_important` chooses them. Runs of a few bytes each stand in a
znode together with the safe offset, and the znode must stay small."""

Runs = tuple[tuple[int, int], ...]


class StoredFinished(NamedTuple):
    """The stored form of FinishedMessages, for the next tracker of the partition.

    windows  the queue offset at which each window begins, the one of the oldest assignment first
    runs     the finished messages in the windows, as ascending runs (first, count)
    """

    windows: tuple[int, ...] = ()
    runs: Runs = ()

    def below(self, end: int, cuts: LogCuts) -> StoredFinished:
        """Return these without messages at or above queue offset `end`, which don't exist."""
        runs = tuple((first, count) for first, count in cuts.existing(self.runs, end))
        return self._replace(runs=runs)

    def to_json(self) -> dict[str, list[int]]:
        """Return the JSON form, in which `runs` are pairs of a gap (after the run before) and a count."""
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
        if len(windows) > MAX_WINDOWS or len(numbers) > 2 * _MAX_STORED_RUNS:
            raise ValueError("finished: too much")
        runs: list[tuple[int, int]] = []
        end = 0
        for gap, count in zip(numbers[::2], numbers[1::2], strict=True):
            if not 0 < count <= MAX_WINDOWS * WINDOW or end + gap + count > INT64_MAX:
                raise ValueError("finished: a number out of its range")
            runs.append((end + gap, count))
            end += gap + count
        return cls(tuple(windows), tuple(runs))


NONE_FINISHED = StoredFinished()


class FinishedMessages:
    """Remembers which messages were in flight and have ended, in the windows of the latest assignments."""

    __slots__ = ("_end", "_first", "_has_gaps", "_offsets", "_restored", "_stored", "_windows")

    def __init__(self) -> None:
        self._offsets = OffsetRuns()
        self._windows: list[int] = []
        """The queue offset at which each window begins, the one of the latest assignment last."""
        self._first = self._end = 0
        """All windows lie between these queue offsets, `_end` not included."""
        self._has_gaps = False
        """True if some queue offsets between `_first` and `_end` are in no window."""
        self._restored = NONE_FINISHED
        self._stored: StoredFinished | None = NONE_FINISHED
        """The latest result of stored(); None after a change."""

    def __contains__(self, offset: int) -> bool:
        return self._first <= offset < self._end and offset in self._offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def assigned(self, takes_from: int, *, again: bool, before_restored: bool = False) -> None:
        """Note that a partition was assigned to a client that takes messages from `takes_from` on.

        again            the client may take messages again that were taken before. Trackers must redeliver
                         these if the client dies, so the finished messages from `takes_from` on are forgotten
        before_restored  the assignment is older than what was restored, so that stays
        """
        if again:
            self._offsets.discard_from(takes_from)
        # Assignments close to each other share a window, so that they don't use up all windows.
        near = [first for first in self._windows if first <= takes_from <= first + WINDOW // 2]
        window = near[-1] if near else takes_from
        self._set_windows([first for first in self._windows if first != window] + [window])
        if again and before_restored:
            self._offsets.update(OffsetRuns(self._in_windows(self._restored.runs)))

    def touches(self, first: int, count: int) -> bool:
        """Return True if one of these messages may lie in a window; usually none does. The call is cheap."""
        return first < self._end and first + count > self._first

    def add(self, offset: int) -> None:
        """Note that this message was in flight and is finished; does nothing outside the windows."""
        if self._first <= offset < self._end and (not self._has_gaps or self._is_in_window(offset)):
            self._offsets.add(offset)
            self._stored = None

    def discard(self, offset: int) -> None:
        """Forget that this message is finished: a tracker has it redelivered once more."""
        if offset in self:
            self._offsets.discard(offset)
            self._stored = None

    def add_all(self, ended: OffsetRuns, first: int, count: int) -> None:
        """Note that many messages are finished, all among the `count` messages from `first` on; see add()."""
        if self._has_gaps or first < self._first or first + count > self._end:
            ended &= OffsetRuns(self._in_windows(((first, count),)))
        self._offsets.update(ended)
        self._stored = None

    def drop(self, is_gone: Callable[[int], bool]) -> None:
        """Forget the messages, and the windows that begin at messages, of which `is_gone` is True."""
        self._offsets = OffsetRuns((offset, 1) for offset in self._offsets if not is_gone(offset))
        self._set_windows([first for first in self._windows if not is_gone(first)])

    def stored(self) -> StoredFinished:
        """Return the stored form: all runs, or the most important ones if there are too many."""
        if self._stored is None:
            runs = list(self._offsets.runs())
            if len(runs) > _MAX_STORED_RUNS:
                runs = self._most_important(runs)
            self._stored = StoredFinished(tuple(self._windows), tuple(runs))
        return self._stored

    def restore(self, stored: StoredFinished) -> None:
        """Replace everything by a stored form."""
        self._set_windows(list(stored.windows)[-MAX_WINDOWS:])
        self._offsets = OffsetRuns(self._in_windows(stored.runs))
        self._restored = stored

    def _most_important(self, runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the lowest runs of the latest window, then those of earlier windows, in ascending order.

        A paused client is most likely to have fetched the lowest messages of a window.
        """
        kept: set[tuple[int, int]] = set()
        for window in reversed(self._windows):
            for run in runs:
                if len(kept) < _MAX_STORED_RUNS and window <= run[0] < window + WINDOW:
                    kept.add(run)
        return sorted(kept)

    def _set_windows(self, windows: list[int]) -> None:
        dropped = windows[:-MAX_WINDOWS]
        self._windows = windows[-MAX_WINDOWS:]
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
    if isinstance(found, list) and all(type(number) is int and 0 <= number <= INT64_MAX for number in found):
        return found
    raise ValueError(f"finished: {key}: not a list of numbers")
