"""Replaces clients of librdkafka that are cut off: they never reach Kafka again, while others do.

Since 2.10, a client that reads an answer which names no broker forgets all brokers, and may never look for
them again (librdkafka's issue 5301, open in 2.16). Kafka gives such answers for a moment when all brokers
at once were away for longer than their session. Calls of a client that is cut off only time out, as in an
outage.

Administration clients and other producers are replaced whenever a call or a record of theirs got no answer
(`may_be_cut_off`), which costs little in an outage. A consumer would lose its place in its group, and nobody
would know what becomes of start markers. So consumers and producers of start markers are replaced only when
Kafka answers new clients and not them (`CutOffCheck`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import closing

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Producer

from kmqpy.core.clock import Clock
from kmqpy.kafka import librdkafka
from kmqpy.kafka.settings import KafkaConnection

_log = logging.getLogger(__name__)

Client = confluent_kafka.Producer | confluent_kafka.Consumer

_EVERY_S = 5.0
"""From one look to the next."""
_AFTER_S = 15.0
"""How long Kafka must have answered others only. It takes librdkafka up to 10 s to connect again."""
_ANSWER_S = 1.0
"""How long an answer is waited for."""

_UNANSWERED = {
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
}


def may_be_cut_off(error: KafkaError | None) -> bool:
    """Return True if this error says that a call or record got no answer, or that it ended the client."""
    return error is not None and (librdkafka.is_fatal(error) or error.code() in _UNANSWERED)


class RenewedProducer:
    """A producer, and another one after an error that may have ended it; for any thread.

    The former one is kept until all that was given to it is reported: whoever waits for that polls it, and
    what librdkafka ends without a report is never freed.
    """

    def __init__(self, make: Callable[[], Producer]) -> None:
        self._make = make
        self._lock = threading.RLock()  # a signal handler may send, too
        self._producer = make()
        self._former: list[Producer] = []
        self._failed = False

    def current(self) -> Producer:
        """The producer for what is sent next."""
        with self._lock:
            if self._failed:
                _log.warning("producer replaced: it ended or got no answer")
                self._former.append(self._producer)
                self._producer, self._failed = self._make(), False
            self._poll_former()
            return self._producer

    def note_failure(self, producer: Producer | None, error: KafkaError | None) -> None:
        """Note that `producer` could not send something; counts if it is the one for what is sent next."""
        if producer is self._producer and may_be_cut_off(error):
            self._failed = True

    def poll(self) -> None:
        """Serve delivery reports that have come."""
        self._producer.poll(0)
        if self._former:
            with self._lock:
                self._poll_former()

    def flush(self, timeout_s: float) -> None:
        """Wait for what is still to be sent."""
        self._producer.flush(timeout_s)

    def _poll_former(self) -> None:
        for producer in self._former:
            producer.poll(0)
        self._former = [producer for producer in self._former if len(producer)]


class CutOffCheck:
    """Finds clients that are cut off; for one thread at a time.

    Kafka is asked about `topic`, since an answer about all topics may be large. It may be missing: that is an
    answer, too. But if brokers create topics by themselves, a producer that asks about one has it created.
    """

    def __init__(self, connection: KafkaConnection, topic: str, clock: Clock) -> None:
        self._connection = connection
        self._topic = topic
        self._clock = clock
        self._next = clock.monotonic() + _EVERY_S
        self._since: dict[Client, float] = {}
        """The clients that got no answer when a new one did, each with the time when that was first so."""

    def is_due(self) -> bool:
        """Return True if find() would ask Kafka now."""
        return self._clock.monotonic() >= self._next

    def find(self, clients: Iterable[Client]) -> list[Client]:
        """Ask Kafka with each of these clients; returns those that are cut off.

        That is known 15 s after Kafka first answered a new client and not them. Waits a second for each
        client that gets no answer, and one for the new client. Nobody may close a client meanwhile. Those
        that are returned are forgotten, so that librdkafka ends them when the caller drops them.
        """
        now = self._clock.monotonic()
        self._next = now + _EVERY_S
        silent = [client for client in clients if not self._is_answered(client)]
        if not silent or not self._is_new_client_answered():
            silent = []
        self._since = {client: self._since.get(client, now) for client in silent}
        cut_off = [client for client, since in self._since.items() if now - since >= _AFTER_S]
        for client in cut_off:
            del self._since[client]
        return cut_off

    def _is_new_client_answered(self) -> bool:
        with closing(librdkafka.new_consumer(self._connection, {})) as client:
            return self._is_answered(client)

    def _is_answered(self, client: Client) -> bool:
        try:
            client.list_topics(self._topic, _ANSWER_S)
        except KafkaException:
            return False
        return True
