"""What all our librdkafka clients share: settings, quiet logs, errors in our own words."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from kmqpy.clock import SYSTEM_CLOCK
from kmqpy.config import Connection, KafkaSettings
from kmqpy.errors import AccessDenied, ConfigError, KmqError, MessageError, TopicError, Unavailable

_log = logging.getLogger("kmqpy.librdkafka")

_REPEAT_S = 30.0


class _OnceInAWhile(logging.Filter):
    """Lets each kind of librdkafka's complaints through every 30 s; it tries 20 times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to show it. The kind is the first word, FAIL for example."""
        kind = record.getMessage().partition(" ")[0]
        if kind == "GETPID":  # of a broker that has just started; one that goes on like this fails a call
            return _log.isEnabledFor(logging.DEBUG)
        now = SYSTEM_CLOCK.monotonic()
        if now - self._shown.get(kind, -_REPEAT_S) < _REPEAT_S:
            return False
        self._shown[kind] = now
        return True


_log.addFilter(_OnceInAWhile())

REQUEST_TIMEOUT_S = 10.0
"""How long a request to Kafka may take before it counts as away."""

_LOOK_TIMEOUT_S = 2.0

_AWAY = {
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
_NOT_ACCEPTED = {KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED}
_NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
_NO_TOPIC = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
_TOO_LARGE = {KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE}

_HEARD_S = 30.0
"""How long a complaint of a connection explains what fails."""

_AROUND = re.compile(r"^\w+://\S+: | \(after \d+ms in state \w+\)$")

_GRACE_S = 1.0
"""Time for another broker to accept us after one did not."""

_WRONG_LISTENER = "listener?"
"""What librdkafka says of TLS where there is none; of the other way round it says nothing."""
_WRONG_LISTENER_S = 3.0
"""How long it must say nothing else: a proxy whose broker is just starting looks the same."""

_POLL_S = 0.05
_CONNECT_S = 0.05
"""In which librdkafka has a connection, if there is one to be had."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a connection complains of; librdkafka's calls only time out then."""

    error: KafkaError
    first: float
    last: float


_heard: dict[tuple[str, int], _Heard] = {}


def producer(connection: Connection, defaults: KafkaSettings) -> Producer:
    """A producer whose records are acknowledged by all in-sync replicas and never reordered."""
    common = {"enable.idempotence": True, "acks": "all", "partitioner": "murmur2_random"}
    with _settings_errors(connection):
        made = Producer(_settings(connection, {**common, **defaults}), logger=_log)
    if "transactional.id" in defaults:
        # init_transactions() looks for the coordinator at once and, without a connection yet, after 500 ms.
        made.poll(_CONNECT_S)
    return made


def consumer(connection: Connection, defaults: KafkaSettings) -> Consumer:
    """A consumer that sees committed records only, unless `defaults` say otherwise."""
    common = {
        "isolation.level": "read_committed",
        "enable.auto.commit": False,
        "auto.offset.reset": "earliest",
        "allow.auto.create.topics": False,
        "fetch.queue.backoff.ms": 5,
        "group.id": "kmq-none",
    }
    with _settings_errors(connection):
        return Consumer(_settings(connection, {**common, **defaults}), logger=_log)


def admin(connection: Connection) -> AdminClient:
    """An administration client."""
    with _settings_errors(connection):
        return AdminClient(_settings(connection, {}), logger=_log)


def result(client: AdminClient, future: Future[Any], timeout_s: float, connection: Connection) -> Any:
    """What `future` of `client` gives, or raises.

    Raises AccessDenied as soon as it is clear that Kafka does not accept us, and Unavailable after
    `timeout_s`; librdkafka goes on trying.
    """
    started = SYSTEM_CLOCK.monotonic()
    while True:
        client.poll(0)  # runs _settings' callback
        try:
            return future.result(_POLL_S)
        except TimeoutError:
            _check_access(connection, started)
        if SYSTEM_CLOCK.monotonic() - started > timeout_s:
            raise translated(KafkaError(KafkaError._TIMED_OUT), "ask Kafka", connection)


def metadata(client: AdminClient, timeout_s: float, connection: Connection) -> Any:
    """The brokers and topics of the cluster; raises as `result` does, and KafkaException."""
    started = SYSTEM_CLOCK.monotonic()
    while True:
        left = timeout_s - (SYSTEM_CLOCK.monotonic() - started)
        try:
            return client.list_topics(timeout=max(_POLL_S, min(left, _GRACE_S)))
        except KafkaException as exception:
            client.poll(_POLL_S)
            _check_access(connection, started)
            error = error_of(exception)
            if error is None or error.code() not in _AWAY or left <= 0:
                raise


def look_again(client: Producer | Consumer, topic: str, partition: int, exception: KafkaException) -> bool:
    """Whether a call failed only because the partition is a new one; then it works now.

    A client that knows a topic looks for new partitions every five minutes only.
    """
    error = error_of(exception)
    if error is None or error.code() != KafkaError._UNKNOWN_PARTITION:
        return False
    try:
        return partition in client.list_topics(topic, _LOOK_TIMEOUT_S).topics[topic].partitions
    except KafkaException:
        return False


def error_of(exception: BaseException) -> KafkaError | None:
    """The KafkaError inside a KafkaException, if that is what this is."""
    if isinstance(exception, KafkaException) and exception.args:
        error = exception.args[0]
        if isinstance(error, KafkaError):
            return error
    return None


def translated(error: KafkaError | None, doing: str, connection: Connection) -> KmqError:
    """`error` in our words: what was being done, and what to do next."""
    text = error.str() if error is not None else "unknown error"
    if error is None:
        return KmqError(f"{doing}: {text}")
    code = error.code()
    heard = _last_heard(_key(connection))
    if code in _AWAY and heard is not None and _is_refusal(heard.error):
        error = heard.error
    if _is_refusal(error):
        return AccessDenied(_refused(doing, error, connection))
    if code in _NOT_ALLOWED:
        return AccessDenied(
            f"{doing}: Kafka at {connection.bootstrap} does not allow it ({text}); "
            "grant it, see Security in the README"
        )
    if code in _AWAY:
        more = f"; {_text(heard.error)}" if heard is not None else ""
        return Unavailable(
            f"{doing}: Kafka at {connection.bootstrap} does not answer ({text}{more}); "
            "check the address, that it runs, and security.protocol"
        )
    if code in _NO_TOPIC:
        return TopicError(f"{doing}: the topic does not exist; create it with: kmq queue create")
    if code in _TOO_LARGE:
        return MessageError(f"{doing}: the message is larger than the topic allows ({text})")
    return KmqError(f"{doing}: {text}")


@contextmanager
def kafka_errors(doing: str, connection: Connection) -> Iterator[None]:
    """Raise librdkafka's errors as ours."""
    try:
        yield
    except KafkaException as exception:
        raise translated(error_of(exception), doing, connection) from exception


def _settings(connection: Connection, defaults: KafkaSettings) -> dict[str, Any]:
    """Settings of a client that notes what it hears of its connections; heard in poll() only."""
    key = _key(connection)

    def hear(error: KafkaError) -> None:
        if _is_refusal(error) or "SSL" in error.str():
            now, before = SYSTEM_CLOCK.monotonic(), _last_heard(key)
            _heard[key] = _Heard(error, before.first if before else now, now)

    return connection.kafka_settings({"error_cb": hear, **defaults})


def _key(connection: Connection) -> tuple[str, int]:
    return connection.bootstrap, hash(repr(sorted(connection.kafka.items())))


def _last_heard(key: tuple[str, int]) -> _Heard | None:
    heard = _heard.get(key)
    return heard if heard and SYSTEM_CLOCK.monotonic() - heard.last < _HEARD_S else None


def _is_refusal(error: KafkaError) -> bool:
    """Whether trying again is useless; a broker that is just stopped only disconnects."""
    text = error.str()
    told = error.code() in _NOT_ACCEPTED or error.code() == KafkaError._SSL or "SSL alert" in text
    return told and "disconnect" not in text.lower()


def _check_access(connection: Connection, started: float) -> None:
    """Raise when nothing but refusals was heard since `started`, for a while.

    That is AccessDenied, or Unavailable where one side speaks TLS and the other does not.
    """
    heard = _last_heard(_key(connection))
    if heard is None or heard.last < started:
        return
    lasts_s = SYSTEM_CLOCK.monotonic() - max(started, heard.first)
    if _is_refusal(heard.error):
        if lasts_s > _GRACE_S:
            raise AccessDenied(_refused("connect", heard.error, connection))
    elif _WRONG_LISTENER in heard.error.str() and lasts_s > _WRONG_LISTENER_S:
        raise translated(KafkaError(KafkaError._TRANSPORT), "connect", connection)


def _refused(doing: str, error: KafkaError, connection: Connection) -> str:
    check = "ssl.ca.location, ssl.certificate.location and ssl.key.location"
    if error.code() in _NOT_ACCEPTED:
        check = "sasl.mechanism, sasl.username and sasl.password"
    at = f"Kafka at {connection.bootstrap}"
    return f"{doing}: {at} and we do not accept each other ({_text(error)}); check {check}"


def _text(error: KafkaError) -> str:
    """Without the address and how long it took."""
    return _AROUND.sub("", error.str())


@contextmanager
def _settings_errors(connection: Connection) -> Iterator[None]:
    try:
        yield
    except (KafkaException, TypeError, ValueError) as exception:
        error = error_of(exception)
        for name, value in connection.kafka.items():
            if name.endswith(".location") and value != "probe" and not Path(str(value)).exists():
                raise ConfigError(f"Kafka settings: {name}: there is no {str(value)!r}") from None
        raise ConfigError(f"Kafka settings: {error.str() if error else exception}") from None
