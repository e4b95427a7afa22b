"""RemoteStorage, the queues behind a gateway."""

from __future__ import annotations

import builtins
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.int64 import INT64_MAX
from kmqpy.core.settings import convert
from kmqpy.errors import ConfigError, NotSupported, QueueNotFound, shown
from kmqpy.queue import Capabilities, Codec, QueueDescription, QueueUrl, shapes
from kmqpy.storages.http.gateways import Changed, Gateways
from kmqpy.storages.http.queue import RemoteQueue, path_of
from kmqpy.storages.open_queues import OpenQueues, check_given
from kmqpy.storages.settings import SETTING_NAMES, StoredQueueSettings, check_queue_name
from kmqpy.telemetry.base import Telemetry

T = TypeVar("T")

_AT_MOST_ONCE = "at-most-once"
_NOTHING = type(None)


class RemoteStorage(Closeable):
    """Implements kmqpy.queue.Storage. Asks the gateway what it can when it is made.

    clock  this machine's clock
    """

    def __init__(
        self, gateways: Gateways, *, clock: Clock = SYSTEM_CLOCK, telemetry: Telemetry | None = None
    ) -> None:
        self._gateways = gateways
        self._clock = clock
        self._telemetry = telemetry
        self._queues: OpenQueues[RemoteQueue] = OpenQueues(self._gateways.close)
        self._capabilities = _capabilities(self._ask("GET", "/v1/capabilities", shapes.Capable).capabilities)

    @property
    def capabilities(self) -> Capabilities:
        """See Storage.capabilities."""
        return self._capabilities

    def create(self, name: str, **settings: Any) -> None:
        """See Storage.create."""
        self._queues.check_open()
        path = path_of(check_queue_name(name))
        if settings.get("delivery") == _AT_MOST_ONCE:
            StoredQueueSettings.of(name, settings)  # raises ConfigError for what no storage could do
            raise _no_at_most_once()
        self._ask("PUT", path, _NOTHING, body=shapes.Settings(settings=_plain(settings)), repeatable=False)

    def alter(self, name: str, **changes: Any) -> None:
        """See Storage.alter."""
        self._queues.check_open()
        path = path_of(check_queue_name(name))
        while True:
            present = self.describe(name).settings if any(map(callable, changes.values())) else {}
            wanted = {key: new(present.get(key)) if callable(new) else new for key, new in changes.items()}
            expected = {key: present.get(key) for key, new in changes.items() if callable(new)}
            body = shapes.Settings(settings=_plain(wanted), expected=_plain(expected))
            try:
                return self._ask("PATCH", path, _NOTHING, body=body, repeatable=not expected)
            except Changed:  # by others, meanwhile
                continue

    def list(self) -> builtins.list[str]:
        """See Storage.list."""
        return self._ask("GET", "/v1/queues", shapes.Queues).queues

    def describe(self, name: str) -> QueueDescription:
        """See Storage.describe."""
        self._queues.check_open()
        found = self._ask("GET", path_of(check_queue_name(name)), shapes.Description)
        return QueueDescription(**{**msgspec.structs.asdict(found), "settings": _tuples(found.settings)})

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        self._queues.check_open()
        self._ask("DELETE", path_of(check_queue_name(name)), _NOTHING, repeatable=False)

    def open(self, name: str, *, codec: Codec | None = None) -> RemoteQueue:
        """See Storage.open; raises NotSupported for a queue that delivers at most once."""
        return self._opened(name, codec, owns_storage=False)

    def open_url(self, url: QueueUrl) -> RemoteQueue:
        """See Storage.open_url."""
        self._queues.check_open()
        given = {name: url.settings[name] for name in SETTING_NAMES if name in url.settings}
        wanted = StoredQueueSettings.of(url.queue, given)
        try:
            queue = self._opened(url.queue, None, owns_storage=True)
        except QueueNotFound:
            if not convert("create", url.settings.get("create", False), bool):
                raise
            try:
                self.create(url.queue, **given)
            except ConfigError:
                if url.queue not in self.list():  # another process has just made it
                    raise
            queue = self._opened(url.queue, None, owns_storage=True)
        check_given(given, wanted, queue.settings)
        return queue

    def close(self) -> None:
        """See Storage.close."""
        self._queues.close()

    def _opened(self, name: str, codec: Codec | None, *, owns_storage: bool) -> RemoteQueue:
        self._queues.check_open()
        handle = self._ask("GET", f"{path_of(check_queue_name(name))}/handle", shapes.Handle)
        if handle.at_most_once:
            raise _no_at_most_once()
        known = {key: value for key, value in _tuples(handle.settings).items() if key in SETTING_NAMES}
        opened = RemoteQueue(
            self._gateways,
            handle,
            StoredQueueSettings.of(name, known),
            _capabilities(handle.capabilities),
            clock=self._clock,
            telemetry=self._telemetry,
            codec=codec,
            on_close=self.close if owns_storage else None,
        )
        return self._queues.add(opened)

    def _ask(self, method: str, path: str, answer: type[T], **more: Any) -> T:
        self._queues.check_open()
        return self._gateways.call(method, path, answer, **more)[0]


def _no_at_most_once() -> NotSupported:
    return NotSupported(
        "delivery: through a gateway there is no 'at-most-once', since only a message itself can be put back"
    )


def _capabilities(of_storage: Mapping[str, Any]) -> Capabilities:
    """What can be done through the gateway; newer ones may say more."""
    known = {field.name for field in dataclasses.fields(Capabilities)}
    found = Capabilities(**{key: value for key, value in of_storage.items() if key in known})
    return dataclasses.replace(
        found, transactions=False, at_most_once=False, blocking_take=False, shared=True
    )


def _tuples(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in settings.items()}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them; raises ConfigError for what can't be sent."""
    for key, value in settings.items():
        is_number = isinstance(value, float) or (isinstance(value, int) and abs(value) <= INT64_MAX)
        is_texts = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        if not (value is None or isinstance(value, str) or is_number or is_texts):
            raise ConfigError(f"{key}: {shown(value)} is not a value for a setting")
    return dict(settings)
