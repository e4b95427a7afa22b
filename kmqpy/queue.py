"""One vocabulary for every storage: the `Queue` protocol, and `queue_for(url)` that opens one.

A storage is a module with a function that takes a `QueueUrl`; the table below says which scheme is
whose. What a storage can't do raises NotSupported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, cast
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kmqpy.core.durations import Duration
from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, NotSupported
from kmqpy.message import HeadersLike, Message, MessagesLike
from kmqpy.telemetry.base import Telemetry

_STORAGES = {"kafka": "kmqpy.kafka.queue:open_queue"}
"""Scheme to `module:function`; imported when a queue of the scheme is opened."""

_PLANNED = ("memory", "zookeeper", "sqlite", "postgresql", "mariadb", "redis", "http", "https")
"""Schemes that are kept for storages to come."""

_EXAMPLE = "write it like kafka://host:9092?queue=name"


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A message that was taken long ago and not ended.

    receipt         what acknowledges or releases it, in any process
    holder          who has it, where the taker gave a name
    since_ms        when it was taken (ms since 1970, the storage's clock)
    lease_until_ms  when it comes again, by the same clock
    """

    receipt: str
    holder: str | None
    since_ms: int
    lease_until_ms: int


class Queue(Protocol):
    """A queue of messages, each acknowledged by itself; safe to use from any thread.

    At-least-once: a message that is not acknowledged before its lease ends comes again. Operations
    take messages, or receipts as text, which are good in any process: several of them, or one list.
    Durations are seconds or `timedelta`. Every call may raise Unavailable when the storage does not
    answer, and Closed after close().
    """

    @property
    def name(self) -> str:
        """The queue's name."""
        ...

    def send(
        self,
        body: bytes | str,
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
    ) -> str:
        """Send one message, safe once this returns; returns its id.

        It is not handed out before `delay` has passed. Raises MessageError for a message that the
        storage can't take.
        """
        ...

    def send_many(
        self,
        bodies: Iterable[bytes | str],
        *,
        key: bytes | str | None = None,
        headers: HeadersLike | None = None,
        delay: Duration = 0,
    ) -> list[str]:
        """Send messages; returns their ids in order. When it raises, some may have been sent."""
        ...

    def receive(
        self, max_messages: int = 100, *, wait: Duration = 1.0, lease: Duration | None = None
    ) -> list[Message]:
        """Take up to `max_messages`; returns as soon as there are some, [] after `wait`.

        They are the caller's for `lease` (default: the queue's; at least 100 ms) and come again unless
        finished before. At least half of the lease is left on return. Raises ConfigError for bad numbers.
        """
        ...

    def ack(self, *messages: MessagesLike, wait: bool = False) -> None:
        """Acknowledge: the messages do not come again. Harmless when it comes too late.

        Returns at once unless `wait`, which returns when it is certain. Raises ReceiptError.
        """
        ...

    def nack(
        self,
        *messages: MessagesLike,
        delay: Duration = 0,
        count: bool = True,
        reason: str | None = None,
        wait: bool = False,
    ) -> None:
        """Give messages back; they come again after `delay`. `count=False`: not an attempt."""
        ...

    def extend(self, *messages: MessagesLike, lease: Duration, wait: bool = False) -> None:
        """Let the leases end `lease` from now; does nothing to messages that are finished.

        `lease=0` means `nack(count=False)`. Raises ConfigError for another one below 100 ms.
        """
        ...

    def dead_letter(self, *messages: MessagesLike, reason: str | None = None, wait: bool = False) -> None:
        """Move messages to the dead letters, without another try."""
        ...

    def peek(self, limit: int = 10) -> list[Message]:
        """Messages that can be taken, without taking them, the oldest first."""
        ...

    def size(self) -> int:
        """How many messages are neither in flight nor dead; delayed ones are among them."""
        ...

    def in_flight(self) -> int:
        """How many messages are taken and not ended."""
        ...

    def orphans(self, older_than: Duration) -> list[Orphan]:
        """Messages that somebody has had for more than `older_than`, the oldest first."""
        ...

    def purge(self) -> int:
        """Remove every message but dead letters; returns about how many there were."""
        ...

    def redrive(self, limit: int | None = None) -> int:
        """Put dead letters back in the queue, with no attempts yet; returns how many."""
        ...

    def release_all(self) -> int:
        """Give back what anybody has taken and not finished, not as attempts; returns how many."""
        ...

    def close(self) -> None:
        """Confirm what is to be confirmed and leave; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUrl:
    """A storage url, taken apart.

    address   what stands between `//` and the path, for example `h:9092,h2:9092`
    queue     the queue's name
    settings  the query parameters but for `queue`; may hold secrets
    """

    scheme: str
    address: str
    path: str
    queue: str
    settings: dict[str, str] = field(default_factory=dict, repr=False)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise ConfigError, with the nearest name, unless every setting is `known`."""
        names = [*known]
        for key in self.settings:
            if key not in names:
                raise ConfigError(f"queue url: unknown setting {key!r}{nearest(key, names)}")


def queue_for(url: str, *, telemetry: Telemetry | None = None) -> Queue:
    """Open the queue of `<storage url>?queue=<name>`, for example `kafka://h:9092,h2:9092?queue=q`.

    Further query parameters are settings of the storage; what they do not say of the connection is what the
    environment says (KMQ_CONFIG, KMQ_KAFKA_… and the like, as for KafkaConnection.from_environment). Close
    it, or use it in a `with`.

    Raises ConfigError for a url or setting that is wrong, NotSupported for a scheme without a
    storage, and what opening the storage raises (QueueNotFound, Unavailable, MissingExtra).
    """
    scheme = _split(url).scheme
    target = _STORAGES.get(scheme)
    if target is None:
        if scheme in _PLANNED:
            raise NotSupported(f"queue url: there is no storage for {scheme}: yet")
        hint = nearest(scheme, [*_STORAGES, *_PLANNED]) or f"; {_EXAMPLE}"
        raise NotSupported(f"queue url: there is no storage for {scheme}:{hint}")
    parsed = parse_url(url)
    module, _, function = target.partition(":")
    open_queue = cast(
        "Callable[[QueueUrl, Telemetry | None], Queue]", getattr(importlib.import_module(module), function)
    )
    return open_queue(parsed, telemetry)


def parse_url(url: str) -> QueueUrl:
    """Take a queue url apart; raises ConfigError, which never shows the url: it may hold a password."""
    parts = _split(url)
    try:
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
    except ValueError:
        raise ConfigError(f"queue url: it can't be read; {_EXAMPLE}") from None
    if parts.fragment:
        raise ConfigError(f"queue url: nothing may follow a #; {_EXAMPLE}")
    settings = dict(pairs)
    for key in settings:
        if sum(name == key for name, _ in pairs) > 1:
            raise ConfigError(f"queue url: {key!r} is given more than once")
    name = settings.pop("queue", "")
    if not name:
        raise ConfigError(f"queue url: it names no queue; {_EXAMPLE}")
    return QueueUrl(
        scheme=parts.scheme,
        address=unquote(parts.netloc),
        path=unquote(parts.path),
        queue=name,
        settings=settings,
    )


def _split(url: str) -> SplitResult:
    if not isinstance(url, str):
        raise ConfigError(f"queue url: {type(url).__name__} is not text; {_EXAMPLE}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"queue url: it can't be read; {_EXAMPLE}") from None
    if not parts.scheme:
        raise ConfigError(f"queue url: it has no scheme; {_EXAMPLE}")
    return parts
