"""Finds and replaces clients of librdkafka that are cut off: they never reach Kafka again, while others do.

Since librdkafka 2.10, a client that reads an answer which names no broker forgets all brokers, and may never
look for brokers again (librdkafka's issue 5301, open in 2.16). Kafka gives such answers for a moment when all
brokers at once were away for longer than their session. Calls of a client that is cut off only time out, as
in an outage.

Administration clients and most producers are replaced whenever one of their calls or records got no answer
(`may_be_cut_off`), which costs little in an outage. For two kinds of clients a needless replacement is
expensive: a consumer loses its place in its group, and the outcome of start markers (the records that begin
leases) becomes unknown. So consumers and producers of start markers are replaced only when Kafka answers a
new client and does not answer them (`CutOffCheck`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import closing

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from kmqpy.core.clock import Clock
from kmqpy.kafka import kafka_errors, librdkafka
from kmqpy.kafka.librdkafka import Producer
from kmqpy.kafka.settings import KafkaConnection

_log = logging.getLogger(__name__)

Client = confluent_kafka.Producer | confluent_kafka.Consumer

_CHECK_EVERY_S = 5.0
"""Seconds from one find() of a CutOffCheck until its is_due() is true again."""
_CUT_OFF_AFTER_S = 15.0
"""Seconds for which Kafka must have answered new clients and not a client, before this client is cut off.
Longer than the 10 s that librdkafka may take to connect again."""
_ANSWER_TIMEOUT_S = 1.0
"""Seconds that a CutOffCheck waits for Kafka's answer to one client."""

_UNANSWERED = {
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
}
"""Errors of calls and records that got no answer: in an outage, or because the client is cut off."""


def may_be_cut_off(error: KafkaError | None) -> bool:
    """Return True if `error` says that a call or record got no answer, or if `error` ended the client."""
    return error is not None and (kafka_errors.is_fatal(error) or error.code() in _UNANSWERED)


class RenewedProducer:
    """Gives its users a producer, and a new producer after an error that may have ended it; for any thread.

    A replaced producer is kept, and polled, until the delivery of each of its records is reported. Senders
    wait for these reports, and librdkafka would never free records that it drops without a report.
    """

    def __init__(self, make: Callable[[], Producer]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._producer = make()
        self._former: list[Producer] = []
        self._failed = False

    def current(self) -> Producer:
        """The producer for the next records; a new one after a failure that note_failure() has counted."""
        with self._lock:
            if self._failed or self._producer.fatal_error is not None:
                _log.warning("producer replaced: it ended or got no answer")
                self._former.append(self._producer)
                self._producer, self._failed = self._make(), False
            if self._former:
                self._poll_former()
            return self._producer

    def note_failure(self, producer: Producer | None, error: KafkaError | None) -> None:
        """Note that a record of `producer` failed.

        If `producer` is the current one and may be cut off, the next current() replaces it.
        """
        if producer is self._producer and may_be_cut_off(error):
            self._failed = True

    def poll(self) -> None:
        """Call the callbacks of delivery reports that have come, also those of replaced producers."""
        self._producer.poll(0)
        if self._former:
            with self._lock:
                self._poll_former()

    def flush(self, timeout_s: float) -> None:
        """Wait until the current producer has sent its records, at most `timeout_s` seconds."""
        self._producer.flush(timeout_s)

    def _poll_former(self) -> None:
        for producer in self._former:
            producer.poll(0)
        self._former = [producer for producer in self._former if len(producer)]


class CutOffCheck:
    """Finds clients that are cut off; for one thread at a time.

    Each client asks Kafka about `topic`, because an answer about all topics may be large. That the topic is
    missing is an answer, too. But where brokers create topics by themselves, the question of a producer makes
    Kafka create a missing topic.

    is_over  once this is true, find() asks nobody any more, and finds nobody
    """

    def __init__(
        self,
        connection: KafkaConnection,
        topic: str,
        clock: Clock,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_over = is_over
        self._connection = connection
        self._topic = topic
        self._clock = clock
        self._next_check = clock.monotonic() + _CHECK_EVERY_S
        self._silent_since: dict[Client, float] = {}
        """The clients that got no answer in the last find() although a new client did.

        With each client, the time of the first of the unbroken series of such find() calls.
        """

    def is_due(self) -> bool:
        """Return True if the last find() was 5 s ago or earlier. find() itself asks Kafka whenever called."""
        return self._clock.monotonic() >= self._next_check

    def find(self, clients: Iterable[Client]) -> list[Client]:
        """Ask Kafka with each of these clients; returns the clients that are cut off.

        A client is cut off if it got no answer in each find() of 15 s or more while a new client did. Waits
        up to a second for each client, and another second for the new client if one of `clients` got no
        answer. Nobody may close a client meanwhile. The CutOffCheck keeps no reference to the clients that it
        returns, so that librdkafka ends these clients when the caller drops them.
        """
        now = self._clock.monotonic()
        self._next_check = now + _CHECK_EVERY_S
        silent = [client for client in clients if not self._is_over() and not self._is_answered(client)]
        if not silent or self._is_over() or not self._is_new_client_answered():
            silent = []
        self._silent_since = {client: self._silent_since.get(client, now) for client in silent}
        cut_off = [client for client, since in self._silent_since.items() if now - since >= _CUT_OFF_AFTER_S]
        for client in cut_off:
            del self._silent_since[client]
        return cut_off

    def _is_new_client_answered(self) -> bool:
        with closing(librdkafka.new_consumer(self._connection, {})) as client:
            return self._is_answered(client)

    def _is_answered(self, client: Client) -> bool:
        try:
            client.list_topics(self._topic, _ANSWER_TIMEOUT_S)
        except KafkaException:
            return False
        return True
