"""The `Storage` protocol: what has queues, and shares one pool of connections among them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

from kmqpy.errors import KmqError, MessageError
from kmqpy.queue.capabilities import Capabilities
from kmqpy.queue.protocol import Queue
from kmqpy.queue.url import QueueUrl
from kmqpy.queue_policy import QueuePolicy

QUEUE_SETTINGS = frozenset(
    {
        *(field.name for field in dataclasses.fields(QueuePolicy)),
        *("requeue_to", "order", "redelivery", "ephemeral", "create"),
    }
)
"""Settings of a queue in a url, of any storage, beside the name; the url of a storage refuses them."""


class Codec(Protocol):
    """Turns objects into bodies and back."""

    def encode(self, value: Any) -> bytes:
        """The body for an object; raises MessageError for one that it has no form for."""
        ...

    def decode(self, body: bytes) -> Any:
        """The reverse of encode(); raises DecodeError, which holds the body."""
        ...


def encode_body(codec: Codec, value: Any) -> bytes:
    """The body that `codec` makes of an object; raises MessageError, also for a faulty codec of a user."""
    try:
        body = codec.encode(value)
    except KmqError:
        raise
    except Exception as error:  # its text may hold the value
        kind = type(value).__name__
        raise MessageError(f"body: the codec can't encode {kind}: {type(error).__name__}") from error
    if not isinstance(body, bytes):
        raise MessageError(f"body: the codec made {type(body).__name__} of it, not bytes")
    return body


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueDescription:
    """A queue of a storage.

    generation  names the queue among all of the same name that were deleted and recreated
    settings    its settings by their names
    """

    name: str
    generation: str
    settings: Mapping[str, Any]
    ready: int
    delayed: int
    in_flight: int
    dead: int


class Storage(Protocol):
    """Has queues, which share its connections and threads; safe to use from any thread.

    Every call may raise Unavailable when the storage does not answer, and Closed after close().
    """

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the storage."""
        ...

    def create(self, name: str, **settings: Any) -> None:
        """Make a queue.

        Raises ConfigError for a setting that is wrong or unknown, or a name that is taken, NotSupported for
        a setting that this storage can't do.
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
        """Open the queue that a url names, with the settings in it; closing it closes this storage.

        Raises QueueNotFound, and ConfigError for settings that contradict the queue's own.
        """
        ...

    def close(self) -> None:
        """Close the queues that were opened here and leave; a second close does nothing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
