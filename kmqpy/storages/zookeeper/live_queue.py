"""Reads and changes one queue for all threads of this process, by commits (see directory.py).

LiveQueue bases a commit on the directory that it knows. If another process was faster, ZooKeeper refuses the
commit (a *conflict*); LiveQueue then reads the directory and tries again. If the answer to a commit is lost,
LiveQueue finds out from the directory whether the commit happened.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.storages.engine import QueueRow
from kmqpy.storages.zookeeper.body_cache import BodyCache
from kmqpy.storages.zookeeper.change_request import ChangeRequest
from kmqpy.storages.zookeeper.directory import (
    AUTHOR_BYTES,
    COMMIT_BYTES,
    COMMITS_REMEMBERED,
    Directory,
    PageSummary,
    summary,
)
from kmqpy.storages.zookeeper.directory_reader import DirectoryReader
from kmqpy.storages.zookeeper.directory_watch import UNKNOWN_VERSION, DirectoryWatch
from kmqpy.storages.zookeeper.draft import MOST_PAGES_PER_COMMIT, Changes, Draft
from kmqpy.storages.zookeeper.rows import PAGE_ROWS, Content, Page, not_ours, read_pack, read_page
from kmqpy.storages.zookeeper.turns import Turns
from kmqpy.storages.zookeeper.znodes import Conflict, Lost, Znodes

T = TypeVar("T")

_CONFLICT_BACKOFF = Backoff(first=0.002, factor=1.5, maximum=0.1, jitter=1.0)
"""The pauses after a commit that ZooKeeper refused because another process was faster."""
_IDS_PER_DRAW = 10_000
"""A queue draws this many ids from the storage at a time. A larger put() draws as many as it needs."""
_MOST_CACHED_PAGES = 2_000
"""The most pages of a queue that this process caches. It drops the pages that it stored first."""
_ASK_FOR_TURN_AFTER_S = 0.3
"""A change that other processes have overtaken for this many seconds asks for its turn (see turns.py)."""
_TRIES_PER_ROUND = 8
"""A change that is late by _ASK_FOR_TURN_AFTER_S makes this many tries with pauses.

Then it asks for its turn, makes as many tries without pauses, and begins again with pauses.
"""
_ROOM_FOR_PAGES_BYTES = 128 * 1024
"""put() raises MessageError if the directory leaves fewer bytes than this of a request for other znodes."""
_LOOK_AGAIN_S = 0.1
"""A thread that waits for another one to carry out its request checks again after this many seconds."""
_SUSPICIOUS_CONFLICTS = 3
"""After each series of this many conflicts, a change checks for znodes that others have made or deleted.

Such znodes would make all commits of the queue fail.
"""

BodyPlace = tuple[int, int, int]
"""Where a body is: number of the page, first id of the pack, index in the pack."""


class _TooMuch(Exception):
    """The requests of several threads don't fit into one commit. Each of them then gets its own."""


