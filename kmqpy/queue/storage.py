"""The `Storage` protocol: the administrator of queues, which share the connections of the storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, KmqError, MessageError
from kmqpy.queue.capabilities import Capabilities
from kmqpy.queue.protocol import Queue
from kmqpy.queue.url import QueueUrl
from kmqpy.queue_policy import QueuePolicy

QUEUE_SETTINGS = frozenset(
    {
        *(field.name for field in dataclasses.fields(QueuePolicy) if field.name != "name"),
        *("requeue_to", "order", "redelivery", "delivery", "collapse", "on_dead_letter", "notes", "create"),
        *("retry_delays", "retry_max_ms", "retry_jitter", "dedup_window_ms", "dedup_until", "dedup_by"),
        *("fair", "fair_by", "max_in_flight_per_group"),
    }
)
"""Settings that belong to a queue, in any storage; storage_for() refuses them in the url of a storage."""


class Codec(Protocol):
    """Encodes objects as bodies of messages, and decodes them."""

    def encode(self, value: Any) -> bytes:
        """The body for an object; raises MessageError for an object that the codec can't encode."""
        ...

    def decode(self, body: bytes) -> Any:
        """The object of a body; raises DecodeError, which holds the body."""
        ...


def encode_body(codec: Codec, value: Any) -> bytes:
    """The body that `codec` makes of an object; turns any error that is no KmqError into MessageError."""
    try:
        body = codec.encode(value)
    except KmqError:
        raise
    except Exception as error:  # the text of the error is left out: it may hold the value
        kind = type(value).__name__
        raise MessageError(f"body: the codec can't encode {kind}: {type(error).__name__}") from error
    if not isinstance(body, bytes):
        raise MessageError(f"body: the codec made {type(body).__name__} of it, not bytes")
    return body


def refuse_unalterable(changes: Iterable[str], alterable: Sequence[str]) -> None:
    """Raise ConfigError if a setting in `changes` can't be changed."""
    for key in changes:
        if key not in alterable:
            hint = nearest(key, alterable) or f"; what can is: {', '.join(alterable)}"
            raise ConfigError(f"{key}: can't be changed{hint}")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """Describes a queue: its settings, and how many messages it has.

    generation  distinguishes the queue from earlier and later queues of the same name
    settings    values of the settings, by name
    ready       messages that can be taken
    delayed     messages whose delay is not over
    in_flight   messages that are taken and not finished
    dead        dead letters
    held_groups groups that wait for their dead letters (on_dead_letter="hold")
    """

    name: str
    generation: str
    settings: Mapping[str, Any]
    ready: int
    delayed: int
    in_flight: int
    dead: int
    held_groups: int = 0


class Storage(Protocol):
    """Makes, changes, opens and deletes queues, which share its connections and threads.

    Safe to use from any thread. Every method may raise Unavailable when the storage does not answer, and
    Closed after close().
    """

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""
        ...

    def create(self, name: str, **settings: Any) -> None:
        """Make a queue.

        Raises ConfigError for a wrong or unknown setting, and for a name that is in use. Raises NotSupported
        for a setting that this storage can't do.
        """
        ...

    def alter(self, name: str, **changes: Any) -> None:
        """Change settings of a queue: max_redeliveries, lease_ms, max_delay_ms, max_lease_ms.

        Storages with the capability change retry_delays, retry_max_ms, retry_jitter, dedup_window_ms,
        fair, fair_by and max_in_flight_per_group; those other than Kafka also `notes`, and they take
        functions of present values for values.

        Queues that are open keep the settings with which they were opened, except where the storage itself
        applies them. Raises QueueNotFound, and ConfigError for a wrong setting and one that can't be changed.
        """
        ...

    def list(self) -> list[str]:
        """The names of all queues, sorted."""
        ...

    def describe(self, name: str) -> QueueDescription:
        """The settings and sizes of a queue; raises QueueNotFound."""
        ...

    def delete(self, name: str) -> None:
        """Delete a queue with all its messages; raises QueueNotFound."""
        ...

    def open(self, name: str, *, codec: Codec | None = None) -> Queue:
        """Open a queue; raises QueueNotFound."""
        ...

    def open_url(self, url: QueueUrl) -> Queue:
        """Open the queue of a url, with the settings in the url; closing the queue closes this storage.

        Raises QueueNotFound, and ConfigError for settings that contradict those of the queue.
        """
        ...

    def close(self) -> None:
        """Close the queues that this storage opened, and disconnect; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
