"""Makes clients of librdkafka, retries their requests, and turns their errors into kmqpy's own."""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmqpy.core.backoff import Backoff
from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.core.first_contact import Service, note_answer, patience_s
from kmqpy.core.forks import keep_in_children
from kmqpy.core.poll_turns import PollTurns
from kmqpy.core.throttle import Throttle
from kmqpy.errors import (
    AccessDenied,
    ConfigError,
    KmqError,
    MessageError,
    TopicError,
    Unavailable,
    UnknownOutcome,
)
from kmqpy.kafka.collectable_admin import CollectableAdminClient, free_dropped
from kmqpy.kafka.settings import KafkaConnection, KafkaSettings

T = TypeVar("T")

_log = logging.getLogger("kmqpy.librdkafka")

_LOG_EVERY_S = 30.0
"""Seconds in which log lines of one kind are logged once."""


class _ThrottleFilter(logging.Filter):
    """Passes each kind of librdkafka's log lines once in 30 s; librdkafka repeats some 20 times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._throttle = Throttle(_LOG_EVERY_S)

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the line is to be logged. Its first word, FAIL for example, is its kind."""
        kind = record.getMessage().partition(" ")[0]
        if kind == "GETPID":  # normal while a broker starts; if it does not end, calls fail and say so
            return _log.isEnabledFor(logging.DEBUG)
        return self._throttle.allows(kind)


_log.addFilter(_ThrottleFilter())

_METADATA_TIMEOUT_S = 2.0
"""Seconds that refresh_partition() waits for the partitions of a topic."""
_AWAY_AFTER_S = 1.5
"""A Kafka that has said nothing for so many seconds is away, see answers()."""
_ONE_LOOK_S = 0.5
"""Seconds that has_no_topic() waits for an answer; its caller has waited for long already."""
_FIRST_TRY_S = 2.0
"""Time limit of the first try of a request; each later try may take twice as long as the try before."""
_MIN_TRY_S = 0.1
"""Least time limit of a try, even if the time for the request is over."""
_MAX_FLUSH_S = 0.1
"""Time limit of one call of confluent-kafka's flush(). Producer.flush() repeats it."""
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

_LOOK_UP_TRY_S = 1.0
"""The longest time limit of one look_up(), in seconds."""

_REFUSED_FOR_S = 1.0
"""Seconds of refusals after which a request fails with AccessDenied; another broker may accept us before."""

GROUP_REQUEST_S = 60.0
"""The time limit of administrative requests to a group's coordinator, however soon their answer is wanted.

librdkafka aborts the process when such a request is answered after its time limit (its issue 4605).
"""

_WRONG_LISTENER_TEXT = "listener?"
"""Part of librdkafka's message when only it uses TLS. If only the broker does, there is no message."""
_WRONG_LISTENER_FOR_S = 3.0
"""Seconds of this message after which a request fails with Unavailable. A proxy whose broker is just starting
causes the same message for a moment."""

_MAX_RESPONSE_BYTES = 2**31 - 1
"""The most bytes of a decompressed batch of records. With librdkafka's default (100 MB), a zstd record of
5 kB could make itself and all records after it unreadable."""

REPEATED_END_S = 0.75
"""A commit or abort that lasts this many seconds may have sent its request EndTxn twice, a shorter one not.

When a connection breaks, or an answer does not come, librdkafka sends EndTxn again and tells nobody. It waits
for `retry.backoff.ms` first, up to 20 % less (see `_TRANSACTION_SETTINGS`)."""
_TRANSACTION_SETTINGS: KafkaSettings = {"retry.backoff.ms": 1_000, "retry.backoff.max.ms": 1_000}
"""Settings of transactional producers, even if the user has set others: REPEATED_END_S depends on them."""

_POLL_S = 0.05
_PRODUCER_CONNECT_S = 0.05
"""Seconds in which a new producer may connect to a broker before it is used."""


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


class Producer(confluent_kafka.Producer):
    """A producer that can be weakly referenced; see `keep_in_children`.

    A fatal error ends a producer for good, for example when a broker has lost records that it had confirmed.
    poll() and flush() raise no fatal error: confluent-kafka would raise it once, to whoever happens to call.
    All records that are not written are reported as failed, and produce() takes no more.

    poll() must wait for less than 0.2 s: in longer calls, confluent-kafka calls callbacks after the fatal
    error, too, which makes it a SystemError.

    fatal_error    the error that has ended this producer, once poll() or flush() has met it
    may_end_again  True: Kafka may get the request that has ended a transaction of this producer once more,
                   and would end the next transaction by it (rule R36 of docs/rules.md)
    turns          for threads that wait for delivery reports: which of them polls
    """

    fatal_error: KafkaError | None = None
    may_end_again = False

    def __init__(self, *settings: Any, **more: Any) -> None:
        super().__init__(*settings, **more)
        self.turns = PollTurns()

    def poll(self, timeout: float = -1) -> int:
        """Call the callbacks of delivery reports, waiting at most `timeout` seconds for the first."""
        try:
            return super().poll(timeout)
        except KafkaException as exception:
            self._note_fatal(exception)
            return 0

    def flush(self, timeout: float = -1) -> int:
        """Wait at most `timeout` seconds until all records are reported; returns how many are not."""
        deadline = SYSTEM_CLOCK.monotonic() + (timeout if timeout >= 0 else math.inf)
        while True:
            left_s = max(0.0, deadline - SYSTEM_CLOCK.monotonic())
            try:
                unreported = super().flush(min(left_s, _MAX_FLUSH_S))  # a short one, as in poll()
            except KafkaException as exception:
                self._note_fatal(exception)
                unreported = len(self)
            if not unreported or left_s <= 0:
                return unreported

    def _note_fatal(self, exception: KafkaException) -> None:
        error = error_of(exception)
        if not is_fatal(error):
            raise exception
        self.fatal_error = error


