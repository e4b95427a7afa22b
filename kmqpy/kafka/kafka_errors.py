"""What failures of Kafka mean: whether to try again, and which error of kmqpy tells the user of it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.first_contact import Service, note_answer, patience_s
from kmqpy.errors import (
    AccessDenied,
    KmqError,
    MessageError,
    TopicError,
    Unavailable,
    UnknownOutcome,
)
from kmqpy.kafka.settings import KafkaConnection

T = TypeVar("T")

_FIRST_TRY_S = 2.0
"""Time limit of the first try of a request; each later try may take twice as long as the try before."""
_MIN_TRY_S = 0.1
"""Least time limit of a try, even if the time for the request is over."""
_RETRY_PAUSE = Backoff(0.02, 2, 1, 0.2)
"""Computes the pauses between the tries of a request."""

_NOT_ANSWERING = {
    KafkaError._TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.REQUEST_TIMED_OUT,
}
"""Errors that kmqpy reports as: Kafka does not answer."""
_RETRIABLE = _NOT_ANSWERING | {
    KafkaError._WAIT_COORD,
    KafkaError._WAIT_CACHE,
    KafkaError._DESTROY_BROKER,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.NOT_CONTROLLER,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LISTENER_NOT_FOUND,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.UNSTABLE_OFFSET_COMMIT,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}
"""Errors that Kafka calls retriable, and librdkafka's own transient ones; not those of unknown topics."""
_NOT_AUTHENTICATED = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_TOPIC_UNKNOWN = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_DAMAGED = {KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION}
"""Errors of a batch of records that is damaged on a broker's disk."""
_UNKNOWN_FORMAT = "MagicByte"
"""Part of librdkafka's message when the damage is in the byte that names the batch's format."""
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}
_PRODUCER_ENDED = {
    KafkaError._FATAL,
    KafkaError._FENCED,
    KafkaError._PURGE_QUEUE,
    KafkaError.DUPLICATE_SEQUENCE_NUMBER,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.INVALID_PRODUCER_ID_MAPPING,
    KafkaError.INVALID_TXN_STATE,
    KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
    KafkaError.UNKNOWN_PRODUCER_ID,
}
"""Errors that end a producer, or of records that an ended producer has dropped."""

_REPORT_VALID_S = 30.0
"""Seconds for which an error that a connection has reported counts as the cause of later failures."""

_ADDRESS_OR_DURATION = re.compile(r"^(\w+://)?\S+/\w+: | \(after \d+ms in state \w+\)$")

_REFUSED_FOR_S = 1.0
"""Seconds of refusals after which a request fails with AccessDenied; another broker may accept us before."""

_WRONG_LISTENER_TEXT = "listener?"
"""Part of librdkafka's message when only it uses TLS. If only the broker does, there is no message."""
_WRONG_LISTENER_FOR_S = 3.0
"""Seconds of this message after which a request fails with Unavailable. A proxy whose broker is just starting
causes the same message for a moment."""


@dataclass(frozen=True, slots=True)
class _ReportedError:
    """The last error that connections reported, and when; the calls of their clients only time out.

    first, last  when the series of errors began, and when `error` was reported (monotonic)
    """

    error: KafkaError
    first: float
    last: float


_reported_errors: dict[tuple[str, int], _ReportedError] = {}
"""By connection_key()."""


def is_retriable(error: KafkaError | None) -> bool:
    """Return True if a request that failed with this error may succeed when it is tried again.

    An unknown topic is not retriable here: only the caller knows if the topic has just been created.
    """
    return error is not None and (error.retriable() or error.code() in _RETRIABLE)


def is_fatal(error: KafkaError | None) -> bool:
    """Return True if the producer or consumer that reported the error can do nothing any more."""
    return error is not None and (error.fatal() or error.code() == KafkaError._FATAL)


def is_damage(error: KafkaError | None) -> bool:
    """Return True if a consumer has met a batch of records that is damaged on a broker's disk.

    librdkafka goes on at a wrong offset then: its consumer must seek, or be closed, and what it has of this
    partition behind the error must be dropped.
    """
    return error is not None and (error.code() in _DAMAGED or _UNKNOWN_FORMAT in error.str())


