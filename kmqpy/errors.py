"""The errors that kmqpy raises.

KmqError
├── ConfigError          a setting or argument is wrong; the text names the setting and shows the value
├── DecodeError          bytes can't be decoded; the error holds the bytes
│   └── UnsupportedMarker    a newer version of kmqpy wrote the marker
├── ReceiptError         a receipt is invalid, or belongs to another queue
├── TopicError           a topic is missing, or its settings do not suit kmqpy
│   └── QueueNotFound        the queue does not exist
├── MessageError         a message can't be sent (too large, delay too long)
├── Unavailable          a server did not answer in time, or refused
│   ├── AccessDenied         a server rejects the credentials, or does not permit the operation
│   ├── SessionExpired       the ZooKeeper session ended, and with it the session's locks
│   └── UnknownOutcome       the answer was lost; the operation may have happened or not
├── Unfinished           an operation stopped halfway; `done` says how far it got
├── RolledBack           a transaction was not committed; none of its operations happened
├── Closed               an object was used after its close()
├── Fenced               the consumer group does not take this client back
├── Forked               an object was used in a process that was forked after the object was made
├── NotSupported         the storage does not have the operation
├── MissingExtra         an optional dependency is not installed
└── ClusterError         the embedded cluster could not be set up
"""

from __future__ import annotations

_MAX_SHOWN_CHARS = 80
"""The most characters of a value's repr that an error shows; the end of a longer repr becomes `...`."""


def shown(value: object) -> str:
    """The repr of a value, for the text of an error; cut after _MAX_SHOWN_CHARS characters. Never raises."""
    try:
        text = repr(value)
    except Exception:  # an int of more than 4,300 digits, for one
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= _MAX_SHOWN_CHARS else text[: _MAX_SHOWN_CHARS - 3] + "..."


class KmqError(Exception):
    """The base class of all errors of kmqpy."""


class ConfigError(KmqError):
    """A setting or argument is wrong."""


class DecodeError(KmqError):
    """Bytes can't be decoded.

    `data` holds the bytes, so that a handler can keep them. The text of the error does not show the bytes,
    because errors are logged.
    """

    def __init__(self, message: str, data: bytes | None = None) -> None:
        super().__init__(message)
        self.data = data


class UnsupportedMarker(DecodeError):
    """A newer version of kmqpy wrote this marker: this version does not know its type byte or operation."""


class ReceiptError(KmqError):
    """A receipt is invalid, or belongs to another queue, or to a topic or queue that was recreated since."""


class TopicError(KmqError):
    """A topic is missing, or its settings or partitions do not suit kmqpy."""


class QueueNotFound(TopicError):
    """The queue does not exist."""


class MessageError(KmqError):
    """A message can't be sent: its body, key, headers, delay or priority is wrong or too large."""


class Unavailable(KmqError):
    """A server (Kafka, ZooKeeper, another storage) did not answer in time, or refused."""


class AccessDenied(Unavailable):
    """A server rejects the password or certificate, or does not permit the operation."""


class SessionExpired(Unavailable):
    """The ZooKeeper session ended, and with it all its locks; other consumers may have taken the items."""


class UnknownOutcome(Unavailable):
    """The answer was lost, and the outcome can't be learned: the operation may have happened or not."""


class RolledBack(KmqError):
    """A transaction was not committed; none of its operations happened."""


class Unfinished(KmqError):
    """An operation stopped halfway; the text says why, and what to do about the rest.

    `done` is the number of items that are certainly done, for example messages that were sent.
    """

    def __init__(self, message: str, done: int = 0) -> None:
        super().__init__(message)
        self.done = done


class Closed(KmqError):
    """An object was used after its close()."""


class Fenced(KmqError):
    """The consumer group does not take this client back, for example because another has its instance_id."""


class Forked(KmqError):
    """An object was used in a process that was forked after the object was made; make it after the fork."""


class NotSupported(KmqError):
    """The storage does not have the operation or the setting."""


class ClusterError(KmqError):
    """The embedded cluster could not be set up or started."""


class MissingExtra(KmqError):
    """An optional dependency is not installed: `what` needs the `extra`, and the text says how to get it."""

    def __init__(self, extra: str, what: str) -> None:
        super().__init__(extra, what)  # what pickle calls the class with

    def __str__(self) -> str:
        extra, what = self.args
        return f'{what} needs an extra; run: pip install "kmqpy[{extra}]" (in a clone: ".[{extra}]")'
