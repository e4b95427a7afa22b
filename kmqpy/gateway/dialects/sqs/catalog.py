"""Which queues there are, and what is kept of each: read again every second, so all gateways see changes."""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, QueueNotFound
from kmqpy.gateway.dialects.sqs.addresses import is_arn, queue_of_arn
from kmqpy.gateway.dialects.sqs.attributes import VISIBILITY, Sheet, check_same, is_name, read_sheet
from kmqpy.gateway.dialects.sqs.errors import (
    DELETED_RECENTLY,
    INVALID_ATTRIBUTE_NAME,
    INVALID_ATTRIBUTE_VALUE,
    UNSUPPORTED,
    SqsError,
    no_such_queue,
)
from kmqpy.gateway.service.hub import Hub, QueueName, make_queue
from kmqpy.queue import QueueDescription, Storage

_FRESH_S = 1.0
"""So long, in seconds, what was read of a queue is good; a change by another gateway shows then."""
_DEDUP_MS = 300_000
_MOST = 10_000
_LONG_S = 30.0
"""Seconds for what may take long in large storages."""
_REST_QUEUE = "KMQ.sqs"
"""Its notes say which names were deleted lately, and when (ms)."""
_MOST_RESTING = 900
"""Notes have no room for more."""


class _Known(NamedTuple):
    sheet: Sheet
    read_s: float