class Consumer(confluent_kafka.Consumer):
    """A consumer that can be weakly referenced; see `keep_in_children`.

    credentials  SASL's user name and password with which it was made, or empty texts
    """

    credentials = ("", "")

    def resume(self, partitions: list[TopicPartition]) -> None:
        """Resume paused partitions, and let librdkafka fetch from them at once, not up to a second later.

        librdkafka's broker threads look at their partitions once a second, or when they are woken. Setting
        the credentials again wakes them. So would a request; but a request waits for the answer to the last
        fetch, and librdkafka closes the connection if that takes longer than the request's time limit.
        """
        super().resume(partitions)
        self.set_sasl_credentials(*self.credentials)


def new_producer(connection: KafkaConnection, defaults: KafkaSettings, *, connects: bool = False) -> Producer:
    """Make a producer whose records all in-sync replicas acknowledge, and which never reorders records.

    With `connects`, and if it is transactional, it has 50 ms to connect to a broker before it is used.
    """
    common = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}
    transactional = "transactional.id" in defaults
    with _settings_errors(connection):
        settings = _settings(connection, {**common, **defaults})
        made = Producer({**settings, **(_TRANSACTION_SETTINGS if transactional else {})}, logger=_log)
    keep_in_children(made)
    if connects or transactional:
        # Without a connection, librdkafka asks for the producer's id, or the coordinator, only 500 ms later.
        made.poll(_PRODUCER_CONNECT_S)
    return made


def new_consumer(connection: KafkaConnection, defaults: KafkaSettings) -> Consumer:
    """Make a consumer that sees committed records only, unless `defaults` say otherwise."""
    common = {
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
        # Else bits that have flipped on a broker's disk reach the caller, or nothing behind them does.
        "check.crcs": True,
        "fetch.queue.backoff.ms": 5,
        "receive.message.max.bytes": _MAX_RESPONSE_BYTES,
        "group.id": "kmq-none",
    }
    with _settings_errors(connection):
        settings = _settings(connection, {**common, **defaults})
        made = Consumer(settings, logger=_log)
    made.credentials = (str(settings.get("sasl.username", "")), str(settings.get("sasl.password", "")))
    keep_in_children(made)
    return made


def new_admin(connection: KafkaConnection) -> AdminClient:
    """Make an administration client, and free those that could not be freed where they were dropped."""
    free_dropped()
    with _settings_errors(connection):
        made = CollectableAdminClient(_settings(connection, {}), logger=_log)
    keep_in_children(made)
    return made


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
                _check_access(connection, started)
                if not (is_retriable(error_of(exception)) or also(exception)):
                    raise
                failure = exception
            else:
                note_answer(Service.KAFKA)
                return answer
        raise failure
    finally:
        del failure  # its traceback refers to this frame, after an answer, too


def wait_result(
    client: AdminClient, future: Future[Any], timeout_s: float, connection: KafkaConnection
) -> Any:
    """The result of `future` of `client`, or its exception; raises a KafkaException after `timeout_s`.

    Meanwhile librdkafka tries again and again. Raises AccessDenied if Kafka has refused us for a second, and
    Unavailable if only we use TLS.
    """
    started = SYSTEM_CLOCK.monotonic()
    try:
        while True:
            client.poll(0)  # runs the error callback of _settings
            try:
                return future.result(_POLL_S)
            except TimeoutError:
                _check_access(connection, started)
            except KafkaException as exception:
                exception.__traceback__ = None  # confluent-kafka's refers to the futures
                raise
            if SYSTEM_CLOCK.monotonic() - started > timeout_s:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    finally:
        del future  # holds the exception, whose traceback refers to this frame


def metadata(client: AdminClient, timeout_s: float, connection: KafkaConnection) -> Any:
    """The brokers and topics of the cluster; raises as `retrying` does."""
    return retrying(lambda try_s: look_up(client, try_s), timeout_s, connection)


