"""StoredStorage, the storage over any `Engine`: the administrator of its queues."""

from __future__ import annotations

import builtins
import dataclasses
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.closeable import Closeable
from kmqpy.core.settings import convert, nearest
from kmqpy.errors import ConfigError, QueueNotFound
from kmqpy.queue import Capabilities, Codec, QueueDescription, QueueUrl
from kmqpy.queue.storage import refuse_unalterable
from kmqpy.storages.engine import DamageChecks, Engine, QueueRow
from kmqpy.storages.open_queues import OpenQueues, check_given
from kmqpy.storages.settings import ALTERABLE, SETTING_NAMES, StoredQueueSettings, check_queue_name
from kmqpy.storages.stored_queue import StoredQueue
from kmqpy.telemetry.base import Telemetry

URL_SETTINGS = (*SETTING_NAMES, "create")
"""The settings of a queue that a url may have, besides the settings of the storage."""


class StoredStorage(Closeable):
    """Implements kmqpy.queue.Storage. Its queues share the engine, with its connections and threads.

    clock           this machine's clock; leases follow the storage's own clock
    create_missing  whether open_url() makes a missing queue if the url does not say `create`
    """

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock = SYSTEM_CLOCK,
        telemetry: Telemetry | None = None,
        create_missing: bool = False,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._telemetry = telemetry
        self._create_missing = create_missing
        self._queues: OpenQueues[StoredQueue] = OpenQueues(self._engine.close)

    @property
    def capabilities(self) -> Capabilities:
        """See Storage.capabilities."""
        return self._engine.capabilities

    @property
    def damage_checks(self) -> DamageChecks | None:
        """Looks through the data for damage; None: this storage can't."""
        return self._engine if isinstance(self._engine, DamageChecks) else None

    def create(self, name: str, **settings: Any) -> None:
        """See Storage.create; the settings are the fields of StoredQueueSettings."""
        self._queues.check_open()
        made = StoredQueueSettings.of(name, settings)
        made.check_supported(self.capabilities)
        if not self._engine.create_queue(made):
            raise ConfigError(
                f"queue: there is a queue {name!r} already; use it as it is (kmq queue describe shows its "
                "settings), or delete it first (kmq queue delete)"
            )

    def alter(self, name: str, **changes: Any) -> None:
        """See Storage.alter."""
        altered = False
        while not altered:  # others may alter other settings meanwhile
            queue = self._find(name)
            refuse_unalterable(changes, ALTERABLE)
            settings = dataclasses.asdict(queue.settings)
            settings |= {key: new(settings[key]) if callable(new) else new for key, new in changes.items()}
            wanted = StoredQueueSettings.of(settings.pop("name"), settings)
            wanted.check_supported(self.capabilities)
            if wanted.shares != queue.settings.shares:
                made = "with" if queue.settings.shares else "without"
                raise ConfigError(
                    f"fair, max_in_flight_per_group: queue {name!r} was made {made} them, which "
                    "can't be changed; make another queue"
                )
            altered = self._engine.alter_queue(queue, wanted)

    def list(self) -> builtins.list[str]:
        """See Storage.list."""
        self._queues.check_open()
        return sorted(self._engine.queue_names())

    def describe(self, name: str) -> QueueDescription:
        """See Storage.describe."""
        queue = self._find(name)
        counts = self._engine.counts(queue)
        return QueueDescription(
            name=queue.name,
            generation=queue.generation,
            settings=dataclasses.asdict(queue.settings),
            **counts._asdict(),
        )

    def delete(self, name: str) -> None:
        """See Storage.delete."""
        self._engine.delete_queue(self._find(name))

    def open(self, name: str, *, codec: Codec | None = None) -> StoredQueue:
        """See Storage.open."""
        return self._opened(self._find(name), codec, owns_storage=False)

    def open_url(self, url: QueueUrl) -> StoredQueue:
        """See Storage.open_url."""
        self._queues.check_open()
        given = {name: url.settings[name] for name in SETTING_NAMES if name in url.settings}
        wanted = StoredQueueSettings.of(url.queue, given)
        create = convert("create", url.settings.get("create", self._create_missing), bool)
        queue = self._engine.find_queue(url.queue)
        if queue is None and create:
            wanted.check_supported(self.capabilities)
            self._engine.create_queue(wanted)  # False if another process has just made it
        queue = self._find(url.queue)
        check_given(given, wanted, queue.settings)
        return self._opened(queue, None, owns_storage=True)

    def close(self) -> None:
        """See Storage.close."""
        self._queues.close()

    def _opened(self, queue: QueueRow, codec: Codec | None, *, owns_storage: bool) -> StoredQueue:
        opened = StoredQueue(
            self._engine,
            queue,
            clock=self._clock,
            telemetry=self._telemetry,
            codec=codec,
            on_close=self.close if owns_storage else None,
        )
        return self._queues.add(opened)

    def _find(self, name: str) -> QueueRow:
        self._queues.check_open()
        found = self._engine.find_queue(check_queue_name(name))
        if found is None:
            hint = nearest(name, self._engine.queue_names())
            raise QueueNotFound(f"queue: there is no queue {name!r}{hint}")
        return found
