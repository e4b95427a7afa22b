"""Works out a change of a queue before it is written: the rules of `Engine`, over pages (see rows.py)."""

from __future__ import annotations

import heapq
from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import NamedTuple
from zlib import crc32

from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError
from kmqpy.storages.engine import Counts, MessageRow, NewRow, TakeRef
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.zookeeper.directory import (
    AUTHOR_BYTES,
    COMMITS_REMEMBERED,
    Directory,
    Pages,
    PageSummary,
    summary,
)
from kmqpy.storages.zookeeper.rows import PAGE_ROWS, Page, Row, Status, pack_bytes, packs, page_bytes

MOST_PAGES_PER_COMMIT = 20
"""The most pages that a commit changes, to fit into a request. Larger changes take several commits."""

_PAGES_PER_READ = 50
"""rows_of() reads at most this many pages at a time."""

LoadPages = Callable[[Sequence[int]], Sequence[Page | ConfigError]]
"""Reads pages by their numbers; an error stands for a page that can't be read."""

EXPIRED = "expired"


class Now(NamedTuple):
    """The time by the server's clock, of which only bounds are known, in ms.

    low   the earliest time it may be: leases and delays that end by then are over
    high  the latest time it may be: new leases and delays begin then, so none is shorter than asked
    """

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The znodes that a commit writes and deletes.

    table       the bytes of a new table; None: the table stays, is deleted, or there is none
    had_table   there was a table before
    pages       the bytes of changed pages by number; None: the page is deleted
    new_pages   those of `pages` that did not exist
    new_packs   the bytes of new packs, by number of the page and first id
    gone_packs  packs whose last message is deleted
    """

    directory: Directory
    table: bytes | None
    had_table: bool
    pages: dict[int, bytes | None]
    new_pages: frozenset[int]
    new_packs: dict[tuple[int, int], bytes]
    gone_packs: list[tuple[int, int]]


class Draft:
    """One change of a queue: reads pages and changes copies of them.

    The caller commits changes(), or drops the draft.

    load    reads pages; a draft does no other I/O
    damage  the error of a page that a method left out because it can't be read; None: there is none
    """

    def __init__(
        self,
        directory: Directory,
        settings: StoredQueueSettings,
        now: Now,
        load: LoadPages,
        most_pages: int = MOST_PAGES_PER_COMMIT,
    ) -> None:
        self.directory = directory
        self.now = now
        self.damage: ConfigError | None = None
        self._settings = settings
        self._load = load
        self._most_pages = most_pages
        self._numbers: list[int] = sorted(directory.pages)
        self._loaded: dict[int, Page] = {}
        self._unreadable: dict[int, ConfigError] = {}
        self._changed: dict[int, dict[int, Row]] = {}
        self._packs: dict[tuple[int, int], bytes] = {}
        self._next_id = directory.next_id
        self._next_place = directory.next_place

    @property
    def has_changed(self) -> bool:
        """True when there is something to write."""
        return bool(self._changed)

    @property
    def room(self) -> int:
        """The number of further pages that the commit can change."""
        return self._most_pages - len(self._changed)

    @property
    def is_full(self) -> bool:
        """True when the rest of a large change has to wait for the next commit."""
        return self.room <= 0

    # --- the rules --------------------------------------------------------------------------------

    def pass_time(self) -> None:
        """Make rows ready whose delay is over, and requeue rows whose lease is, until the draft is full."""
        due = [
            number for _, number in takewhile(lambda one: one[0] <= self.now.low, self.directory.pages.due)
        ]
        over = [row for row in self._rows(due[: self._most_pages]) if self._is_over(row)]
        for row in sorted(over, key=lambda row: (row.until_ms, row.place)):
            if row.status is Status.DELAYED:
                self.replace(row._replace(status=Status.READY))
            else:
                self.requeue(row, row.until_ms, delay_ms=0, count=True, reason=EXPIRED)

    def put(self, rows: Sequence[NewRow]) -> list[int]:
        """Add messages, and return their ids. The caller makes sure that the directory has enough ids."""
        ids = [*range(self._next_id, self._next_id + len(rows))]
        self._next_id += len(rows)
        last = self._numbers[-1] if self._numbers else None
        at = 0
        while at < len(rows):
            if last is None or ids[at] >= last + PAGE_ROWS or self._readable(last) is None:
                number = ids[at]
            else:
                number = last
            some = rows[at : at + number + PAGE_ROWS - ids[at]]
            page = self._page_to_change(number)
            for pack in packs(some):
                for index, row in enumerate(pack):
                    page[ids[at + index]] = self._new_row(ids[at + index], ids[at], index, row)
                self._packs[number, ids[at]] = pack_bytes(pack)
                at += len(pack)
            last = number
        return ids

    def add_again(self, gone: MessageRow) -> Row:
        """Add a message that a take has deleted, as a taken one: rule 9 of kmqpy.storages.engine.

        Its body gets a pack of its own, named by a new id, because the name of its former one may be in use.
        """
        at = bisect_right(self._numbers, gone.id)
        before = self._numbers[at - 1] if at else None
        number = before if before is not None and gone.id < before + PAGE_ROWS else gone.id
        row = Row(
            id=gone.id,
            pack=self._next_id,
            nth=0,
            priority=gone.priority,
            status=Status.TAKEN,
            take=gone.take,
            requeues=gone.requeues,
            place=gone.place,
            enqueued_ms=gone.enqueued_ms,
            first_enqueued_ms=gone.first_enqueued_ms,
            since_ms=self.now.high,
            until_ms=self.now.high,
        )
        self._next_id += 1
        self._page_to_change(number)[row.id] = row
        self._packs[number, row.pack] = pack_bytes([gone])
        return row

    def ready_rows(self) -> Iterator[Row]:
        """Ready rows in the order in which they are taken."""
        changed = frozenset(self._changed)
        others = (one for one in self.directory.pages.ready if one[1] not in changed)
        rows = {number: self._sorted_ready(number) for number in self._changed}
        waiting = [(some[-1].order, number) for number, some in rows.items() if some]
        heapq.heapify(waiting)
        other = next(others, None)
        while waiting or other is not None:
            if other is not None and (not waiting or other < waiting[0]):
                number = other[1]
                rows[number] = self._sorted_ready(number)
                other = next(others, None)
            else:
                _, number = heapq.heappop(waiting)
                yield rows[number].pop()
            if rows[number]:
                heapq.heappush(waiting, (rows[number][-1].order, number))

    def rows_of(self, status: Status) -> Iterator[Row]:
        """All rows of a state, page by page, in the order of their ids."""
        pages = self.directory.pages
        wanted = [one for one in self._numbers if one in self._changed or pages[one].in_state(status)]
        for some in pieces(wanted, _PAGES_PER_READ):
            yield from [row for row in self._rows(some) if row.status is status]

    def counts(self) -> Counts:
        """The numbers of messages, by state."""
        return replace(self.directory, pages=self._now_pages()).counts

    def next_due_ms(self) -> int | None:
        """When the next delay or lease ends by itself; None: none does."""
        due = self._now_pages().due
        return due[0][0] if due else None

    def row(self, row_id: int) -> Row | None:
        """The row of an id, or None. Raises ConfigError if its page can't be read."""
        at = bisect_right(self._numbers, row_id)
        return self._page(self._numbers[at - 1]).get(row_id) if at else None

    def dead_row(self, row_id: int) -> Row | None:
        row = self.row(row_id)
        return row if row is not None and row.status is Status.DEAD else None

    def current_row(self, ref: TakeRef) -> Row | None:
        """The row whose latest take this is, even if it was given back; None if it is dead or gone.

        With ANY_TAKE, the row of the id, unless it is dead or gone.
        """
        row = self.row(ref.id)
        is_current = row is not None and row.status is not Status.DEAD
        return row if row is not None and is_current and (ref.is_any or row.take == ref.take > 0) else None

    def taken(self, row: Row, lease_ms: int) -> Row:
        """The row after a take that begins now."""
        return row._replace(
            status=Status.TAKEN,
            take=row.take + 1,
            since_ms=self.now.high,
            until_ms=self.now.high + lease_ms,
        )

    def requeue(self, row: Row, at_ms: int, *, delay_ms: int, count: bool, reason: str | None) -> None:
        """Give a row back, or bury it over the limit of redeliveries: rule 4 of kmqpy.storages.engine."""
        settings = self._settings
        most = settings.max_redeliveries
        if count and most is not None and row.requeues >= most:
            self.replace(row._replace(status=Status.DEAD, since_ms=at_ms, reason=reason))
            return
        until_ms = at_ms + delay_ms
        self.replace(
            row._replace(
                status=Status.DELAYED if until_ms > self.now.low and delay_ms else Status.READY,
                requeues=row.requeues + count,
                enqueued_ms=at_ms if count else row.enqueued_ms,
                place=row.place if settings.to_front else self.draw_place(),
                until_ms=until_ms,
                reason=reason,
            )
        )

    def replace(self, row: Row) -> None:
        """Put this row in the place of the one with its id."""
        self._page_of(row)[row.id] = row

    def remove(self, row: Row) -> None:
        del self._page_of(row)[row.id]

    def draw_place(self) -> int:
        """A new place, behind all others."""
        self._next_place += 1
        return self._next_place - 1

    # --- the outcome ------------------------------------------------------------------------------

    def changes(self, commit: bytes) -> Changes:
        """The changes to write by the commit of this name."""
        gone: list[tuple[int, int]] = []
        used: set[tuple[int, int]] = set()
        for number, page in self._changed.items():
            kept = {row.pack for row in page.values()}
            used.update((number, pack) for pack in kept)
            before = {row.pack for row in self._loaded.get(number, {}).values()}
            gone += [(number, pack) for pack in sorted(before - kept)]
        # A page may get the number of one that is gone, which others cache under its versions.
        pages = self._now_pages(first_version=crc32(commit))
        directory = self.directory.changed_by(commit, pages, self._changed)
        directory = replace(
            directory,
            next_id=self._next_id,
            next_place=self._next_place,
            commits=_with_latest(directory.commits, commit),
        )
        return Changes(
            directory=directory,
            table=directory.table_bytes() if directory.table == commit else None,
            had_table=self.directory.has_table,
            pages={number: page_bytes(page) if page else None for number, page in self._changed.items()},
            new_pages=frozenset(self._changed.keys() - self.directory.pages.keys()),
            # A message may be finished by its id in the commit that puts it.
            new_packs={place: data for place, data in self._packs.items() if place in used},
            gone_packs=gone,
        )

    def changed_pages(self) -> dict[int, Page]:
        """The changed pages as they are after the commit, by number; without those that it deletes."""
        return {number: page for number, page in self._changed.items() if page}

    # --- pages ------------------------------------------------------------------------------------

    def is_new(self, row: Row) -> bool:
        """True if this change adds the row, so that its body is not written yet."""
        return self.body_place(row)[:2] in self._packs

    def body_place(self, row: Row) -> tuple[int, int, int]:
        """Where a row's body is: number of the page, first id of the pack, index in the pack."""
        return self._number_of(row), row.pack, row.nth

    def _now_pages(self, first_version: int = 0) -> Pages:
        """The summaries of all pages, with the changes of this draft; new pages begin at `first_version`."""
        pages = self.directory.pages
        now: dict[int, PageSummary | None] = {}
        for number, page in self._changed.items():
            found = pages.get(number)
            version = first_version if found is None else (found.version + 1) % 2**32
            now[number] = summary(page, version, manual=self._settings.is_manual) if page else None
        return pages.changed(now)

    def _number_of(self, row: Row) -> int:
        return self._numbers[bisect_right(self._numbers, row.id) - 1]

    def _is_over(self, row: Row) -> bool:
        ends = row.status is Status.DELAYED or (row.status is Status.TAKEN and not self._settings.is_manual)
        return ends and row.until_ms <= self.now.low

    def _new_row(self, row_id: int, pack: int, nth: int, row: NewRow) -> Row:
        return Row(
            id=row_id,
            pack=pack,
            nth=nth,
            priority=row.priority,
            status=Status.DELAYED if row.delay_ms else Status.READY,
            take=0,
            requeues=0,
            place=self.draw_place(),
            enqueued_ms=self.now.high,
            first_enqueued_ms=self.now.high,
            until_ms=self.now.high + row.delay_ms,
        )

    def _sorted_ready(self, number: int) -> list[Row]:
        """The rows of a page that are ready, in the reverse of the order in which they are taken."""
        found = [row for row in (self._readable(number) or {}).values() if row.status is Status.READY]
        return sorted(found, key=lambda row: row.order, reverse=True)

    def _rows(self, numbers: Sequence[int]) -> Iterable[Row]:
        self._fetch([one for one in numbers if one not in self._changed])
        return [row for number in numbers for row in (self._readable(number) or {}).values()]

    def _page(self, number: int) -> Page:
        if number in self._changed:
            return self._changed[number]
        self._fetch([number])
        if number in self._unreadable:
            raise self._unreadable[number]
        return self._loaded[number]

    def _readable(self, number: int) -> Page | None:
        """A page; None, and its error in `damage`, if it can't be read."""
        try:
            return self._page(number)
        except ConfigError as error:
            self.damage = error
            return None

    def _fetch(self, numbers: Sequence[int]) -> None:
        missing = [one for one in numbers if one not in self._loaded and one not in self._unreadable]
        for number, page in zip(missing, self._load(missing), strict=True):
            if isinstance(page, ConfigError):
                self._unreadable[number] = page
            else:
                self._loaded[number] = page

    def _page_of(self, row: Row) -> dict[int, Row]:
        return self._page_to_change(self._number_of(row))

    def _page_to_change(self, number: int) -> dict[int, Row]:
        if number not in self._changed:
            if number in self.directory.pages:
                self._changed[number] = dict(self._page(number))
            else:
                insort(self._numbers, number)
                self._changed[number] = {}
        return self._changed[number]


def _with_latest(commits: Iterable[bytes], commit: bytes) -> tuple[bytes, ...]:
    """The names of commits with the latest one, which replaces the former one of its author."""
    others = [one for one in commits if one[:AUTHOR_BYTES] != commit[:AUTHOR_BYTES]]
    return (*others, commit)[-COMMITS_REMEMBERED:]
