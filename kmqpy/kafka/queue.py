"""What `kafka://h:9092,h2:9092?queue=q` opens: a KmqClient that sends, counts and redrives, too."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Unpack

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.settings import build
from kmqpy.errors import ConfigError, DecodeError
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.stats import InFlightMessage
from kmqpy.kafka.client.client import ClientOptions, KmqClient
from kmqpy.kafka.client.producer import KmqProducer
from kmqpy.kafka.dead_letters import DeadLetters
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.message_headers import DELIVER_AT, int_header
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, build_connections, connection_layers
from kmqpy.message import HeadersLike, Message
from kmqpy.queue import Orphan, Queue, QueueUrl
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection


class KafkaQueue(KmqClient):
    """A queue in Kafka, as the Queue protocol has it: a KmqClient that sends, counts and redrives, too.

    queue       its name; or settings, of which those that are not given are the queue's own
    connection  where Kafka is. Redelivery and dead letters need a tracker that runs
    zookeeper   where ZooKeeper is; without it `size`, `in_flight` and the like read the whole markers
                topic, with it less
    The other arguments are those of KmqClient.

    Raises QueueNotFound, TopicError, Unavailable when it is made, ConfigError for settings that contradict
    the queue's own.
    """

    def __init__(
        self,
        queue: str | QueueSettings,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection = NO_ZOOKEEPER,
        **options: Unpack[ClientOptions],
    ) -> None:
        super().__init__(queue, connection, **options)
        # Reentrant: a handler of signals may call close() in the middle of any call.
        self._opening = threading.RLock()
        self._producer: KmqProducer | None = None
        self._administering = threading.RLock()
        self._admin = Admin(connection, zookeeper, clock=self._clock)

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._queue.name

    @property
    def default_lease(self) -> float:
        """Seconds that a message is its taker's where receive() names no lease."""
        return self._queue.redeliver_after_ms / 1000

    @property
    def max_lease(self) -> float:
        """The longest lease that receive() and extend() take, in seconds."""
        return self._queue.max_hold_ms / 1000

    def send(
        self,
        body: bytes | str,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
    ) -> str:
        """See Queue.send. Messages of one key are in one partition."""
        return self._sender().send(body, key=key, headers=headers, delay=delay)

    def send_many(
        self,
        bodies: Iterable[bytes | str],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
    ) -> list[str]:
        """See Queue.send_many."""
        return self._sender().send_many(bodies, key=key, headers=headers, delay=delay)

    def peek(self, limit: int = 10) -> list[Message]:
        """See Queue.peek; delayed messages count towards `limit` and are left out."""
        if limit < 1:
            raise ConfigError(f"limit: {limit} must be at least 1")
        self._check_open()
        records = stats.waiting_records(self._connection, self._queue, limit=limit)
        now_ms = self._clock.wall_ms()
        found = [self.message_of(record, lease_until_ms=now_ms) for record in records]
        return [message for message in found if not self._is_delayed(message, now_ms)]

    def size(self) -> int:
        """See Queue.size; beyond 10,000 in a partition an upper bound."""
        with self._administered() as admin:
            return admin.stats(self._queue).depth

    def in_flight(self) -> int:
        """See Queue.in_flight."""
        with self._administered() as admin:
            return admin.stats(self._queue).in_flight

    def orphans(self, older_than: Duration) -> list[Orphan]:
        """See Queue.orphans."""
        taken_before = self._clock.wall_ms() - duration_ms(older_than, "older_than")
        return [
            Orphan(
                receipt=one.receipt,
                holder=one.holder,
                since_ms=one.since_ms,
                lease_until_ms=one.lease_until_ms,
            )
            for one in self._held_by_anybody()
            if one.since_ms < taken_before
        ]

    def purge(self) -> int:
        """See Queue.purge; what is in flight is ended first, so that it never counts as lost."""
        with self._administered() as admin:
            return admin.purge(self._queue)

    def redrive(self, limit: int | None = None) -> int:
        """See Queue.redrive. Raises Unfinished when it was stopped halfway."""
        self._check_open()
        with DeadLetters(self._queue, self._connection, self._clock) as letters:
            ids = None if limit is None else [letter.id for letter in letters.list(limit)]
            return letters.redrive(ids).redriven

    def release_all(self) -> int:
        """See Queue.release_all; what waits after a nack goes on to wait."""
        held = self._held_by_anybody()
        self.nack(*[one.receipt for one in held], count=False, wait=True)
        return len(held)

    def close(self) -> None:
        """See Queue.close."""
        if self._guard.inherited:
            return
        try:
            super().close()  # from here on no producer is made any more
        finally:
            with self._opening:
                producer, self._producer = self._producer, None
            if producer is not None:
                producer.close()
            with self._administering:
                self._admin.close()

    def _sender(self) -> KmqProducer:
        self._guard.raise_if_inherited()  # before the lock, which may be held for ever in a child
        with self._opening:
            self._check_open()
            if self._producer is None:
                self._producer = KmqProducer(
                    self._queue, self._connection, telemetry=self._telemetry, clock=self._clock
                )
            return self._producer

    def _is_delayed(self, message: Message, now_ms: int) -> bool:
        try:
            deliver_at = int_header(message.headers, DELIVER_AT)
        except DecodeError:
            return False
        return deliver_at is not None and deliver_at > now_ms

    def _held_by_anybody(self) -> list[InFlightMessage]:
        with self._administered() as admin:
            found = admin.in_flight(self._queue, limit=None)
        return [one for one in found if one.state is EntryState.HELD]

    @contextmanager
    def _administered(self) -> Iterator[Admin]:
        self._check_open()
        with self._administering:
            self._check_open()
            yield self._admin


_IN_URLS = ("max_in_flight", "holder", "instance_id", "markers")
"""Arguments of KmqClient that a url can give."""


def open_queue(url: QueueUrl, telemetry: Telemetry | None = None) -> Queue:
    """Open the queue of a kafka: url.

    Its settings are the fields of QueueSettings, `zookeeper` and `root`, `max_in_flight`, `holder`,
    `instance_id` and `markers` of KmqClient, and librdkafka settings (names with a dot). What the url leaves
    open of the connections is as in KafkaConnection.from_environment(), but there is no default ZooKeeper.
    """
    if not url.address or "@" in url.address:
        raise ConfigError("queue url: write it like kafka://host:9092,host2:9092?queue=name")
    if url.path not in ("", "/"):
        raise ConfigError(f"queue url: a kafka: url has no path, found {url.path!r}")
    kafka = {name: value for name, value in url.settings.items() if "." in name}
    own = {name: value for name, value in url.settings.items() if "." not in name}
    queue_fields = [field.name for field in dataclasses.fields(QueueSettings) if field.name != "name"]
    connection_fields = ["zookeeper", "root"]
    dataclasses.replace(url, settings=own).refuse_unknown([*queue_fields, *connection_fields, *_IN_URLS])
    client: dict[str, Any] = {name: own[name] for name in _IN_URLS if name in own}
    if "max_in_flight" in client:
        client["max_in_flight"] = _whole_number("max_in_flight", client["max_in_flight"])
    connection = {name: own[name] for name in connection_fields if name in own}
    return KafkaQueue(
        build(QueueSettings, {"name": url.queue}, {name: own[name] for name in queue_fields if name in own}),
        *build_connections(
            {"zookeeper": NO_ZOOKEEPER.hosts},
            *connection_layers(),
            {"bootstrap": url.address, "kafka": kafka, **connection},
        ),
        telemetry=telemetry,
        **client,
    )


def _whole_number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{name}: {text!r} is not a whole number")
    return int(text)
