"""A tracker as a member: in ZooKeeper, as long as Kafka answers, and on a port that tells of its health."""

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
_WITHDRAW_AFTER_S = 10.0


class Membership:
    """Serves the health of `source` at once, and is a member from `join` to `leave`.

    Raises ConfigError when the HTTP port can't be had.
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
        # Before the first partition could be ours: a tracker that can't work must take none.
        self._health = (
            HealthServer(source, settings.http_host, settings.http_port) if settings.http_port >= 0 else None
        )

    @property
    def http_port(self) -> int | None:
        """Where /metrics, /livez and /readyz are served; None when they are not."""
        return self._health.port if self._health is not None else None

    def join(self) -> None:
        """Become a member; raises AccessDenied, and Unavailable when ZooKeeper does not answer."""
        try:
            self.leadership.start(timeout=_START_TIMEOUT_S)
        except KmqError:
            self.leave()
            raise
        _log.info("tracker started", extra={"tracker": self._id, "http_port": self.http_port})

    def kafka_probed(self, *, answered: bool) -> None:
        """Tell whether Kafka has answered; where it does not for long, others are to have the partitions."""
        now = self._clock.monotonic()
        if answered:
            self._kafka_ok_at = now
        self.leadership.set_kafka_ok(self._kafka_answers(now))

    def alive(self) -> bool:
        """True if it recovers without a restart, however long ZooKeeper and Kafka are unreachable."""
        return self.leadership.alive()

    def problems(self) -> list[str]:
        """Why it is no member, or none that can work; empty when it is."""
        found = [f"ZooKeeper: {problem}" for problem in self.leadership.snapshot().problems]
        if not self.leadership.may_redeliver():
            found.append("ZooKeeper: no verified session")
        if not self._kafka_answers(self._clock.monotonic()):
            found.append(f"Kafka at {self._connection.address} does not answer")
        return found

    def leave(self) -> None:
        """Give up all partitions at once; released one by one they would come straight back."""
        self.leadership.close()
        if self._health is not None:
            self._health.close()

    def _kafka_answers(self, now: float) -> bool:
        return now - self._kafka_ok_at <= _WITHDRAW_AFTER_S
