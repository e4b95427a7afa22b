"""Names that other queues have for our settings, options and commands: errors say what they are here."""

import click
import pytest

from kmqpy import queue_for
from kmqpy.cli.app import kmq
from kmqpy.cli.app import run as run_kmq
from kmqpy.core import foreign_names
from kmqpy.core.foreign_names import our_name
from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError
from kmqpy.kafka.client.client_options import ClientOptions
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, build_connections, unknown_in_environment
from kmqpy.queue import storage_for
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.sql.opening import SETTINGS as SQL_SETTINGS
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings

LEASES = [
    "redeliver_after_ms",
    "visibility_timeout",
    "VisibilityTimeout",
    "visibility-timeout-seconds",
    "msgTimeoutMs",
    "leaseMs",
    "claim_ttl",
    "ttl",
]
OTHERS = {
    "maxReceiveCount": "max_redeliveries",
    "max_receive_count": "max_redeliveries",
    "maxRedeliveryCount": "max_redeliveries",
    "max_retries": "max_redeliveries",
    "ephemeral": "delivery",
    "acks_late": "delivery",
    "FifoQueue": "order",
}
OF_QUEUES = {**dict.fromkeys(LEASES, "lease_ms"), **OTHERS}
OF_KMQ_CONFIG = {
    "msgTopic": "queue",
    "markerTopic": "markers_topic",
    "deadLetterTopic": "dead_letter_topic",
    "msgConsumerGroupId": "consumer_group",
    "msgTimeoutMs": "lease_ms",
    "redeliveryCountHeader": "redelivery_count_header",
    "maxRedeliveryCount": "max_redeliveries",
}


@pytest.mark.parametrize(("name", "ours"), OF_QUEUES.items())
def test_settings_of_a_queue(name, ours):
    expected = f"{name}: unknown setting; did you mean {ours}?"
    with pytest.raises(ConfigError) as caught:
        StoredQueueSettings.of("q", {name: "1"})
    assert str(caught.value) == expected
    with storage_for("memory:") as storage, pytest.raises(ConfigError) as caught:
        storage.create("q", **{name: 1})
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "url", ["memory:?queue=q", "kafka://127.0.0.1:1?queue=q", "sqlite:///none.db?queue=q"]
)
@pytest.mark.parametrize(("name", "ours"), OF_QUEUES.items())
def test_settings_in_a_url(url, name, ours):
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'; did you mean {ours}\\?"):
        queue_for(f"{url}&{name}=1")


@pytest.mark.parametrize(("name", "ours"), OF_KMQ_CONFIG.items())
def test_names_of_the_jvm_library(name, ours):
    with pytest.raises(ConfigError, match=f"'{name}'; did you mean {ours}\\?"):
        queue_for(f"kafka://127.0.0.1:1?queue=q&{name}=1")


def test_a_setting_that_only_trackers_have():
    hint = nearest("useNowForRedeliverDespiteNoMarkerSeenForMs", TrackerSettings.__dataclass_fields__)
    assert hint == "; did you mean use_now_for_redeliver_despite_no_marker_seen_for_ms?"


def test_settings_of_the_connection_in_file_and_environment(monkeypatch):
    with pytest.raises(ConfigError, match=r"bootstrap_servers: .*; did you mean bootstrap\?"):
        build_connections({"bootstrap_servers": "h:9092"})
    monkeypatch.setenv("KMQ_BROKERS", "h:9092")
    monkeypatch.setenv("KMQ_ZOOKEEPER_CONNECT", "h:2181")
    unknown = unknown_in_environment()
    assert unknown["KMQ_BROKERS"] == "; did you mean KMQ_BOOTSTRAP?"
    assert unknown["KMQ_ZOOKEEPER_CONNECT"] == "; did you mean KMQ_ZOOKEEPER?"


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("queue create q --visibility-timeout 30s", "--lease"),
        ("queue create q --redeliver-after 30s", "--lease"),
        ("queue create q --max-receive-count 3", "--max-redeliveries"),
        ("send q x --delay-seconds 3", "--delay"),
        ("receive q --visibilityTimeout 3s", "--lease"),
        ("receive q --wait-time-seconds 3", "--wait"),
    ],
)
def test_options_of_a_command(line, ours, capsys):
    assert run_kmq(line.split()) == 2
    shown = capsys.readouterr().err
    assert f"; did you mean {ours}?" in shown, shown
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "ours"), [("publish", "send"), ("poll", "receive"), ("requeue", "nack"), ("renew", "extend")]
)
def test_commands(command, ours, capsys):
    assert run_kmq([command, "q"]) == 2
    assert f"'{command}' is not a command; did you mean {ours}?" in capsys.readouterr().err


def test_a_name_that_nobody_has_gets_the_most_similar_or_none():
    assert nearest("waitms", ["wait_ms"]) == "; did you mean wait_ms?"
    assert nearest("zzz", ["wait_ms"]) == ""
    assert our_name("visibility_timeout", ["partitions"]) is None
    assert our_name("ms", ["s"]) is None


def test_very_many_names_are_not_compared():
    names = [f"queue-{number}" for number in range(100)]
    assert nearest("queue_99", names) == "; did you mean queue-99?"
    assert nearest("queue_99", [*names, "other"]) == ""


def test_every_name_of_ours_in_the_table_exists():
    known = {
        *StoredQueueSettings.__dataclass_fields__,
        *QueueSettings.__dataclass_fields__,
        *TrackerSettings.__dataclass_fields__,
        *KafkaConnection.__dataclass_fields__,
        *ZooKeeperConnection.__dataclass_fields__,
        *ClientOptions.__annotations__,
        *SQL_SETTINGS,
        *kmq.list_commands(click.Context(kmq)),
        *_parameters(kmq),
    }
    names = {foreign_names._bare(one) for one in known}
    # Of a url: the queue's name. Of KafkaStorage.create(): the topics'.
    names |= {"queue", *map(foreign_names._bare, ("retention_ms", "partitions", "replication"))}
    assert {one for one in foreign_names._OURS if foreign_names._bare(one) not in names} == set()


def _parameters(command):
    found = {one.lstrip("-") for parameter in command.params for one in parameter.opts}
    for child in getattr(command, "commands", {}).values():
        found |= _parameters(child)
    return found


def test_no_foreign_name_has_two_meanings_or_is_one_of_ours():
    pairs = [(foreign_names._bare(name), ours) for ours, some in foreign_names._OURS.items() for name in some]
    assert len({name for name, _ in pairs}) == len(pairs)
    settings = {foreign_names._bare(one) for one in StoredQueueSettings.__dataclass_fields__}
    assert not settings & {name for name, _ in pairs}
