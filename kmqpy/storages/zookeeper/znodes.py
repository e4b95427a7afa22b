"""Reads and writes the znodes of queues.

/ROOT/storage                    JSON: format, id of the storage
/ROOT/ids                        the lowest id of a message that no queue has been given
/ROOT/clock                      written to learn the server's time
/ROOT/turn                       the last request of a process that others overtook too often: the others
                                 wait a moment, so that it has its turn to change a queue (see turns.py)
/ROOT/names/q-NAME               JSON: generation and settings of a queue; NAME is percent-encoded. The
                                 generation is the queue's id: a later queue of this name has another one
/ROOT/queues/GENERATION          the directory of a queue: sums up its pages (see directory.py)
/ROOT/queues/GENERATION/table    the table: most of the directory, if there are many pages
/ROOT/queues/GENERATION/PAGE     a page: the states of up to 100 messages (see rows.py); PAGE is its lowest id
/ROOT/queues/GENERATION/PAGE/ID  a pack: bodies of messages of this page; ID is that of its first message
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from kazoo.client import KazooClient, TransactionRequest
from kazoo.exceptions import (
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    SessionExpiredError,
)
from kazoo.handlers.threading import KazooTimeoutError

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.pieces import pieces
from kmqpy.errors import AccessDenied, Closed, ConfigError, Unavailable
from kmqpy.storages.zookeeper.draft import Now
from kmqpy.storages.zookeeper.rows import not_ours
from kmqpy.storages.zookeeper.server_clock import ServerClock
from kmqpy.zookeeper.multi_read import DENIED, ManyReads, MultiReadProbe
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES, check_multi
from kmqpy.zookeeper.session import check_access, failure, gather, no_answer, unavailable

T = TypeVar("T")

_FORMAT = 2
_OLDER_FORMATS = (1,)
"""Formats that are read, too. Opening a storage of such a format gives it the present one."""
_LOST_ANSWER_ERRORS = (
    ConnectionLoss,
    ConnectionClosedError,
    SessionExpiredError,
    OperationTimeoutError,
    KazooTimeoutError,
)
"""Errors after which a request may have been carried out."""
_RETRY_BACKOFF = Backoff(first=0.02, factor=2.0, maximum=0.5)
_REQUESTS_AT_ONCE = 500
"""clean() and clean_up() send at most this many requests before they wait for the answers."""
_MAX_ID_DIGITS = 18
"""The znode `ids` counts as damaged if it has more digits than this."""
_GENERATION = re.compile(r"[0-9a-f]{32}")
_DELETED = b"deleted"
"""The content of a directory whose queue was deleted."""


class Conflict(Exception):
    """A commit was refused because others have changed the znodes on which it is based."""


class Lost(Exception):
    """The answer to a commit was lost, so nobody knows yet whether the commit happened."""


class Znodes:
    """Reads and writes the znodes below one root. Thread-safe.

    probe     the probe with which the client was connected; None: each znode is read by a request of its own

    Methods raise Unavailable if ZooKeeper has not answered within `timeout_s`; for a commit, see send().
    """

    def __init__(
        self,
        zk: KazooClient,
        root: str,
        *,
        probe: MultiReadProbe | None = None,
        timeout_s: float = 10.0,
        max_packet_bytes: int = MAX_PACKET_BYTES,
    ) -> None:
        self.zk = zk
        self._reads = ManyReads(zk, probe or MultiReadProbe())
        self.timeout_s = timeout_s
        self.max_packet_bytes = max_packet_bytes
        self._root = root
        self._queues = f"{root}/queues"
        self._names = f"{root}/names"
        self._clock = ServerClock()
        self._is_closed = False

    def close(self) -> None:
        """Let methods under way raise Closed at their next lost answer, instead of trying again."""
        self._is_closed = True

    # --- the storage ------------------------------------------------------------------------------

    def prepare(self) -> str:
        """Make missing znodes; return the storage's id. Raises ConfigError for a newer or foreign storage."""
        path = f"{self._root}/storage"
        content = json.dumps({"format": _FORMAT, "id": uuid.uuid4().hex}).encode()

        made = {"names": b"", "queues": b"", "ids": b"1", "clock": b"", "turn": b"", "storage": content}

        def prepare() -> tuple[bytes, int]:
            # Without the right to make znodes, one can still use those that are there.
            there = [self.zk.exists_async(f"{self._root}/{name}") for name in made]
            for name, stat in zip(made, there, strict=True):
                if self._wait(stat) is None:
                    with suppress(NodeExistsError):
                        self._wait(self.zk.create_async(f"{self._root}/{name}", made[name], makepath=True))
            found, stat = self._wait(self.zk.get_async(path))
            return found, stat.version

        data, version = self.repeated(prepare)
        found = _json(data, path)
        is_known = found.get("format") in (_FORMAT, *_OLDER_FORMATS)
        if not is_known or not isinstance(found.get("id"), str) or not found["id"]:
            raise ConfigError(
                f"znode {path}: it is of a newer kmqpy or of another program; kmqpy knows format {_FORMAT}"
            )
        if found["format"] != _FORMAT:
            self._upgrade(path, {**found, "format": _FORMAT}, version)
        return str(found["id"])

    def _upgrade(self, path: str, content: dict[str, Any], version: int) -> None:
        """Write the present format, so that older clients fail when they open the storage."""

        def upgrade() -> None:
            with suppress(BadVersionError):  # another client has done so, or an earlier try
                self._wait(self.zk.set_async(path, json.dumps(content).encode(), version))

        with suppress(AccessDenied):  # then the first directory of the present format tells them
            self.repeated(upgrade)

    def now(self) -> Now:
        """The time by the server's clock; asks for it if no request was answered lately."""
        if not self._clock.is_known:
            self.repeated(self._read_clock)
        return self._clock.now()

    def draw_ids(self, count: int, *, at_least: int) -> int:
        """Return the first of `count` ids that no message of the storage has had; it is `at_least` or larger.

        `at_least` keeps a queue from ids that it has given before, if somebody has set the znode back.
        """
        path = f"{self._root}/ids"

        def draw() -> int | None:
            data, stat = self._wait(self.zk.get_async(path))
            if not data.isdigit() or len(data) > _MAX_ID_DIGITS:
                raise not_ours(path, "it must hold a number", "the znode")
            first = max(int(data), at_least)
            try:
                self._wait(self.zk.set_async(path, b"%d" % (first + count), stat.version))
            except BadVersionError:
                return None
            return first

        # Ids that were drawn by a request whose answer was lost are never used.
        while (first := self.repeated(draw)) is None:
            pass
        return first

    def ask_for_turn(self, asked: bytes) -> None:
        """Write a request for a turn; `asked` is a generation and a name of the request."""
        self.repeated(lambda: self._wait(self.zk.set_async(f"{self._root}/turn", asked)))

    def turn(self, watch: Callable[[Any], None]) -> bytes:
        """Return the last request for a turn; call `watch` at the next one."""

        def read() -> bytes:
            found: bytes = self._wait(self.zk.get_async(f"{self._root}/turn", watch))[0]
            return found

        return self.repeated(read)

    # --- queues -----------------------------------------------------------------------------------

    def create_queue(self, name: str, settings: dict[str, Any], directory: bytes) -> bool:
        """Make a queue of a new generation; returns False if a queue of this name exists already."""
        generation = uuid.uuid4().hex
        content = _queue_content(generation, settings)

        def create() -> bool:
            multi = self.zk.transaction()
            multi.create(self._name(name), content)
            multi.create(f"{self._queues}/{generation}", directory)
            check_multi(multi, self.max_packet_bytes, "queue")
            error = failure(self._wait(multi.commit_async()))
            if isinstance(error, NodeExistsError):
                found = self.find_queue(name)
                return found is not None and found[0] == generation  # of a try whose answer was lost
            if error is not None:
                raise error
            return True

        return self.repeated(create)

    def find_queue(self, name: str) -> tuple[str, dict[str, Any]] | None:
        """The generation and the settings of a queue; None if there is none of this name."""
        path = self._name(name)

        def find() -> bytes | None:
            self._sync(path)
            return self._data(self.zk.get_async(path))

        data = self.repeated(find)
        return None if data is None else _parsed_queue(data, path)

    def alter_queue(
        self,
        name: str,
        generation: str,
        is_unchanged: Callable[[dict[str, Any]], bool],
        settings: dict[str, Any],
    ) -> bool | None:
        """Replace settings that are unchanged; returns False for others, None if this generation is gone."""
        path = self._name(name)
        content = _queue_content(generation, settings)

        def alter() -> bool | None:
            self._sync(path)
            with suppress(NoNodeError):
                data, stat = self._wait(self.zk.get_async(path))
                found, before = _parsed_queue(data, path)
                if found == generation:
                    if not is_unchanged(before):
                        return False
                    try:
                        self._wait(self.zk.set_async(path, content, stat.version))
                    except BadVersionError:
                        return False
                    return True
            return None

        return self.repeated(alter)

    def queue_names(self) -> list[str]:
        def names() -> list[str]:
            self._sync(self._names)
            return [*self._wait(self.zk.get_children_async(self._names))]

        found = [(znode, unquote(znode.removeprefix("q-"))) for znode in self.repeated(names)]
        return [name for znode, name in found if name and self._name(name) == f"{self._names}/{znode}"]

    def delete_queue(self, name: str, generation: str) -> bool:
        """Delete a queue's name and directory in one step; returns False if this generation is gone."""
        path, directory = self._name(name), f"{self._queues}/{generation}"
        tries = 0

        def delete() -> bool | None:
            nonlocal tries
            self._sync(path)
            found, named = self.zk.exists_async(directory), self.zk.get_async(path)
            stat, data = self._wait(found), self._data(named)
            if data is None or _parsed_queue(data, path)[0] != generation:
                return tries > 0  # by a try whose answer was lost
            # A znode with children can't be deleted: the directory is marked here, its pages go afterwards.
            # The version tells that nobody else has deleted this queue and made another of its name.
            multi = self.zk.transaction()
            multi.delete(path)
            if stat is not None:
                multi.set_data(directory, _DELETED, stat.version)
            tries += 1
            error = failure(self._wait(multi.commit_async()))
            if isinstance(error, BadVersionError | NoNodeError):
                tries -= 1
                return None
            if error is not None:
                raise error
            return True

        deadline = SYSTEM_CLOCK.monotonic() + self.timeout_s
        while (deleted := self.repeated(delete)) is None:
            if SYSTEM_CLOCK.monotonic() > deadline:
                raise Unavailable(f"queue {name!r}: others change it all the time")
        if deleted:
            self.clean(generation)
        return deleted

    def clean(self, generation: str) -> None:
        """Delete the znodes of a queue that was deleted."""
        directory = f"{self._queues}/{generation}"

        def clean() -> None:
            try:
                pages = [f"{directory}/{page}" for page in self._wait(self.zk.get_children_async(directory))]
            except NoNodeError:
                return
            for some in pieces(pages, _REQUESTS_AT_ONCE):
                listings = [self.zk.get_children_async(page) for page in some]
                packs = [
                    f"{page}/{pack}"
                    for page, listing in zip(some, listings, strict=True)
                    for pack in self._children(listing)
                ]
                self._delete_all(packs)
                self._delete_all(some)
            self._delete_all([directory])

        self.repeated(clean)

    def clean_up(self) -> None:
        """Delete the znodes of queues whose deletion was interrupted, if the user has the right to."""

        def deleted() -> list[str]:
            names = self._wait(self.zk.get_children_async(self._queues))
            found: list[str] = []
            for some in pieces([name for name in names if _GENERATION.fullmatch(name)], _REQUESTS_AT_ONCE):
                stats = [self.zk.exists_async(f"{self._queues}/{one}") for one in some]
                found += [
                    one for one, stat in zip(some, stats, strict=True) if _may_be_deleted(self._wait(stat))
                ]
            return found

        with suppress(AccessDenied):
            maybe = self.repeated(deleted)
            contents = self.read([f"{self._queues}/{generation}" for generation in maybe])
            for generation, data in zip(maybe, contents, strict=True):
                if data == _DELETED:
                    self.clean(generation)

    # --- the content of a queue -------------------------------------------------------------------

    def directory_path(self, generation: str) -> str:
        """The znode of a queue's directory."""
        return f"{self._queues}/{generation}"

    def read_directory(
        self, generation: str, watch: Callable[[Any], None] | None = None
    ) -> tuple[bytes, int] | None:
        """A directory's bytes and its version; None if the queue was deleted."""
        path = self.directory_path(generation)

        def read() -> tuple[bytes, int] | None:
            self.zk.sync_async(path)
            try:
                data, stat = self._wait(self.zk.get_async(path, watch))
            except NoNodeError:
                return None
            return None if data == _DELETED else (data, stat.version)

        return self.repeated(read)

    def read(self, paths: Sequence[str]) -> list[bytes | None]:
        """The contents of znodes; None for those that are not there."""

        def read() -> list[bytes | None]:
            groups = self._reads.ask(paths)
            found = [one for group, handle in groups for one in self._reads.found(group, handle, self._wait)]
            if DENIED in found:
                raise NoAuthError
            return [None if stat is None else data for data, stat in found]

        return self.repeated(read) if paths else []

    def children(self, paths: Sequence[str]) -> list[list[str] | None]:
        """The names of the znodes below znodes; None for those that are not there."""

        def children() -> list[list[str] | None]:
            results = [self.zk.get_children_async(path) for path in paths]
            return gather(results, self.timeout_s)

        return self.repeated(children) if paths else []

    def send(self, multi: TransactionRequest, what: str) -> Callable[[], int]:
        """Send a commit. The returned function waits for the answer, and raises Conflict or Lost.

        It returns the new version of the znode that the commit writes first. send() itself raises
        MessageError for a commit that is too large.
        """
        check_multi(multi, self.max_packet_bytes, what)
        sent_s = SYSTEM_CLOCK.monotonic()
        result = multi.commit_async()

        def outcome() -> int:
            try:
                results = self._wait(result)
            except _LOST_ANSWER_ERRORS as error:
                raise Lost from error
            except KazooException:
                with unavailable(self.zk):
                    raise
            refused = failure(results)
            if isinstance(refused, BadVersionError | NoNodeError | NodeExistsError | NotEmptyError):
                raise Conflict
            if refused is not None:
                with unavailable(self.zk):
                    raise refused
            self._clock.note(results[0].mtime, sent_s)
            version: int = results[0].version
            return version

        return outcome

    def repeated(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which is repeated for `timeout_s` while its answer is lost."""
        deadline = SYSTEM_CLOCK.monotonic() + self.timeout_s
        tries = 0
        while True:
            try:
                return call()
            except _LOST_ANSWER_ERRORS:
                if self._is_closed:
                    raise Closed("the storage was closed") from None
                check_access(self.zk)
                tries += 1
                if SYSTEM_CLOCK.monotonic() >= deadline:
                    raise no_answer(self.zk) from None
                SYSTEM_CLOCK.sleep(_RETRY_BACKOFF.delay(tries))
            except NoNodeError:
                raise ConfigError(
                    f"znodes below {self._root} are missing: somebody has deleted them; restore them, or "
                    "open the storage again"
                ) from None
            except KazooException:
                with unavailable(self.zk):
                    raise

    def _wait(self, result: Any) -> Any:
        return result.get(timeout=self.timeout_s)

    def _data(self, result: Any) -> bytes | None:
        try:
            data: bytes = self._wait(result)[0]
        except NoNodeError:
            return None
        return data

    def _children(self, listing: Any) -> list[str]:
        try:
            return [*self._wait(listing)]
        except NoNodeError:
            return []

    def _read_clock(self) -> None:
        sent_s = SYSTEM_CLOCK.monotonic()
        stat = self._wait(self.zk.set_async(f"{self._root}/clock", b""))
        self._clock.note(stat.mtime, sent_s)

    def _sync(self, path: str) -> None:
        self.zk.sync_async(path)  # later reads of the session see all earlier commits

    def _name(self, name: str) -> str:
        return f"{self._names}/q-{quote(name, safe=' ')}"

    def _delete_all(self, paths: Sequence[str]) -> None:
        for some in pieces(paths, _REQUESTS_AT_ONCE):
            for result in [self.zk.delete_async(path) for path in some]:
                with suppress(NoNodeError, NotEmptyError):  # gone already, or znodes of others are below it
                    self._wait(result)


def _json(data: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise not_ours(path, error, "the znode") from None
    if not isinstance(found, dict):
        raise not_ours(path, "no JSON object", "the znode")
    return found


def _queue_content(generation: str, settings: dict[str, Any]) -> bytes:
    return json.dumps({"generation": generation, "settings": settings}, sort_keys=True).encode()


def _parsed_queue(data: bytes, path: str) -> tuple[str, dict[str, Any]]:
    """The generation and the settings in the znode of a name; raises ConfigError."""
    found = _json(data, path)
    generation, settings = found.get("generation"), found.get("settings")
    if (
        not isinstance(generation, str)
        or not _GENERATION.fullmatch(generation)
        or not isinstance(settings, dict)
    ):
        raise not_ours(path, "no queue", "the znode")
    return generation, settings


def _may_be_deleted(stat: Any) -> bool:
    return stat is not None and stat.dataLength == len(_DELETED)