def is_unknown_topic(error: KafkaError | None) -> bool:
    """Return True for the errors of an unknown topic or partition."""
    return error is not None and error.code() in _TOPIC_UNKNOWN


def is_silence(error: KafkaError | None) -> bool:
    """Return True for the errors that kmqpy reports as: Kafka does not answer."""
    return error is not None and error.code() in _NOT_ANSWERING


def tries(timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> Iterator[float]:
    """Yield the time limit of each try, in seconds; sleep longer after each try, up to a second.

    There is at least one try. The last try begins no later than `timeout_s` seconds from now.
    """
    deadline = clock.monotonic() + timeout_s
    for number in itertools.count(1):
        left_s = deadline - clock.monotonic()
        yield max(_MIN_TRY_S, min(left_s, _FIRST_TRY_S * 2 ** min(number - 1, 8)))
        left_s = deadline - clock.monotonic()
        if left_s <= 0:
            return
        clock.sleep(min(left_s, _RETRY_PAUSE.delay(number)))


def retrying(
    call: Callable[[float], T],
    timeout_s: float,
    connection: KafkaConnection,
    *,
    also: Callable[[KafkaException], bool] = lambda _: False,
    clock: Clock = SYSTEM_CLOCK,
) -> T:
    """Call `call` until it succeeds, as long as its errors are retriable or `also` says that they are.

    The argument of `call` is the time limit of one try in seconds. Raises the KafkaException of `call` if the
    error is not retriable, or when `timeout_s` (or the shorter limit of first_contact_within()) is over.
    Raises AccessDenied if Kafka has refused us for a second, and Unavailable if only we use TLS.
    """
    started = SYSTEM_CLOCK.monotonic()
    failure = KafkaException(KafkaError(KafkaError._TIMED_OUT))
    try:
        for try_s in tries(patience_s(Service.KAFKA, timeout_s), clock):
            try:
                answer = call(try_s)
            except KafkaException as exception:
                check_access(connection, started)
                if not (is_retriable(error_of(exception)) or also(exception)):
                    raise
                failure = exception
            else:
                note_answer(Service.KAFKA)
                return answer
        raise failure
    finally:
        del failure  # its traceback refers to this frame, after an answer, too


def error_of(exception: BaseException) -> KafkaError | None:
    """The KafkaError in `exception`; None if `exception` is no KafkaException with one."""
    if isinstance(exception, KafkaException) and exception.args:
        error = exception.args[0]
        if isinstance(error, KafkaError):
            return error
    return None


def error_name(exception: KafkaException) -> str:
    """Kafka's name of the error in an exception, or the text, which says what is damaged."""
    error = error_of(exception)
    if error is None:
        return str(exception)
    return error.str() if is_damage(error) else error.name()


def translated(error: KafkaError | None, doing: str, connection: KafkaConnection) -> KmqError:
    """The error of kmqpy for `error`; its text says what was being done (`doing`) and what to do next."""
    text = error.str() if error is not None else "unknown error"
    if error is None:
        return KmqError(f"{doing}: {text}")
    code = error.code()
    reported = _last_reported(connection_key(connection))
    if code in _NOT_ANSWERING and reported is not None and _is_refusal(reported.error):
        error = reported.error
    if _is_refusal(error):
        return AccessDenied(_refused(doing, error, connection))
    if code in _NOT_ALLOWED:
        return AccessDenied(
            f"{doing}: Kafka at {connection.bootstrap} does not allow it ({text}); "
            "grant it, see docs/security.md"
        )
    if code in _NOT_ANSWERING:
        more = f"; {_text(reported.error)}" if reported is not None else ""
        return Unavailable(
            f"{doing}: Kafka at {connection.address} does not answer ({text}{more}); "
            "check the address, that it runs, and security.protocol"
        )
    if is_retriable(error):
        return Unavailable(f"{doing}: Kafka at {connection.bootstrap} can't do that yet ({text}); try again")
    if code in _TOPIC_UNKNOWN:
        return TopicError(f"{doing}: the topic does not exist; create it with: kmq queue create")
    if code in _TOO_LARGE:
        return MessageError(f"{doing}: the message is larger than the topic allows ({text})")
    if code in _PRODUCER_ENDED or error.fatal():
        return UnknownOutcome(
            f"{doing}: the producer has ended ({text}), for example because Kafka at {connection.bootstrap} "
            "has lost records that it had confirmed; it may be done or not; try again, a new producer is made"
        )
    if is_damage(error):
        return KmqError(f"{doing}: {text}; docs/operations.md says what to do about damaged logs")
    return KmqError(f"{doing}: {text}")


class translating:  # noqa: N801 # it reads as a function
    """Raise a KafkaException of the block as what translated() makes of it.

    Not by a generator: with Python 3.12 the exception would refer to itself, and keep clients until a garbage
    collection, perhaps in a thread of librdkafka.
    """

    def __init__(self, doing: str, connection: KafkaConnection) -> None:
        self._doing = doing
        self._connection = connection

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KafkaException):
            raise translated(error_of(error), self._doing, self._connection) from error


