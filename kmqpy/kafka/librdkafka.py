"""Makes clients of librdkafka, and asks them what Kafka knows; `kafka_errors` says why they fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.forks import keep_in_children
from kmqpy.core.poll_turns import PollTurns
from kmqpy.core.throttle import Throttle
from kmqpy.errors import ConfigError
from kmqpy.kafka.collectable_admin import CollectableAdminClient, free_dropped
from kmqpy.kafka.kafka_errors import (
    check_access,
    connection_key,
    error_of,
    is_fatal,
    is_silence,
    is_unknown_topic,
    note_reported,
    retrying,
)
from kmqpy.kafka.settings import KafkaConnection, KafkaSettings

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
_MAX_FLUSH_S = 0.1
"""Time limit of one call of confluent-kafka's flush(). Producer.flush() repeats it."""

_LOOK_UP_TRY_S = 1.0
"""The longest time limit of one look_up(), in seconds."""

GROUP_REQUEST_S = 60.0
"""The time limit of administrative requests to a group's coordinator, however soon their answer is wanted.

librdkafka aborts the process when such a request is answered after its time limit (its issue 4605).
"""

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
                check_access(connection, started)
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
        return not is_silence(error_of(exception))
    return True


def watermarks(
    client: confluent_kafka.Consumer, topic: str, partition: int, timeout_s: float
) -> tuple[int, int]:
    """First offset and last stable offset of a partition, asked of Kafka; raises KafkaException."""
    offsets = client.get_watermark_offsets(TopicPartition(topic, partition), timeout=timeout_s)
    if offsets is None:  # what librdkafka's binding gives for a time-out
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
    return offsets


def _settings(connection: KafkaConnection, defaults: KafkaSettings) -> dict[str, Any]:
    """Settings of a client whose poll() notes refusals, TLS errors and names that can't be resolved."""
    common: dict[str, Any] = {
        "error_cb": partial(note_reported, connection_key(connection)),
        # Load balancers and firewalls forget idle connections without a word.
        "socket.keepalive.enable": True,
        # Librdkafka begins no second connection within half of this time, and a new client needs two: to the
        # address that it was given, then to the broker that this one names.
        "reconnect.backoff.ms": 20,
    }
    return connection.kafka_settings({**common, **defaults})


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
