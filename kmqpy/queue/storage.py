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
        """The body for an object.

        Args:
            value: What send() was given as body.

        Returns:
            The body.

        Raises:
            MessageError: The codec can't encode the object.
        """
        ...

    def decode(self, body: bytes) -> Any:
        """The object of a body.

        Args:
            body: The body of a message.

        Returns:
            The object.

        Raises:
            DecodeError: The codec can't decode the body; the error holds it.
        """
        ...


def encode_body(codec: Codec, value: Any) -> bytes:
    """The body that `codec` makes of an object; turns any error that is no KmqError into MessageError."""
    try:
        body = codec.encode(value)
    except KmqError:
        raise
    except Exception as error:  # neither its text nor, in a log, its traceback: they may hold the value
        kind = type(value).__name__
        raise MessageError(f"body: the codec can't encode {kind}: {type(error).__name__}") from None
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

    Attributes:
        name: The queue's name.
        generation: Distinguishes the queue from earlier and later queues of the same name.
        settings: Values of the settings, by name.
        ready: Messages that can be taken.
        delayed: Messages whose delay is not over.
        in_flight: Messages that are taken and not finished.
        dead: Dead letters.
        held_groups: Groups that wait for their dead letters (on_dead_letter="hold").
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

        Args:
            name: The queue's name.
            settings: Fields of QueuePolicy, and those that docs/storages.md lists.

        Raises:
            ConfigError: For a wrong or unknown setting, and for a name that is in use.
            NotSupported: For a setting that this storage can't do.
        """
        ...

    def alter(self, name: str, **changes: Any) -> None:
        """Change settings of a queue: max_redeliveries, lease_ms, max_delay_ms, max_lease_ms.

        Storages with the capability change retry_delays, retry_max_ms, retry_jitter, dedup_window_ms,
        fair, fair_by and max_in_flight_per_group; those other than Kafka also `notes`, and they take
        functions of present values for values.

        Queues that are open keep the settings with which they were opened, except where the storage itself
        applies them.

        Args:
            name: The queue's name.
            changes: New values of settings, by name.

        Raises:
            QueueNotFound: There is no such queue.
            ConfigError: For a wrong setting and one that can't be changed.
        """
        ...

    def list(self) -> list[str]:
        """The names of all queues, sorted."""
        ...

    def describe(self, name: str) -> QueueDescription:
        """The settings and sizes of a queue.

        Args:
            name: The queue's name.

        Raises:
            QueueNotFound: There is no such queue.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a queue with all its messages.

        Args:
            name: The queue's name.

        Raises:
            QueueNotFound: There is no such queue.
        """
        ...

    def open(self, name: str, *, codec: Codec | None = None) -> Queue:
        """Open a queue.

        Args:
            name: The queue's name.
            codec: Turns objects into bodies and back; default: bodies are bytes or text.

        Raises:
            QueueNotFound: There is no such queue.
        """
        ...

    def open_url(self, url: QueueUrl) -> Queue:
        """Open the queue of a url, with the settings in the url; closing the queue closes this storage.

        Args:
            url: What parse_url() returned, with the name of a queue.

        Raises:
            QueueNotFound: There is no such queue.
            ConfigError: For settings that contradict those of the queue.
        """
        ...

    def close(self) -> None:
        """Close the queues that this storage opened, and disconnect; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
