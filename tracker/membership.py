"""Makes a tracker one of the members among which the partitions are divided, and serves its health.

The tracker registers as a member in ZooKeeper. It withdraws while Kafka does not answer: then other members
take its partitions over.
"""

from __future__ import annotations

import logging
import math
import socket

from kmqpy.core.clock import Clock
from kmqpy.errors import KmqError
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.health.server import HealthServer, HealthSource
from tracker.leadership.leadership import Leadership
from tracker.settings import TrackerSettings

_log = logging.getLogger(__name__)

_START_TIMEOUT_S = 10.0
"""join() raises Unavailable when ZooKeeper has not answered for this long."""
_WITHDRAW_AFTER_S = 10.0
"""When Kafka has not answered for this long, the tracker withdraws: others take its partitions over."""


class Membership:
    """Serves the health of `source` from the constructor on; the tracker is a member from `join` to `leave`.

    Raises ConfigError when the HTTP port can't be opened, or when the tracker's id is empty or contains a
    slash, so that no znode can have it as its name.
    """

    def __init__(
        self,
        source: HealthSource,
        connection: KafkaConnection,
        zookeeper: ZooKeeperConnection,
        settings: TrackerSettings,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._id = settings.tracker_id
        self._clock = clock
        self._kafka_ok_at = -math.inf
        self.leadership = Leadership(
            zookeeper,
            root=connection.root,
            tracker_id=settings.tracker_id,
            host=socket.gethostname(),
            queues=frozenset(settings.queues) or None,
            session_timeout_ms=settings.session_timeout_ms,
            clock=clock,
        )
        # Opened before `join`: a tracker that can't open its port must not take partitions.
        self._health = (
            HealthServer(source, settings.http_host, settings.http_port) if settings.http_port >= 0 else None
        )

    @property
    def http_port(self) -> int | None:
        """The port that serves /metrics, /backlog, /livez and /readyz; None where no port does."""
        return self._health.port if self._health is not None else None

    def join(self) -> None:
        """Become a member.

        Raises AccessDenied. Raises Unavailable when ZooKeeper does not answer, or when another session is
        registered under this tracker's id.
        """
        try:
            self.leadership.start(timeout=_START_TIMEOUT_S)
        except KmqError:
            self.leave()
            raise
        _log.info("tracker started", extra={"tracker": self._id, "http_port": self.http_port})

    def kafka_probed(self, *, answered: bool) -> None:
        """Note whether Kafka has answered; `_WITHDRAW_AFTER_S` after its last answer others take over."""
        now = self._clock.monotonic()
        if answered:
            self._kafka_ok_at = now
        self.leadership.set_kafka_ok(self._kafka_answers(now))

    def alive(self) -> bool:
        """False once the thread that keeps the membership has died: then only a restart helps."""
        return self.leadership.alive()

    def problems(self) -> list[str]:
        """Why the tracker is no member, or a member that can't work; empty when all is well."""
        found = [f"ZooKeeper: {problem}" for problem in self.leadership.snapshot().problems]
        if not self.leadership.may_redeliver():
            found.append("ZooKeeper: no verified session")
        if not self._kafka_answers(self._clock.monotonic()):
            found.append(f"Kafka at {self._connection.address} does not answer")
        return found

    def leave(self) -> None:
        """End the session, which gives up all partitions at once, and stop serving the health."""
        self.leadership.close()
        if self._health is not None:
            self._health.close()

    def _kafka_answers(self, now: float) -> bool:
        return now - self._kafka_ok_at <= _WITHDRAW_AFTER_S