class Catalog:
    """The queues of SQS's clients: all whose names SQS allows, in the storage that has no name.

    rest_s  seconds for which nobody can make a queue of a name that was deleted
    fair    patterns: standard queues of such names are made as fair ones, where the storage has them
    """

    def __init__(self, hub: Hub, rest_s: float, fair: Sequence[str]) -> None:
        self._hub = hub
        self._rest_s = rest_s
        self._fair = fair
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._reading: dict[str, asyncio.Task[Sheet | None]] = {}

    async def get(self, name: str) -> Sheet:
        """What is kept of a queue; raises SqsError if it does not exist."""
        known = self._known.get(name)
        if known is not None and SYSTEM_CLOCK.monotonic() - known.read_s < _FRESH_S:
            return known.sheet
        reading = self._reading.get(name)  # one reads for all who ask meanwhile
        if reading is None:
            reading = self._reading[name] = asyncio.ensure_future(self.find(name))
            reading.add_done_callback(lambda _: self._reading.pop(name, None))
        return _found(await asyncio.shield(reading))

    async def read(self, name: str) -> Sheet:
        """The same, as it is in the storage at this moment."""
        return _found(await self.find(name))

    async def find(self, name: str) -> Sheet | None:
        """The same; None if the queue does not exist."""
        if not is_name(name):
            return None
        read_s = SYSTEM_CLOCK.monotonic()
        try:
            sheet = await self._hub.administer(QueueName(name), _sheet)
        except QueueNotFound:
            self._known.pop(name, None)
            return None
        self._known[name] = _Known(sheet, read_s)
        if len(self._known) > _MOST:
            self._known.popitem(last=False)
        return sheet

    async def names(self) -> list[str]:
        """The names of all queues, sorted."""

        def listed(storage: Storage, _: str) -> list[str]:
            return storage.list()

        found = await self._hub.administer(QueueName("all"), listed, patience_s=_LONG_S)
        return [name for name in found if is_name(name)]

    async def sources_of(self, target: str) -> list[str]:
        """The names of the queues whose dead letters go to `target`."""
        found = []
        for name in await self.names():
            sheet = await self.find(name)
            arn = sheet.redrive.arn if sheet is not None and sheet.redrive is not None else ""
            if is_arn(arn) and queue_of_arn(arn, "RedrivePolicy") == target:  # notes may say anything
                found.append(name)
        return found

    async def describe(self, name: str) -> QueueDescription:
        """A queue with its sizes; raises SqsError if it does not exist."""

        def described(storage: Storage, stored: str) -> QueueDescription:
            return storage.describe(stored)

        try:
            return await self._hub.administer(QueueName(name), described, patience_s=_LONG_S)
        except QueueNotFound:
            raise no_such_queue() from None

    async def create(self, name: str, attributes: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Make a queue, unless there is one with these attributes; raises SqsError if they differ."""
        existing = await self.find(name)
        if existing is not None:
            check_same(existing, attributes)
            return
        now_s = SYSTEM_CLOCK.wall_ms() // 1000
        sheet = Sheet(tags=tags, created_s=now_s).changed(attributes, now_s)
        storage = self._hub.storage_of(QueueName(name))
        settings: dict[str, Any] = {"max_redeliveries": None, **_lease(sheet)}
        if _keeps_notes(storage):
            settings["notes"] = sheet.notes()
        else:
            _check_needs_no_notes(sheet)
        if sheet.is_fifo:
            if not storage.capabilities.groups:
                raise SqsError(INVALID_ATTRIBUTE_NAME, "Unknown Attribute FifoQueue.")
            settings |= {"order": "group", "dedup_window_ms": _DEDUP_MS}
        elif storage.capabilities.fair and any(fnmatchcase(name, one) for one in self._fair):
            settings |= {"fair": True, "fair_by": "noise"}

        def made(storage: Storage, stored: str) -> Sheet:
            self._check_rest(storage, name)
            try:
                make_queue(storage, stored, settings)
            except ConfigError as error:
                raise _refusal(error) from None
            return _sheet(storage, stored)

        check_same(await self._hub.administer(QueueName(name), made, patience_s=_LONG_S), attributes)

    async def change(self, name: str, change: Callable[[Sheet], Sheet]) -> Sheet:
        """Change what is kept of a queue; `change` may be called several times, with what others have set."""

        def altered(storage: Storage, stored: str) -> Sheet:
            lease_ms = _lease_ms(storage, stored)

            def new_notes(notes: str) -> str:
                return change(read_sheet(notes, lease_ms)).notes()

            former = _sheet(storage, stored)
            wanted = change(former)
            lease = _lease(wanted) if wanted.visibility != former.visibility else {}
            noted: dict[str, Any] = {"notes": new_notes} if _keeps_notes(storage) else {}
            if not noted:
                _check_needs_no_notes(wanted)
            try:
                if noted or lease:
                    storage.alter(stored, **noted, **lease)
            except ConfigError as error:
                raise _refusal(error) from None
            return _sheet(storage, stored)

        try:
            sheet = await self._hub.administer(QueueName(name), altered)
        except QueueNotFound:
            raise no_such_queue() from None
        self._known[name] = _Known(sheet, SYSTEM_CLOCK.monotonic())
        return sheet

    async def delete(self, name: str) -> None:
        """Delete a queue; raises SqsError if there is none."""

        def deleted(storage: Storage, stored: str) -> None:
            storage.open(stored).close()  # raises QueueNotFound before the name rests
            self._let_rest(storage, name)
            storage.delete(stored)

        try:
            await self._hub.administer(QueueName(name), deleted, patience_s=_LONG_S)
        except QueueNotFound:
            raise no_such_queue() from None
        self._known.pop(name, None)

    def is_recent(self, at_ms: int) -> bool:
        """True for a time (ms since 1970) less than `rest_s` ago; another machine's clock may be ahead."""
        return abs(SYSTEM_CLOCK.wall_ms() - at_ms) < self._rest_s * 1000

    def _let_rest(self, storage: Storage, name: str) -> None:
        """Keep for all gateways that a queue is deleted."""
        if not self._rest_s or not _keeps_notes(storage):
            return

        def noted(notes: str) -> str:
            resting = {one: at_ms for one, at_ms in _resting(notes).items() if self.is_recent(at_ms)}
            resting.pop(name, None)
            resting[name] = SYSTEM_CLOCK.wall_ms()
            return json.dumps(dict([*resting.items()][-_MOST_RESTING:]))

        try:
            storage.alter(_REST_QUEUE, notes=noted)
        except QueueNotFound:
            make_queue(storage, _REST_QUEUE, {})
            storage.alter(_REST_QUEUE, notes=noted)

    def _check_rest(self, storage: Storage, name: str) -> None:
        """Raise SqsError for the name of a queue that was deleted lately."""
        if not self._rest_s or not _keeps_notes(storage):
            return
        with suppress(QueueNotFound), storage.open(_REST_QUEUE) as queue:
            if self.is_recent(_resting(getattr(queue.settings, "notes", "")).get(name, 0)):
                raise SqsError(
                    DELETED_RECENTLY,
                    f"You must wait {self._rest_s:g} seconds after deleting a queue before you can create "
                    "another with the same name.",
                )


def _resting(notes: str) -> dict[str, int]:
    """When names were deleted (ms since 1970); what others wrote there is left out."""
    try:
        found = json.loads(notes or "{}")
        return {name: at_ms for name, at_ms in found.items() if isinstance(at_ms, int)}
    except (ValueError, AttributeError, RecursionError):
        return {}


def _keeps_notes(storage: Storage) -> bool:
    return storage.capabilities.immediate  # Kafka has no room for them


def _check_needs_no_notes(sheet: Sheet) -> None:
    """Raise SqsError unless the lease says all of a queue: others have the defaults."""
    for name, value in sheet.attributes.items():
        if value != (Sheet().value(name) or ""):
            raise SqsError(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
    if not sheet.visibility:
        raise SqsError(INVALID_ATTRIBUTE_VALUE, f"Invalid value for the parameter {VISIBILITY}.")
    if sheet.tags or sheet.tasks:
        raise SqsError(UNSUPPORTED, "Queues on Kafka have neither tags nor move tasks.")


def _found(sheet: Sheet | None) -> Sheet:
    if sheet is None:
        raise no_such_queue()
    return sheet


def _sheet(storage: Storage, stored: str) -> Sheet:
    with storage.open(stored) as queue:
        settings = queue.settings
        sheet = read_sheet(getattr(settings, "notes", ""), settings.lease_ms)
        return replace(sheet, has_shares=getattr(settings, "shares", False))


def _lease_ms(storage: Storage, stored: str) -> int:
    with storage.open(stored) as queue:
        return queue.settings.lease_ms


def _lease(sheet: Sheet) -> Mapping[str, int]:
    """The setting that holds the visibility timeout; a lease can't be 0."""
    return {"lease_ms": sheet.visibility * 1000} if sheet.visibility else {}


def _refusal(error: ConfigError) -> SqsError:
    return SqsError(UNSUPPORTED, f"The storage of this gateway can't keep attributes of queues: {error}")
