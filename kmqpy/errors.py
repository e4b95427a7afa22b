"""Every error that kmqpy raises on purpose.

KmqError
├── ConfigError          a setting or argument is wrong; names the field and the value
├── DecodeError          bytes that are not what they should be; carries them
│   └── UnsupportedMarker    a marker of a newer kmqpy
├── ReceiptError         not a receipt, or one of another queue
├── TopicError           a topic is missing, or is not as kmqpy needs it
│   └── QueueNotFound        no such queue
├── MessageError         a message can't be sent as it is (too large, delay too long)
├── Unavailable          Kafka or ZooKeeper did not answer in time
│   ├── AccessDenied         they do not accept who we are, or what we want
│   ├── SessionExpired       the ZooKeeper session ended, and its locks with it
│   └── UnknownOutcome       the answer was lost; it may have happened or not
├── Unfinished           stopped halfway; says how far it got
├── RolledBack           a transaction was not committed; nothing of it happened
├── Closed               used after its close()
├── Fenced               the consumer group goes on without this client, for good
├── Forked               used in a process that was forked after it was made
├── NotSupported         this storage has no such operation
├── MissingExtra         an optional dependency is not installed
└── ClusterError         the embedded cluster could not be set up
"""

from __future__ import annotations

_SHOWN_CHARS = 80


def shown(value: object) -> str:
    """A value as an error shows it: its repr, cut where it is long; never raises."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4,300 digits, for one
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


class KmqError(Exception):
    """The base of all errors of kmqpy."""


class ConfigError(KmqError):
    """A setting or argument is wrong."""


class DecodeError(KmqError):
    """Bytes that are not what they should be.

    `data` holds them, so that a handler can keep what could not be read; they are not part of the
    message, because a message ends up in logs.
    """

    def __init__(self, message: str, data: bytes | None = None) -> None:
        super().__init__(message)
        self.data = data


class UnsupportedMarker(DecodeError):
    """A marker with a valid key and a type byte reserved for newer versions of kmqpy."""


class ReceiptError(KmqError):
    """Not a receipt, or one of another queue or of a topic that was recreated."""


class TopicError(KmqError):
    """A topic is missing or is not as kmqpy needs it."""


class QueueNotFound(TopicError):
    """There is no such queue."""


class MessageError(KmqError):
    """A message can't be sent as it is."""


class Unavailable(KmqError):
    """Kafka or ZooKeeper did not answer in time, or refused."""


class AccessDenied(Unavailable):
    """Kafka or ZooKeeper does not accept our password or certificate, or we may not do this."""


class SessionExpired(Unavailable):
    """The ZooKeeper session ended, and with it all locks it had; others may have taken the items."""


class UnknownOutcome(Unavailable):
    """The answer was lost, and asking for the outcome failed as well: it may have happened or not."""


class RolledBack(KmqError):
    """A transaction was not committed; nothing of it happened."""


class Unfinished(KmqError):
    """Stopped halfway; run again, it goes on with the rest.

    `done` is how much of it is certain.
    """

    def __init__(self, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.done = done


class Closed(KmqError):
    """Used after its close()."""


class Fenced(KmqError):
    """The consumer group goes on without this client, for good; another has its instance_id, for example."""


class Forked(KmqError):
    """Used in a process that was forked after it was made; make it after the fork."""


class NotSupported(KmqError):
    """This storage has no such operation."""


class ClusterError(KmqError):
    """The embedded cluster could not be set up or started."""


class MissingExtra(KmqError):
    """An optional dependency is not installed."""

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(
            f'{what} needs an extra; run: pip install "kmqpy[{extra}]" (in a clone: ".[{extra}]")'
        )