def look_up(client: AdminClient, try_s: float) -> Any:
    """Like metadata(), but tries once, for `try_s` seconds or one second at most; raises KafkaException."""
    try:
        return client.list_topics(timeout=min(try_s, _LOOK_UP_TRY_S))
    except KafkaException:
        client.poll(_POLL_S)  # serves the error callback of _settings
        raise


def refresh_partition(
    client: confluent_kafka.Producer | confluent_kafka.Consumer,
    topic: str,
    partition: int,
    exception: KafkaException,
) -> bool:
    """Return True if a call failed with `exception` only because the partition is new to the client.

    Then the caller repeats the call. A client looks for new partitions of a known topic only every five
    minutes; refresh_partition() makes it look now.
    """
    error = error_of(exception)
    if error is None or error.code() != KafkaError._UNKNOWN_PARTITION:
        return False
    try:
        return partition in client.list_topics(topic, _METADATA_TIMEOUT_S).topics[topic].partitions
    except KafkaException:
        return False


def has_no_topic(client: confluent_kafka.Producer | confluent_kafka.Consumer, topic: str) -> bool:
    """True if Kafka says that there is no such topic; False if there is one, or if Kafka says nothing."""
    try:
        return is_unknown_topic(client.list_topics(topic, _ONE_LOOK_S).topics[topic].error)
    except KafkaException as exception:
        return is_unknown_topic(error_of(exception))


def answers(
    client: confluent_kafka.Producer | confluent_kafka.Consumer, topic: str, silent_s: float = 0.0
) -> bool:
    """False if Kafka is away: it says nothing to a simple question within 1.5 s, less those it was silent."""
    try:
        client.list_topics(topic, _AWAY_AFTER_S - silent_s)
    except KafkaException as exception:
        error = error_of(exception)
        return error is None or error.code() not in _NOT_ANSWERING
    return True


def watermarks(
    client: confluent_kafka.Consumer, topic: str, partition: int, timeout_s: float
) -> tuple[int, int]:
    """First offset and last stable offset of a partition, asked of Kafka; raises KafkaException."""
    offsets = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
    if offsets is None:  # what librdkafka's binding gives for a time-out
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return offsets


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


@contextmanager
def kafka_errors(doing: str, connection: KafkaConnection) -> Iterator[None]:
    """Raise a KafkaException of the block as the error that translated() makes of it."""
    try:
        yield
    except KafkaException as exception:
        raise translated(error_of(exception), doing, connection) from exception


def _settings(connection: KafkaConnection, defaults: KafkaSettings) -> dict[str, Any]:
    """Settings of a client whose poll() notes refusals, TLS errors and names that can't be resolved."""
    key = connection_key(connection)

    def note_error(error: KafkaError) -> None:
        now, before = SYSTEM_CLOCK.monotonic(), _last_reported(key)
        if before is not None and before.error.code() == KafkaError._RESOLVE:
            before = None  # no part of a series of refusals
        if _is_refusal(error) or "SSL" in error.str():
            _reported_errors[key] = _ReportedError(error, before.first if before else now, now)
        elif error.code() == KafkaError._RESOLVE and before is None:  # a refusal says more
            _reported_errors[key] = _ReportedError(error, now, now)

    common: dict[str, Any] = {
        "error_cb": note_error,
        # Load balancers and firewalls forget idle connections without a word.
        "socket.keepalive.enable": True,
        # Librdkafka begins no second connection within half of this time, and a new client needs two: to the
        # address that it was given, then to the broker that this one names.
        "reconnect.backoff.ms": 20,
    }
    return connection.kafka_settings({**common, **defaults})


def connection_key(connection: KafkaConnection) -> tuple[str, int]:
    """A key that tells the clients of one connection from those of another."""
    return connection.bootstrap, hash(repr(sorted(connection.kafka.items())))


def _last_reported(key: tuple[str, int]) -> _ReportedError | None:
    reported = _reported_errors.get(key)
    return reported if reported and SYSTEM_CLOCK.monotonic() - reported.last < _REPORT_VALID_S else None


def _is_refusal(error: KafkaError) -> bool:
    """Return True if a broker refuses us; False for a mere disconnect, as by a broker that is stopping."""
    text = error.str()
    told = error.code() in _NOT_AUTHENTICATED or error.code() == KafkaError._SSL or "SSL alert" in text
    return told and "disconnect" not in text.lower()


def _check_access(connection: KafkaConnection, started: float) -> None:
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


@contextmanager
def _settings_errors(connection: KafkaConnection) -> Iterator[None]:
    try:
        yield
    except (KafkaException, TypeError, ValueError) as exception:
        error = error_of(exception)
        for name, value in connection.kafka.items():
            if name.endswith(".location") and value != "probe" and not Path(str(value)).exists():
                raise ConfigError(f"Kafka settings: {name}: there is no {str(value)!r}") from None
        text = error.str() if error else str(exception)
        advice = "; names are those of librdkafka, like fetch.min.bytes" if "No such conf" in text else ""
        raise ConfigError(f"Kafka settings: {text}{advice}") from None