def connection_key(connection: KafkaConnection) -> tuple[str, int]:
    """A key that tells the clients of one connection from those of another."""
    return connection.bootstrap, hash(repr(sorted(connection.kafka.items())))


def note_reported(key: tuple[str, int], error: KafkaError) -> None:
    """Remember what connections report if it explains failures: refusals, TLS errors, unresolved names."""
    now, before = SYSTEM_CLOCK.monotonic(), _last_reported(key)
    if before is not None and before.error.code() == KafkaError._RESOLVE:
        before = None  # no part of a series of refusals
    if _is_refusal(error) or "SSL" in error.str():
        _reported_errors[key] = _ReportedError(error, before.first if before else now, now)
    elif error.code() == KafkaError._RESOLVE and before is None:  # a refusal says more
        _reported_errors[key] = _ReportedError(error, now, now)


def _last_reported(key: tuple[str, int]) -> _ReportedError | None:
    reported = _reported_errors.get(key)
    return reported if reported and SYSTEM_CLOCK.monotonic() - reported.last < _REPORT_VALID_S else None


def _is_refusal(error: KafkaError) -> bool:
    """Return True if a broker refuses us; False for a mere disconnect, as by a broker that is stopping."""
    text = error.str()
    told = error.code() in _NOT_AUTHENTICATED or error.code() == KafkaError._SSL or "SSL alert" in text
    return told and "disconnect" not in text.lower()


def check_access(connection: KafkaConnection, started: float) -> None:
    """Raise AccessDenied if connections have reported refusals since `started`, for more than a second.

    Raises Unavailable if they have reported for 3 s that only we use TLS.
    """
    reported = _last_reported(connection_key(connection))
    if reported is None or reported.last < started:
        return
    lasts_s = SYSTEM_CLOCK.monotonic() - max(started, reported.first)
    if _is_refusal(reported.error):
        if lasts_s > _REFUSED_FOR_S:
            raise AccessDenied(_refused("connect", reported.error, connection))
    elif _WRONG_LISTENER_TEXT in reported.error.str() and lasts_s > _WRONG_LISTENER_FOR_S:
        raise translated(KafkaError(KafkaError._TRANSPORT), "connect", connection)


def _refused(doing: str, error: KafkaError, connection: KafkaConnection) -> str:
    check = "ssl.ca.location, ssl.certificate.location and ssl.key.location"
    if error.code() in _NOT_AUTHENTICATED:
        check = "sasl.mechanism, sasl.username and sasl.password"
    at = f"Kafka at {connection.bootstrap}"
    return f"{doing}: {at} and we do not accept each other ({_text(error)}); check {check}"


def _text(error: KafkaError) -> str:
    """Return the error's text without the broker's address and the duration."""
    return _ADDRESS_OR_DURATION.sub("", error.str())
