"""Settings of a tracker: flags, file (`[tracker]`) and environment (`KMQ_TRACKER_…`)."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, field

from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.claim_headers import MAX_CLAIMED_OFFSETS
from kmqpy.kafka.settings import CLOCK_LEAD_MS


def _default_id() -> str:
    # Another id at every start: the znode that a killed tracker left must not count as ours.
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"


@dataclass(frozen=True, kw_only=True)
class TrackerSettings:
    """The settings of one tracker; `kmq tracker` has them as options.

    Args:
        tracker_id: The tracker's name in ZooKeeper; must be unique.
        queues: The queues it serves; empty: every registered one.
        session_timeout_ms: Timeout of the ZooKeeper session: how soon others replace a killed tracker.
        offset_interval_ms: The shortest time between two writes of a partition's safe offset, from which the
            next tracker reads markers.
        offset_writes_per_s: About how many offsets all trackers together store; with many partitions, each is
            stored less often than offset_interval_ms says.
        snapshot_after_markers: When the oldest message in flight was taken more than this many markers ago,
            the offset is stored with a snapshot of the messages in flight.
        use_now_for_redeliver_despite_no_marker_seen_for_ms: After this time without a marker the broker is
            asked for its time.
        max_clock_lead_ms: How far timestamps of markers may be ahead of the broker's clock; those further
            ahead count as this limit.
        max_batch_messages: The most messages in one transaction; at most 1,048,576: a claim names no more.
        max_batch_bytes: The most bytes of copies in one transaction.
        workers: How many partitions are redelivered at the same time.
        transaction_timeout_ms: After this time Kafka aborts an open transaction; 0: session_timeout_ms, at
            least 1 s.
        count_interval_ms: The shortest time between two counts of waiting messages and dead letters, for
            /metrics.
        tracing: OpenTelemetry spans of redeliveries, to the global tracer provider.
        http_host: The interface that serves /metrics, /backlog, /livez and /readyz.
        http_port: The port that serves these; 0: any free one, -1: none.
    """

    tracker_id: str = field(default_factory=_default_id)
    queues: tuple[str, ...] = ()
    session_timeout_ms: int = 6_000
    offset_interval_ms: int = 5_000
    offset_writes_per_s: int = 500
    snapshot_after_markers: int = 20_000
    use_now_for_redeliver_despite_no_marker_seen_for_ms: int = 50
    max_clock_lead_ms: int = CLOCK_LEAD_MS
    max_batch_messages: int = 5_000
    max_batch_bytes: int = 4_000_000
    workers: int = 8
    transaction_timeout_ms: int = 0
    count_interval_ms: int = 15_000
    tracing: bool = False
    http_host: str = "127.0.0.1"
    http_port: int = 9404

    def __post_init__(self) -> None:
        if not self.tracker_id or "/" in self.tracker_id:
            raise ConfigError(f"tracker_id: {self.tracker_id!r} must not be empty or contain /")
        for name in (
            "session_timeout_ms",
            "offset_interval_ms",
            "offset_writes_per_s",
            "snapshot_after_markers",
            "use_now_for_redeliver_despite_no_marker_seen_for_ms",
            "max_clock_lead_ms",
            "max_batch_messages",
            "max_batch_bytes",
            "workers",
            "count_interval_ms",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.max_batch_messages > MAX_CLAIMED_OFFSETS:
            raise ConfigError(
                f"max_batch_messages: {self.max_batch_messages} must be at most {MAX_CLAIMED_OFFSETS}: "
                "the claim of a transaction can name no more messages"
            )
        if self.transaction_timeout_ms < 0:
            raise ConfigError(f"transaction_timeout_ms: {self.transaction_timeout_ms} must not be negative")
        if not -1 <= self.http_port <= 65535:
            raise ConfigError(f"http_port: {self.http_port} is not a port")

    @property
    def effective_transaction_timeout_ms(self) -> int:
        """The setting, or if that is 0 the session timeout, and at least 1 s.

        It is near the session timeout because an open transaction holds back the partition's readers.
        """
        return self.transaction_timeout_ms or max(1_000, self.session_timeout_ms)

    @property
    def silence_s(self) -> float:
        """After this many seconds without a marker, the tracker asks the broker for its time."""
        return self.use_now_for_redeliver_despite_no_marker_seen_for_ms / 1000
