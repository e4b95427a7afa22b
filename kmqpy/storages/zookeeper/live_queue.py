"""A queue as this process knows it: reads it, changes it, and finds out what a lost answer said."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, NoReturn, TypeVar

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.storages.engine import QueueRow
from kmqpy.storages.zookeeper.body_cache import BodyCache
from kmqpy.storages.zookeeper.directory import COMMIT_BYTES, COMMITS_REMEMBERED, Directory
from kmqpy.storages.zookeeper.draft import MOST_PAGES, Changes, Draft
from kmqpy.storages.zookeeper.rows import Content, Page, read_pack, read_page
from kmqpy.storages.zookeeper.znodes import Conflict, Lost, Znodes

T = TypeVar("T")

_CONFLICT = Backoff(first=0.002, factor=1.5, maximum=0.1, jitter=1.0)
_IDS = 10_000
"""How many ids a queue draws from the storage at a time."""
_PAGES = 2_000
"""The most pages of a queue that are cached."""

BodyPlace = tuple[int, int, int]
"""Where a body is: number of the page, first id of the pack, index in the pack."""

_VERSION = 0xFFFFFFFF
"""The bits of `seen` that are the directory's version; the higher ones count the calls of wake()."""


class _TooMuch(Exception):
    """The requests of several threads don't fit into one commit."""


class _Request(Generic[T]):
    """A change that a thread asks for; the thread that has the lock carries it out."""

    def __init__(self, work: Callable[[Draft], T], ids: int) -> None:
        self.work = work
        self.ids = ids
        self.is_done = False
        self._result: tuple[T, int] | Exception

    def succeed(self, result: T, version: int) -> None:
        self._result = result, version
        self.is_done = True

    def fail(self, error: Exception) -> None:
        self._result = error
        self.is_done = True

    def outcome(self) -> tuple[T, int]:
        """The result, or its exception raised."""
        if isinstance(self._result, Exception):
            raise self._result
        return self._result


