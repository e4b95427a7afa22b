"""The directory of a queue: one znode that tells how many messages there are in each state, and where. Pure.

A *page* is a znode with the states of some messages (see rows.py); the directory sums up each page. A
*commit* is the transaction that changes a queue: it writes the directory, on condition that nobody has
written it since it was read. So all commits happen one after the other, and none is based on an older state.

A directory of many pages keeps most of them in a second znode, the *table*. The directory itself then holds
only the pages that have changed since the table was written. So a commit writes little, however many messages
there are. It writes the table, too, when more than MOST_CHANGED_PAGES have changed.

Directory and table both name the commit that has written the table. If a reader finds different names, a
commit has perhaps come between the two reads, so it reads both again. If the names still differ though the
directory has not changed, the reader raises ConfigError: the table is damaged.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError
from kmqpy.storages.engine import Counts
from kmqpy.storages.zookeeper.rows import Page, Row, Status, not_ours

COMMITS_REMEMBERED = 64
"""The most commits that a directory names, the latest of each author; the oldest are dropped.

An author is a process that has the queue open. If it loses the answer to a commit, it looks for the commit's
name in the directory.
"""
AUTHOR_BYTES = 8
COMMIT_BYTES = AUTHOR_BYTES + 4
"""The name of a commit is its author and a number."""

MOST_PAGES_WITHOUT_TABLE = 32
"""A queue with more pages than this gets a table, and keeps the table until it has half as many pages."""
MOST_CHANGED_PAGES = 32
"""The most pages that may differ from the table. A commit that would leave more writes a new table."""
NO_TABLE = bytes(COMMIT_BYTES)

_FORMAT = 2
_FORMAT_WITHOUT_TABLES = 1
"""The format of directories that hold all pages. They are read, and then written in the present format."""
_LAST_PLAUSIBLE_FORMAT = 15
"""A directory with a format above _FORMAT, up to this one, counts as written by a newer kmqpy.

A directory with a larger format counts as damaged.
"""
_NUMBER_LIMIT = 2**62
"""All ids and places are smaller than this; a directory with another one counts as damaged."""
_HEADER = struct.Struct(">BQQQH")
_TABLE_HEADER = struct.Struct(f">B{COMMIT_BYTES}s")
_PAGE_FORMAT = "QIHHHHBQQ"
_PAGE = struct.Struct(">" + _PAGE_FORMAT)


class PageSummary(NamedTuple):
    """A directory's entry for a page: how many rows are in each state, and which row is ready or due next.

    version         grows with each change of the page, modulo 2**32
    priority, place  those of the first ready row, if there is one
    due_ms          when the next delay or lease ends by itself, in ms of the server's clock; 0: none does
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
    def is_empty(self) -> bool:
        return not (self.ready or self.delayed or self.taken or self.dead)

    def in_state(self, status: Status) -> int:
        """The number of the page's rows in a state."""
        return (self.ready, self.delayed, self.taken, self.dead)[status]


class Pages(dict[int, PageSummary]):
    """The summaries of a queue's pages by page number, and two sorted lists of pages. Not changed once made.

    A queue may have thousands of pages, of which a commit changes a few. So changed() corrects copies of the
    sorted lists, which is faster than sorting again.
    """

    __slots__ = ("_due", "_ready")

    def __init__(self, pages: Mapping[int, PageSummary]) -> None:
        super().__init__(pages)
        self._ready: list[tuple[tuple[int, int], int]] | None = None
        self._due: list[tuple[int, int]] | None = None

    @property
    def ready(self) -> Sequence[tuple[tuple[int, int], int]]:
        """For each page with ready rows: the `Row.order` of the first one, and the page's number; sorted."""
        if self._ready is None:
            self._ready = sorted(_ready_entry(number, page) for number, page in self.items() if page.ready)
        return self._ready

    @property
    def due(self) -> Sequence[tuple[int, int]]:
        """For each page with delays or leases that end by themselves: its `due_ms` and number; sorted."""
        if self._due is None:
            self._due = sorted((page.due_ms, number) for number, page in self.items() if page.due_ms)
        return self._due

    def changed(self, pages: Mapping[int, PageSummary | None]) -> Pages:
        """A copy in which these pages are replaced, or, where the value is None, removed."""
        made = Pages(self)
        made._ready = None if self._ready is None else self._ready.copy()
        made._due = None if self._due is None else self._due.copy()
        for number, page in pages.items():
            made._replace(number, page)
        return made

    def _replace(self, number: int, page: PageSummary | None) -> None:
        before = self.pop(number, None) if page is None else self.get(number)
        if page is not None:
            self[number] = page
        if self._ready is not None:
            if before is not None and before.ready:
                del self._ready[bisect_left(self._ready, _ready_entry(number, before))]
            if page is not None and page.ready:
                insort(self._ready, _ready_entry(number, page))
        if self._due is not None:
            if before is not None and before.due_ms:
                del self._due[bisect_left(self._due, (before.due_ms, number))]
            if page is not None and page.due_ms:
                insort(self._due, (page.due_ms, number))


def _ready_entry(number: int, page: PageSummary) -> tuple[tuple[int, int], int]:
    return (-page.priority, page.place), number


