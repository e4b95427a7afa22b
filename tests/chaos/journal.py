"""What processes write down of what they do: lines in a file that kill -9 can't take back."""

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import time_ns  # as it is now: clocks.py replaces that of the module

from kmqpy.kafka.settings import QueueSettings


class Journal:
    """Appends lines; when `write` returns they are the kernel's, and outlive this process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, *lines: tuple[object, ...]) -> None:
        """Lines of fields without spaces; the time in ms is put behind the first."""
        now_ms = time_ns() // 1_000_000
        text = "".join(f"{first} {now_ms} {' '.join(map(str, rest))}\n" for first, *rest in lines)
        os.write(self._file, text.encode())


class Tail:
    """Reads what was added to the journals of a folder, from call to call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._positions: dict[Path, int] = {}

    def lines(self) -> Iterator[list[str]]:
        for path in sorted(self._folder.glob("*.journal")):
            with path.open("rb") as file:
                file.seek(self._positions.get(path, 0))
                data = file.read()
            complete = data.rfind(b"\n") + 1  # a line may be half written
            self._positions[path] = self._positions.get(path, 0) + complete
            yield from (line.split() for line in data[:complete].decode().splitlines())


LANE = 1_000
"""Places are told apart by partition and offset; in the n-th lane beside the main one, n * LANE is added."""


def lanes_of(queue: QueueSettings) -> dict[str, int]:
    """By topic of a lane, the main one first: what is added to its partitions."""
    return {lane.name: number * LANE for number, lane in enumerate(reversed(queue.lanes()))}


def places(messages: Iterable[object], lanes: Mapping[str, int]) -> Iterator[tuple[object, ...]]:
    """The fields that name messages in a journal: partition, offset, body."""
    return ((m.partition + lanes[m.topic], m.offset, m.body.decode()) for m in messages)  # type: ignore[attr-defined]