class LiveQueue:
    """One queue; its lock lets one thread of this process change it at a time.

    The thread that gets the lock carries out what others have asked for meanwhile, in the same commit.
    """

    def __init__(self, znodes: Znodes, row: QueueRow, bodies: BodyCache) -> None:
        self.row = row
        self._znodes = znodes
        self._path = znodes.directory_path(row.generation)
        self._lock = threading.Lock()
        self._requests: deque[_Request[Any]] = deque()
        self._directory: Directory | None = None
        self._version = -1
        self._pages: OrderedDict[tuple[int, int], Page] = OrderedDict()
        """By number and version."""
        self._bodies = bodies
        self._changed = threading.Condition()
        self._is_watched = False
        self._watched_version = -1
        self._wakes = 0

    # --- changes ----------------------------------------------------------------------------------

    def change(self, work: Callable[[Draft], T], *, ids: int = 0) -> tuple[T, int]:
        """The result of `work` on the queue as it is, and the version of the directory after it.

        `work` is called anew when somebody else was faster. Delays and leases that are over are carried out
        before. `ids`: how many new messages it adds.

        Raises QueueNotFound, Unavailable (then it is not known whether it happened), what `work` raises.
        """
        request = _Request(work, ids)
        self._requests.append(request)
        with self._lock:
            if not request.is_done:
                self._carry_out([self._requests.popleft() for _ in range(len(self._requests))])
        return request.outcome()

    def contents(self, places: Sequence[BodyPlace]) -> list[Content | None]:
        """The bodies at these places; None for those that are gone."""
        found = {place[:2]: self._bodies.get(self._body_key(place[:2])) for place in places}
        missing = [pack for pack, contents in found.items() if contents is None]
        paths = [self._pack_path(*pack) for pack in missing]
        for pack, path, data in zip(missing, paths, self._znodes.read(paths), strict=True):
            if data is not None:
                found[pack] = self._remember(pack, path, data)
        return [_at(found[place[:2]], place[2]) for place in places]

    # --- waiting ----------------------------------------------------------------------------------

    def seen(self, version: int) -> int:
        """For wait(): the version of the directory, and how often wake() was called."""
        return self._wakes << 32 | version

    def wait(self, seen: int, seconds: float) -> bool:
        """Wait until the directory has another version than the one seen; False: not within `seconds`."""
        deadline = SYSTEM_CLOCK.monotonic() + seconds
        if self._is_changed(seen):
            return True
        if not self._is_watched:
            self._is_watched = True
            try:
                found = self._znodes.read_directory(self.row.generation, self._on_change)
            except BaseException:
                self._is_watched = False
                raise
            self._watched_version = -1 if found is None else found[1]
        if self._watched_version != seen & _VERSION:
            return True
        with self._changed:
            left_s = deadline - SYSTEM_CLOCK.monotonic()
            return self._changed.wait_for(lambda: self._is_changed(seen), max(0.0, left_s))

    def wake(self, _event: Any = None) -> None:
        """Let every wait() return."""
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()

    def _is_changed(self, seen: int) -> bool:
        return self._wakes != seen >> 32

    def _on_change(self, _event: Any) -> None:
        self._is_watched = False
        self.wake()

    # --- carrying out -----------------------------------------------------------------------------

    def _carry_out(self, requests: Sequence[_Request[Any]]) -> None:
        """Carry out requests of several threads by one commit; one by one, if that can't be done."""
        try:
            results = self._results(requests)
        except (_TooMuch, MessageError, ConfigError) as error:  # nothing was written
            if len(requests) == 1:
                requests[0].fail(error)
                return
            for one in requests:
                self._carry_out([one])
        except Exception as error:
            for one in requests:
                one.fail(error)
        except BaseException:
            for one in requests:
                one.fail(
                    Unavailable(f"queue {self.row.name!r}: a change was interrupted; it may have happened")
                )
            raise
        else:
            # A take may have found nothing just before another's messages came by the same commit.
            seen = self._version if len(requests) == 1 else _VERSION
            for one, result in zip(requests, results, strict=True):
                one.succeed(result, seen)

    def _results(self, requests: Sequence[_Request[Any]]) -> Sequence[Any]:
        deadline = SYSTEM_CLOCK.monotonic() + self._znodes.timeout_s
        ids = sum(one.ids for one in requests)
        conflicts, most_pages = 0, MOST_PAGES
        while True:
            is_fresh = self._directory is None
            draft = self._draft(ids, most_pages)
            try:
                draft.pass_time()
                if draft.is_full:
                    self._commit(draft)
                    continue
                results = []
                for one in requests:
                    if draft.is_full:
                        raise _TooMuch
                    results.append(one.work(draft))
                if draft.has_changed:
                    self._commit(draft)
                elif not is_fresh and self._is_outdated():
                    continue
            except MessageError:
                if ids or most_pages == 1:
                    raise
                most_pages //= 2  # long reasons
            except Conflict:
                conflicts += 1
                self._directory = None
                if SYSTEM_CLOCK.monotonic() > deadline:
                    raise Unavailable(f"queue {self.row.name!r}: others change it all the time") from None
                SYSTEM_CLOCK.sleep(_CONFLICT.delay(conflicts))
            else:
                return results

    # --- reading ----------------------------------------------------------------------------------

    def _draft(self, ids: int, most_pages: int) -> Draft:
        directory = self._with_ids(self._directory or self._read(), ids)
        return Draft(directory, self.row.settings, self._znodes.now(), self._load, most_pages)

    def _read(self) -> Directory:
        found = self._znodes.read_directory(self.row.generation)
        if found is None:
            self.raise_deleted()
        if self._directory is None or found[1] != self._version:
            self._directory, self._version = Directory.from_bytes(found[0], self._path), found[1]
        return self._directory

    def raise_deleted(self) -> NoReturn:
        """Raise QueueNotFound."""
        raise QueueNotFound(f"queue {self.row.name!r} was deleted")

    def _is_outdated(self) -> bool:
        """Read the directory again; True if it has changed."""
        version = self._version
        self._read()
        return self._version != version

    def _with_ids(self, directory: Directory, count: int) -> Directory:
        if directory.end_id - directory.next_id >= count:
            return directory
        drawn = max(count, _IDS)
        first = self._znodes.draw_ids(drawn)
        return replace(directory, next_id=first, end_id=first + drawn)

    def _load(self, numbers: Sequence[int]) -> Sequence[Page]:
        assert self._directory is not None
        keys = [(number, self._directory.pages[number].version) for number in numbers]
        missing = [key for key in keys if key not in self._pages]
        paths = [f"{self._path}/{number}" for number, _ in missing]
        for key, path, data in zip(missing, paths, self._znodes.read(paths), strict=True):
            if data is None:
                raise Conflict
            self._keep(key, read_page(data, path))
        return [self._pages[key] for key in keys]

    def _keep(self, key: tuple[int, int], page: Page) -> None:
        self._pages[key] = page
        while len(self._pages) > _PAGES:
            self._pages.popitem(last=False)

    def _body_key(self, pack: tuple[int, int]) -> tuple[str, int, int]:
        return (self.row.generation, *pack)

    def _pack_path(self, page: int, pack: int) -> str:
        return f"{self._path}/{page}/{pack}"

    # --- writing ----------------------------------------------------------------------------------

    def _commit(self, draft: Draft) -> None:
        name = os.urandom(COMMIT_BYTES)
        changes = draft.changes(name)
        outcome = self._send(changes)
        sent_at = self._version
        self._directory = None  # not known until the answer is here
        try:
            self._version, self._directory = outcome(), changes.directory
        except Lost:
            self._read()  # which tells what happened, and to what version it led
            if not self._has_happened(name, sent_at):
                raise Conflict from None
        for number, page in draft.changed_pages().items():
            self._keep((number, changes.directory.pages[number].version), page)
        for pack, data in changes.new_packs.items():
            self._remember(pack, self._pack_path(*pack), data)
        for pack in changes.gone_packs:
            self._bodies.remove(self._body_key(pack))

    def _send(self, changes: Changes) -> Callable[[], int]:
        multi = self._znodes.zk.transaction()
        multi.set_data(self._path, changes.directory.to_bytes(), self._version)
        for page, pack in changes.gone_packs:
            multi.delete(self._pack_path(page, pack))
        for number, data in changes.pages.items():
            path = f"{self._path}/{number}"
            if number in changes.new_pages:
                multi.create(path, data or b"")
            elif data is None:
                multi.delete(path)
            else:
                multi.set_data(path, data)
        for (page, pack), data in changes.new_packs.items():
            multi.create(self._pack_path(page, pack), data)
        return self._znodes.send(multi, f"queue {self.row.name!r}")

    def _has_happened(self, name: bytes, sent_at: int) -> bool:
        """True if a commit without an answer happened; raises Unavailable if nobody can tell any more."""
        assert self._directory is not None
        if name in self._directory.commits:
            return True
        if self._version - sent_at >= COMMITS_REMEMBERED:
            raise Unavailable(f"queue {self.row.name!r}: it is not known whether a change happened")
        return False

    def _remember(self, pack: tuple[int, int], path: str, data: bytes) -> Sequence[Content]:
        found = read_pack(data, path)
        self._bodies.keep(self._body_key(pack), found, len(data))
        return found


def _at(contents: Sequence[Content] | None, index: int) -> Content | None:
    return None if contents is None or index >= len(contents) else contents[index]