_REMOVED_PAGE = PageSummary(0, 0, 0, 0, 0)
"""Stands, in a directory with a table, for a page that was removed after the table was written. No other page
is empty."""
ReadTable = Callable[[bytes], Mapping[int, PageSummary]]
"""Reads the table that the commit of this name has written, and gives its pages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Directory:
    """The content of a directory, and of its table.

    next_id, end_id  the queue may give new messages the ids from next_id on, below end_id
    next_place       the place of the next message that is put or goes to the back
    commits          names of the latest commits, one of each author
    pages            all pages, by the first id that each may hold
    table            the name of the commit that has written the table; NO_TABLE: there is no table
    changed          numbers of the pages that differ from the table, removed ones included
    """

    next_id: int = 0
    end_id: int = 0
    next_place: int = 1
    commits: tuple[bytes, ...] = ()
    pages: Pages = field(default_factory=lambda: Pages({}))
    table: bytes = NO_TABLE
    changed: frozenset[int] = frozenset()

    @property
    def counts(self) -> Counts:
        """The numbers of messages, by state."""
        pages = self.pages.values()
        return Counts(
            ready=sum(page.ready for page in pages),
            delayed=sum(page.delayed for page in pages),
            in_flight=sum(page.taken for page in pages),
            dead=sum(page.dead for page in pages),
        )

    @property
    def has_table(self) -> bool:
        """True if the unchanged pages are in a table."""
        return self.table != NO_TABLE

    @property
    def full_bytes(self) -> int:
        """The most bytes that a commit may have to write for the directory or the table."""
        return _HEADER.size + COMMITS_REMEMBERED * COMMIT_BYTES + len(self.pages) * _PAGE.size

    def changed_by(self, commit: bytes, pages: Pages, changed: Iterable[int]) -> Directory:
        """The directory after a commit: `pages` are all pages after it, `changed` those that it changes.

        This method decides whether the directory has a table, and whether the commit writes a new one.
        """
        now_changed = self.changed.union(changed)
        if len(pages) <= (MOST_PAGES_WITHOUT_TABLE // 2 if self.has_table else MOST_PAGES_WITHOUT_TABLE):
            return replace(self, pages=pages, table=NO_TABLE, changed=frozenset())
        if self.has_table and len(now_changed) <= MOST_CHANGED_PAGES:
            return replace(self, pages=pages, changed=now_changed)
        return replace(self, pages=pages, table=commit, changed=frozenset())

    def to_bytes(self) -> bytes:
        """The directory as it is stored, without the table."""
        commits = self.commits[-COMMITS_REMEMBERED:]
        header = _HEADER.pack(_FORMAT, self.next_id, self.end_id, self.next_place, len(commits))
        pages: Mapping[int, PageSummary] = self.pages
        if self.has_table:
            pages = {number: self.pages.get(number, _REMOVED_PAGE) for number in sorted(self.changed)}
        return b"".join([header, *commits, self.table, _pages_bytes(pages)])

    def table_bytes(self) -> bytes:
        """A table of all pages as it is stored, written by the commit that `table` names."""
        return _TABLE_HEADER.pack(_FORMAT, self.table) + _pages_bytes(self.pages)

    @classmethod
    def from_bytes(cls, data: bytes, path: str, read_table: ReadTable | None = None) -> Directory:
        """The reverse of to_bytes(); without `read_table`, pages that are in a table are left out.

        Raises ConfigError, which names the znode, and the errors of `read_table`.
        """
        if data and _FORMAT < data[0] <= _LAST_PLAUSIBLE_FORMAT:
            raise ConfigError(
                f"znode {path}: it is of a newer kmqpy (format {data[0]}, this one knows {_FORMAT}), or "
                "damaged; update kmqpy"
            )
        try:
            found, next_id, end_id, next_place, commits = _HEADER.unpack_from(data)
            if found not in (_FORMAT, _FORMAT_WITHOUT_TABLES):
                raise ValueError(f"format {found}; this kmqpy knows {_FORMAT}")
            if max(next_id, end_id, next_place) >= _NUMBER_LIMIT:
                raise ValueError("numbers that no queue reaches")
            at = _HEADER.size + commits * COMMIT_BYTES
            names = pieces(data[_HEADER.size : at], COMMIT_BYTES)
            table = NO_TABLE
            if found == _FORMAT:
                table = data[at : at + COMMIT_BYTES]
                at += COMMIT_BYTES
            if len(table) != COMMIT_BYTES:
                raise ValueError("it is cut off")
            pages = _read_pages(data[at:])
        except (struct.error, ValueError) as error:
            raise not_ours(path, error) from None
        changed: frozenset[int] = frozenset()
        if table != NO_TABLE and read_table is not None:
            changed = frozenset(pages)
            pages = {**read_table(table), **pages}
        return cls(
            next_id=next_id,
            end_id=end_id,
            next_place=next_place,
            commits=tuple(names),
            pages=Pages({number: page for number, page in sorted(pages.items()) if not page.is_empty}),
            table=table,
            changed=changed,
        )


def read_table(data: bytes, path: str) -> tuple[bytes, dict[int, PageSummary]]:
    """The name of the commit that has written a table, and its pages. Raises ConfigError."""
    try:
        found, commit = _TABLE_HEADER.unpack_from(data)
        if found != _FORMAT:
            raise ValueError(f"format {found}; this kmqpy knows {_FORMAT}")
        return commit, _read_pages(data[_TABLE_HEADER.size :])
    except (struct.error, ValueError) as error:
        raise not_ours(path, error) from None


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


def _pages_bytes(pages: Mapping[int, PageSummary]) -> bytes:
    numbers = chain.from_iterable((number, *page) for number, page in pages.items())
    return struct.pack(">" + _PAGE_FORMAT * len(pages), *numbers)  # faster than one by one


def _read_pages(data: bytes) -> dict[int, PageSummary]:
    return {number: PageSummary(*numbers) for number, *numbers in _PAGE.iter_unpack(data)}


def _first_due(rows: Iterable[Row]) -> int:
    return min((row.until_ms for row in rows), default=0)
