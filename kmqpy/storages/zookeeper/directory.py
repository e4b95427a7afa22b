"""The directory of a queue: one znode that counts its messages and says what is in which page. Pure.

Each change of a queue writes the directory, on condition that nobody has written it since it was read. So all
changes of a queue happen one after the other, and none is based on an older state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from kmqpy.storages.engine import Counts
from kmqpy.storages.zookeeper.rows import Page, Row, Status, not_ours

COMMITS_REMEMBERED = 64
"""How many commits a directory names, the latest of each author.

An author is a process with a queue open. When it has lost the answer to its commit, it looks for it there.
"""
AUTHOR_BYTES = 8
COMMIT_BYTES = AUTHOR_BYTES + 4
"""A commit is named by its author and a number."""

_FORMAT = 1
_HEADER = struct.Struct(">BQQQH")
_PAGE_FORMAT = "QIHHHHBQQ"
_PAGE = struct.Struct(">" + _PAGE_FORMAT)


class PageSummary(NamedTuple):
    """Counts and the next events of one page.

    version         grows with each change of the page
    priority, place  of the first row that is ready, if there is one
    due_ms          when the next delay or lease ends, in ms of the server's clock; 0: none does by itself
    """

    version: int
    ready: int
    delayed: int
    taken: int
    dead: int
    priority: int = 0
    place: int = 0
    due_ms: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Row.order of the first row that is ready."""
        return (-self.priority, self.place)

    def in_state(self, status: Status) -> int:
        """How many rows are in a state."""
        return (self.ready, self.delayed, self.taken, self.dead)[status]


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The directory of a queue.

    next_id, end_id  ids that the queue may give to new messages: from next_id on, below end_id
    next_place       the place of the next message that is put or goes to the back
    commits          the latest commits, one of each author
    pages            by the first id that each may hold, in order
    """

    next_id: int = 0
    end_id: int = 0
    next_place: int = 1
    commits: tuple[bytes, ...] = ()
    pages: Mapping[int, PageSummary] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """How many messages there are, by state."""
        pages = self.pages.values()
        return Counts(
            ready=sum(page.ready for page in pages),
            delayed=sum(page.delayed for page in pages),
            in_flight=sum(page.taken for page in pages),
            dead=sum(page.dead for page in pages),
        )

    def to_bytes(self) -> bytes:
        """The directory as it is stored."""
        commits = self.commits[-COMMITS_REMEMBERED:]
        header = _HEADER.pack(_FORMAT, self.next_id, self.end_id, self.next_place, len(commits))
        numbers = chain.from_iterable((number, *page) for number, page in self.pages.items())
        pages = struct.pack(">" + _PAGE_FORMAT * len(self.pages), *numbers)  # faster than one by one
        return b"".join([header, *commits, pages])

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> Directory:
        """The reverse of to_bytes(); raises ConfigError naming the znode."""
        try:
            found, next_id, end_id, next_place, commits = _HEADER.unpack_from(data)
            if found != _FORMAT:
                raise ValueError(f"format {found}; this kmqpy knows {_FORMAT}")
            at = _HEADER.size + commits * COMMIT_BYTES
            names = _pieces(data[_HEADER.size : at], COMMIT_BYTES)
            pages = {number: PageSummary(*numbers) for number, *numbers in _PAGE.iter_unpack(data[at:])}
        except (struct.error, ValueError) as error:
            raise not_ours(path, error) from None
        return cls(
            next_id=next_id,
            end_id=end_id,
            next_place=next_place,
            commits=tuple(names),
            pages=dict(sorted(pages.items())),
        )


def summary(page: Page, version: int, *, manual: bool) -> PageSummary:
    """The summary of a page; leases of a queue with manual redelivery don't end by themselves."""
    by_status: dict[Status, list[Row]] = {status: [] for status in Status}
    for row in page.values():
        by_status[row.status].append(row)
    ready, delayed, taken = (by_status[one] for one in (Status.READY, Status.DELAYED, Status.TAKEN))
    first = min(ready, key=lambda row: row.order) if ready else None
    return PageSummary(
        version=version,
        ready=len(ready),
        delayed=len(delayed),
        taken=len(taken),
        dead=len(by_status[Status.DEAD]),
        priority=0 if first is None else first.priority,
        place=0 if first is None else first.place,
        due_ms=_first_due(delayed if manual else [*delayed, *taken]),
    )


def _first_due(rows: Iterable[Row]) -> int:
    return min((row.until_ms for row in rows), default=0)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