class LiveQueue:
    """One queue of the storage; a lock lets one thread of this process change it at a time.

    The thread that gets the lock also carries out the changes that other threads have asked for meanwhile, in
    the same commit. Then it wakes one of the threads that have asked later.
    """

    def __init__(self, znodes: Znodes, row: QueueRow, bodies: BodyCache, turns: Turns) -> None:
        self.row = row
        self._znodes = znodes
        self._path = znodes.directory_path(row.generation)
        self._lock = threading.Lock()
        self._requests: deque[ChangeRequest[Any]] = deque()
        self._reader = DirectoryReader(znodes, row.generation)
        self._directory: Directory | None = None
        self._version = -1
        self._pages: OrderedDict[int, tuple[int, Page]] = OrderedDict()
        """The last known version and content of pages."""
        self._author = os.urandom(AUTHOR_BYTES)
        self._commits = 0
        self._refused_changes: tuple[Changes, int] | None = None
        """The last commit that was refused, and the version of the directory that it was based on."""
        self._undeletable: set[str] = set()
        """Paths of znodes that this commit can't delete: they are gone, or have znodes of others in them."""
        self._left_over: set[str] = set()
        """Paths of pages that this commit can't create: an earlier commit could not delete them."""
        self._bodies = bodies
        self._turns = turns
        self._has_competitors = False
        self.watch = DirectoryWatch(znodes, row.generation)

    # --- changes ----------------------------------------------------------------------------------

    def change(self, work: Callable[[Draft], T], *, ids: int = 0) -> tuple[T, int]:
        """Change the queue by `work`; return its result, and the version of the directory afterwards.

        Delays and leases that are over are carried out first. `work` is called again with a new draft if
        another process was faster. `work` adds `ids` new messages. The version may be UNKNOWN_VERSION.

        Raises QueueNotFound; Unavailable, after which nobody knows whether the change happened; and the
        errors of `work`.
        """
        request = ChangeRequest(work, ids)
        self._requests.append(request)
        try:
            while not request.is_done:
                # Threads do not block on the lock: one whose change is done would wait for the next commit.
                if not self._lock.acquire(blocking=False):
                    request.wait(_LOOK_AGAIN_S)
                    continue
                try:
                    if not request.is_done:
                        self._carry_out([self._requests.popleft() for _ in range(len(self._requests))])
                finally:
                    self._lock.release()
        except BaseException:
            with suppress(ValueError):
                self._requests.remove(request)  # no thread has begun it
            raise
        finally:
            with suppress(IndexError):
                self._requests[0].wake()
        return request.outcome()

    def contents(self, places: Sequence[BodyPlace]) -> list[Content | ConfigError]:
        """The bodies at these places; in place of one that is gone or can't be read, an error."""
        packs = dict.fromkeys(place[:2] for place in places)
        kept = {pack: self._bodies.get(self._body_key(pack)) for pack in packs}
        found = {pack: contents for pack, contents in kept.items() if contents is not None}
        errors: dict[tuple[int, int], ConfigError] = {}
        missing = [pack for pack in packs if pack not in found]
        paths = [self._pack_path(*pack) for pack in missing]
        for pack, path, data in zip(missing, paths, self._znodes.read(paths), strict=True):
            try:
                found[pack] = self._cache_pack(pack, path, data)
            except ConfigError as error:
                errors[pack] = error
        return [
            errors[place[:2]] if place[:2] in errors else self._content(found[place[:2]], place)
            for place in places
        ]

    # --- carrying out -----------------------------------------------------------------------------

    def _carry_out(self, requests: Sequence[ChangeRequest[Any]]) -> None:
        """Carry out requests of several threads by one commit, or, if they don't fit into it, by one each."""
        try:
            self._carry_out_together(requests)
        except BaseException:
            for one in requests:
                if not one.is_done:
                    one.fail(
                        Unavailable(
                            f"queue {self.row.name!r}: a change was interrupted; it may have happened"
                        )
                    )
            raise

    def _carry_out_together(self, requests: Sequence[ChangeRequest[Any]]) -> None:
        try:
            results, version = self._results(requests)
        except (_TooMuch, MessageError, ConfigError) as error:  # nothing was written
            if len(requests) == 1:
                requests[0].fail(error)
                return
            for one in requests:
                self._carry_out_together([one])
        except Exception as error:
            for one in requests:
                one.fail(error)
        else:
            # A take may have found nothing, just before another thread's put() in the same commit.
            seen = version if len(requests) == 1 else UNKNOWN_VERSION
            for one, result in zip(requests, results, strict=True):
                one.succeed(result, seen)

    def _results(self, requests: Sequence[ChangeRequest[Any]]) -> tuple[Sequence[Any], int]:
        """The results of the requests, and the version of the directory after them."""
        if self._has_competitors:
            self._turns.give_way(self.row.generation)
        started = SYSTEM_CLOCK.monotonic()
        ids = sum(one.ids for one in requests)
        conflicts, lost, most_pages = 0, 0, MOST_PAGES_PER_COMMIT
        is_fresh = self._directory is None
        while True:
            draft = self._draft(ids, most_pages)
            has_passed = False
            try:
                draft.pass_time()
                has_passed = draft.has_changed
                if draft.is_full:
                    self._commit(draft)
                    is_fresh = True
                    continue
                results = []
                for one in requests:
                    if draft.is_full:
                        raise _TooMuch
                    results.append(one.work(draft))
                version = self._version
                if draft.has_changed:
                    version = self._commit(draft)
                elif not is_fresh and self._is_outdated():
                    is_fresh = True
                    continue
            except MessageError:
                if most_pages == 1 or (ids and not has_passed):
                    raise
                most_pages //= 2  # long reasons
            except Conflict as conflict:
                conflicts += 1
                lost += isinstance(conflict.__cause__, Lost)
                late_s = SYSTEM_CLOCK.monotonic() - started
                if late_s > self._znodes.timeout_s:
                    raise Unavailable(
                        f"queue {self.row.name!r}: a change was not done in {self._znodes.timeout_s:g} s; "
                        f"{_conflict_summary(conflicts, lost)}"
                    ) from None
                self._pause_before_retry(conflicts, late_s)
                self._directory, is_fresh = None, True
                if conflicts % _SUSPICIOUS_CONFLICTS == 0:
                    self._recheck_znodes()
            else:
                return results, version

    def _pause_before_retry(self, conflicts: int, late_s: float) -> None:
        """Wait before the next try, or, after many, ask for a turn or try at once (see _TRIES_PER_ROUND)."""
        self._has_competitors = True
        round_, number = divmod(conflicts, _TRIES_PER_ROUND)
        if late_s < _ASK_FOR_TURN_AFTER_S or round_ % 2 == 0:
            SYSTEM_CLOCK.sleep(
                _CONFLICT_BACKOFF.delay(number if late_s >= _ASK_FOR_TURN_AFTER_S else conflicts)
            )
        elif number == 0:
            self._turns.ask(self.row.generation)

    # --- reading ----------------------------------------------------------------------------------

    def _draft(self, ids: int, most_pages: int) -> Draft:
        directory = self._with_ids(self._directory or self._read(), ids)
        return Draft(directory, self.row.settings, self._znodes.now(), self._load, most_pages)

    def _read(self) -> Directory:
        found = self._reader.read(None if self._directory is None else self._version)
        if found is None:
            self.raise_deleted()
        directory, self._version = found
        self._directory = directory or self._directory
        assert self._directory is not None
        return self._directory

    def raise_deleted(self) -> NoReturn:
        """Forget what is cached of the queue, and raise QueueNotFound."""
        self._directory = None
        self._pages.clear()
        raise QueueNotFound(f"queue {self.row.name!r} was deleted")

    def _is_outdated(self) -> bool:
        """Read the directory again; return True if it has changed."""
        version = self._version
        self._read()
        return self._version != version

    def _with_ids(self, directory: Directory, count: int) -> Directory:
        if directory.end_id - directory.next_id >= count:
            return directory
        drawn = max(count, _IDS_PER_DRAW)
        first = self._znodes.draw_ids(drawn, at_least=directory.end_id)
        return replace(directory, next_id=first, end_id=first + drawn)

    def _load(self, numbers: Sequence[int]) -> Sequence[Page | ConfigError]:
        assert self._directory is not None
        summaries = self._directory.pages
        found: dict[int, Page | ConfigError] = {
            number: self._pages[number][1]
            for number in numbers
            if self._pages.get(number, (None,))[0] == summaries[number].version
        }
        missing = [number for number in numbers if number not in found]
        paths = [self._page_path(number) for number in missing]
        for number, path, data in zip(missing, paths, self._znodes.read(paths), strict=True):
            try:
                page = self._page(number, path, data, summaries[number])
            except ConfigError as error:
                if self._is_outdated():  # the page is that of a later commit
                    raise Conflict from None
                found[number] = error
            else:
                found[number] = page
                self._cache_page(number, summaries[number].version, page)
        return [found[number] for number in numbers]

    def _page(self, number: int, path: str, data: bytes | None, expected: PageSummary) -> Page:
        """Parse a page. Raises ConfigError if it is missing, damaged or not the one in the directory."""
        if data is None:
            raise not_ours(path, "it is missing")
        page = read_page(data, path)
        is_its_own = all(row_id >= number for row_id in page)
        if not is_its_own or summary(page, expected.version, manual=self.row.settings.is_manual) != expected:
            raise not_ours(path, "it is another page, or an older one")
        return page

    def _content(self, contents: Sequence[Content], place: BodyPlace) -> Content | ConfigError:
        page, pack, index = place
        if index < len(contents):
            return contents[index]
        self._bodies.remove(self._body_key((page, pack)))
        return not_ours(self._pack_path(page, pack), f"it has no message {index}")

    def _cache_page(self, number: int, version: int, page: Page) -> None:
        self._pages[number] = version, page
        self._pages.move_to_end(number)
        while len(self._pages) > _MOST_CACHED_PAGES:
            self._pages.popitem(last=False)

    def _body_key(self, pack: tuple[int, int]) -> tuple[str, int, int]:
        return (self.row.generation, *pack)

    def _page_path(self, number: int) -> str:
        return f"{self._path}/{number}"

    def _pack_path(self, page: int, pack: int) -> str:
        return f"{self._path}/{page}/{pack}"

    # --- writing ----------------------------------------------------------------------------------

    def _commit(self, draft: Draft) -> int:
        """Write a draft. Returns the version of the directory with it, or UNKNOWN_VERSION."""
        self._commits = (self._commits + 1) % 2**32
        name = self._author + self._commits.to_bytes(COMMIT_BYTES - AUTHOR_BYTES)
        changes = draft.changes(name)
        outcome = self._send(changes)
        sent_at = self._version
        self._directory = None  # not known until the answer is here
        try:
            self._version, self._directory = outcome(), changes.directory
            version = self._version
        except Conflict:
            self._refused_changes = changes, sent_at
            raise
        except Lost as lost:
            self._read()  # this tells whether it happened, and gives the present version
            if not self._has_happened(name, sent_at):
                raise Conflict from lost
            version = UNKNOWN_VERSION
        if changes.table is not None:
            self._reader.keep(changes.directory)
        # Forgotten: a page may be made again under the path of one that is gone.
        self._undeletable.clear()
        self._left_over.clear()
        for number in changes.pages:
            self._pages.pop(number, None)
        for number, page in draft.changed_pages().items():
            self._cache_page(number, changes.directory.pages[number].version, page)
        for pack, data in changes.new_packs.items():
            self._cache_pack(pack, self._pack_path(*pack), data)
        for pack in changes.gone_packs:
            self._bodies.remove(self._body_key(pack))
        return version

    def _send(self, changes: Changes) -> Callable[[], int]:
        multi = self._znodes.zk.transaction()
        directory = changes.directory.to_bytes()
        if (
            changes.new_packs
            and changes.directory.full_bytes > self._znodes.max_packet_bytes - _ROOM_FOR_PAGES_BYTES
        ):
            raise MessageError(
                f"queue {self.row.name!r}: it is full, with {len(changes.directory.pages)} pages of up to "
                f"{PAGE_ROWS} messages; nothing was sent. Finish some, or use another queue"
            )
        multi.set_data(self._path, directory, self._version)
        for path in self._paths_to_delete(changes):
            multi.delete(path)
        if changes.table is not None:
            write = multi.set_data if changes.had_table else multi.create
            write(self._reader.table_path, changes.table)
        for number, data in changes.pages.items():
            if data is not None:
                path = self._page_path(number)
                is_new = number in changes.new_pages and path not in self._left_over
                write = multi.create if is_new else multi.set_data
                write(path, data)
        for (page, pack), data in changes.new_packs.items():
            multi.create(self._pack_path(page, pack), data)
        return self._znodes.send(multi, f"queue {self.row.name!r}")

    def _has_happened(self, name: bytes, sent_at: int) -> bool:
        """True if a commit without an answer happened. Raises Unavailable if that can't be told any more."""
        assert self._directory is not None
        if name in self._directory.commits:
            return True
        # If an older commit of ours is still there, the one in question did not replace it.
        is_remembered = any(one.startswith(self._author) for one in self._directory.commits)
        if not is_remembered and (self._version - sent_at) % 2**32 >= COMMITS_REMEMBERED:
            raise Unavailable(f"queue {self.row.name!r}: it is not known whether a change happened")
        return False

    def _recheck_znodes(self) -> None:
        """Forget cached pages, and find znodes that others have made or deleted, so that commits fail."""
        self._pages.clear()
        self._reader.forget()
        if self._refused_changes is None:
            return
        (refused, version), self._refused_changes = self._refused_changes, None
        self._read()
        if self._version != version:
            return  # another process was faster, and has changed the znodes, too
        gone = self._paths_to_delete(refused)
        for path, below in zip(gone, self._znodes.children(gone), strict=True):
            if below is None or any(f"{path}/{name}" not in gone for name in below):
                self._undeletable.add(path)
        new = [self._page_path(number) for number in refused.new_pages]
        found = zip(new, self._znodes.children(new), strict=True)
        self._left_over = {path for path, below in found if below is not None}

    def _paths_to_delete(self, changes: Changes) -> list[str]:
        """The znodes that a commit deletes: packs, then pages, then the table."""
        packs = [self._pack_path(*pack) for pack in changes.gone_packs]
        pages = [self._page_path(number) for number, data in changes.pages.items() if data is None]
        if changes.had_table and not changes.directory.has_table:
            pages.append(self._reader.table_path)
        return [path for path in [*packs, *pages] if path not in self._undeletable]

    def _cache_pack(self, pack: tuple[int, int], path: str, data: bytes | None) -> Sequence[Content]:
        if data is None:
            raise not_ours(path, "it is missing")
        found = read_pack(data, path)
        self._bodies.keep(self._body_key(pack), found, len(data))
        return found


def _conflict_summary(conflicts: int, lost: int) -> str:
    if conflicts == lost >= _SUSPICIOUS_CONFLICTS:
        return "the connection broke each time; is the servers' jute.maxbuffer less than max_packet_bytes?"
    return f"others were faster {conflicts - lost} times, and the connection broke {lost} times"
