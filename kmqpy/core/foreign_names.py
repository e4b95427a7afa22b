"""What settings, options and commands of other queues are called here, for errors about unknown names. Pure.

docs/coming-from.md has the same in sentences, for readers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_OURS: dict[str, tuple[str, ...]] = {
    "lease_ms": (
        "ack_deadline",  # Pub/Sub
        "ack_timeout",
        "claim_ttl",  # EmoDB
        "consumer_timeout",  # RabbitMQ
        "lock_duration",  # Service Bus
        "msg_timeout",  # kmq
        "redeliver_after",  # kmq, in its markers
        "ttl",  # EmoDB
        "visibility_timeout",  # SQS, Celery
    ),
    "max_lease_ms": ("max_visibility_timeout",),
    "max_redeliveries": (
        "delivery_limit",  # RabbitMQ
        "max_attempts",
        "max_deliveries",
        "max_delivery_attempts",
        "max_receive_count",  # SQS
        "max_redelivery_count",  # kmq
        "max_retries",  # Celery
        "redrive_policy",  # SQS
    ),
    "delay": ("countdown", "delay_seconds"),  # Celery, SQS
    "delivery": ("acks_late", "auto_ack", "ephemeral", "ephemeral_disabled", "no_ack", "task_acks_late"),
    "order": ("fifo", "fifo_queue"),  # ddth-queue, SQS
    "markers_topic": ("marker_topic",),  # kmq
    "dead_letter_topic": ("dead_letter_exchange", "dead_letter_target_arn", "dlq"),
    "consumer_group": ("group_id", "msg_consumer_group_id"),  # kmq
    "use_now_for_redeliver_despite_no_marker_seen_for_ms": (),  # kmq, of trackers
    "queue": ("msg_topic", "queue_name", "queue_url", "topic"),
    "retention_ms": ("message_retention_period", "retention_period"),  # SQS
    "partitions": ("num_partitions", "partition_count"),
    "replication": ("replicas", "replication_factor"),
    "wait": ("msg_poll_timeout", "poll_timeout", "wait_time_seconds"),  # SQS
    "max_in_flight": ("max_messages_in_flight", "prefetch", "prefetch_count", "qos"),
    "instance_id": ("group_instance_id",),
    "holder": ("client_id", "consumer_id", "consumer_tag", "owner"),
    "bootstrap": ("bootstrap_servers", "broker", "broker_url", "brokers"),
    "zookeeper": ("connect_string", "zk", "zookeeper_connect"),
    "root": ("chroot", "namespace"),
    "ssl_ca_certs": ("ssl_ca", "ssl_ca_file", "ssl_ca_location", "sslrootcert", "tls_ca_file"),
    "ssl_certfile": ("ssl_cert", "ssl_certificate", "tls_cert_file"),
    "ssl_keyfile": ("ssl_key", "tls_key_file"),
    "ssl_verify": (
        "ssl",
        "ssl_cert_reqs",  # redis-py
        "ssl_check_hostname",
        "ssl_mode",  # MySQL; libpq writes sslmode
        "ssl_verify_cert",  # PyMySQL
        "ssl_verify_identity",
        "tls",
    ),
    "application_name": ("client_name", "fallback_application_name", "program_name"),
    "unix_socket": ("socket", "socket_path", "unix_socket_path"),
    "pool_size": ("max_connections", "maxsize", "max_pool_size"),
    "timeout_ms": ("connect_timeout", "socket_connect_timeout", "socket_timeout", "pool_timeout"),
    # commands
    "send": ("enqueue", "produce", "publish", "put"),
    "receive": ("consume", "dequeue", "poll", "take"),
    "ack": ("acknowledge", "complete", "delete", "finish", "processed"),
    "nack": ("release", "requeue", "retry", "unclaim"),
    "extend": ("change_visibility", "renew"),
    "dead-letter": ("bury", "reject"),
    "dlq": ("dead-letters", "redrive"),
}
"""Our names, with those of others for the same. Endings that say a unit, and how a name is written (capitals,
`_`, `-`), make no difference."""


def _bare(name: str) -> str:
    bare = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"(?<=.)(ms|millis|seconds|secs)$", "", bare)


_BY_NAME = {_bare(name): ours for ours, others in _OURS.items() for name in (*others, ours)}


def our_name(name: str, known: Iterable[str]) -> str | None:
    """The name in `known` for what others call `name`, or for `name` written otherwise; or None."""
    by_bare = {_bare(one): one for one in known}
    bare = _bare(name)
    return by_bare.get(bare) or by_bare.get(_bare(_BY_NAME.get(bare, "")))
