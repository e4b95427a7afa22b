"""What goes wrong for `kmq` is one line and exit code 2."""

import json
import socket
import time
from collections import Counter

import pytest
from kmq_support import NOWHERE
from support import configure, until

from kmqpy.core import first_contact
from kmqpy.core.first_contact import Service
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection


class TestBadInput:
    def test_it_says_whether_kafka_or_zookeeper_is_away(self, kmq, name):
        kafka, zookeeper = ["--bootstrap", NOWHERE], ["--zookeeper", NOWHERE]
        commands = {
            f"Kafka at {NOWHERE} does not answer": [
                ["send", name, "x", *kafka],
                ["receive", name, *kafka],
                ["queue", "create", name, *kafka],
            ],
            f"ZooKeeper at {NOWHERE} does not answer": [["queue", "list", *zookeeper]],
        }
        started = time.monotonic()
        running = [(what, kmq.process(*one)) for what, several in commands.items() for one in several]
        for what, process in running:
            out, err = process.communicate()
            assert (process.returncode, out) == (2, "")
            assert err.startswith("kmq: error: ")
            assert what in err
            assert err.count("\n") == 1
        assert time.monotonic() - started < 40  # not for ever: four processes at once, on slow machines too

    def test_nothing_is_sent_twice_when_the_broker_refuses_one(self, kmq, name, cluster):
        configure(Topics(KafkaConnection(bootstrap=cluster.bootstrap)), name, {"max.message.bytes": "2000"})
        lines = ["before", "x" * 50_000, "after"]
        # Each of them a batch of its own for the broker: else it refuses all, and they are sent one by one.
        options = ["-X", "batch.num.messages=1"]
        error = kmq.error("send", name, *options, stdin="\n".join([*lines, ""]), code=1)
        assert "larger than the topic allows" in error
        assert "of these 3 messages were sent" in error
        kmq("send", name, "last")
        found = [one["body"] for one in kmq.lines("receive", name, "--max", 10)]
        assert found in (["before", "last"], ["before", "after", "last"])

    def test_a_missing_queue_is_named(self, kmq, queue_name):
        for command in ("send", "receive", "stats", "in-flight", "doctor", "purge"):
            arguments = {"send": ["x"], "purge": ["--yes"]}.get(command, [])
            assert queue_name in kmq.error(command, queue_name, *arguments)
        assert queue_name in kmq.error("queue", "delete", queue_name, "--yes")
        assert queue_name in kmq.error("queue", "alter", queue_name, "--partitions", 2)

    @pytest.mark.parametrize(
        "command",
        ["send {} x", "stats {}", "queue describe {}", "queue alter {} --max-lease 1d", "dlq peek {}"],
    )
    def test_the_nearest_queue_is_named(self, kmq, name, command):
        assert f"; did you mean {name}?" in kmq.error(*command.format(name[:-1]).split())

    def test_a_receipt_of_a_topic_that_was_made_anew_acknowledges_nothing(self, kmq, name):
        kmq("send", name, "old")
        (old,) = kmq.lines("receive", name)
        kmq.both("queue", "delete", name, "--yes")
        assert "no such topic" in kmq.error("ack", old["receipt"])
        kmq("queue", "create", name)
        kmq("send", name, "new")
        (new,) = kmq.lines("receive", name)
        assert "deleted since" in kmq.error("ack", old["receipt"])
        assert kmq.json("stats", name)["in_flight"] == 1
        out, err = kmq.both("ack", "zzz", new["receipt"], old["receipt"], code=1)
        assert out == "1 acknowledged\n"
        assert err.count("kmq: error: ") == 2
        assert kmq.json("stats", name)["in_flight"] == 0

    def test_an_oversized_message_is_named_and_the_others_are_sent(self, kmq, name):
        lines = b"a\n" + b"x" * 2_000_000 + b"\nb\n"
        out, err = kmq.both("send", name, stdin=lines, code=1)
        assert out.split() == ["0-0", "0-1"]
        assert err.startswith("kmq: error: message 2: message of 2000000 bytes")
        assert "message 1: message of" in kmq.error("send", name, stdin=b"x" * 2_000_000)
        assert kmq.json("stats", name)["depth"] == 2

    def test_numbers_that_do_not_fit(self, kmq, name, queue_name):
        assert "longer than the queue allows, 7d" in kmq.error("receive", name, "--lease", "8d")
        assert "no such partition" in kmq.error("send", name, "x", "--partition", 9)
        assert "partitions: 0" in kmq.error("queue", "create", f"{name}-2", "--partitions", 0)
        assert "replication: 9" in kmq.error("queue", "create", f"{name}-2", "--replication", 9)
        assert "retention" in kmq.error("queue", "create", f"{name}-2", "--retention", "1d")
        assert kmq.json("queue", "list")[0]["name"] == name

    def test_partition_counts_that_differ_name_the_command(self, kmq, make_queue):
        from confluent_kafka.admin import NewPartitions

        queue = make_queue()
        queue.topics._admin.create_partitions([NewPartitions(queue.name, 2)])[queue.name].result()
        until(lambda: queue.topics.describe([queue.name])[queue.name].partitions == 2)
        assert f"kmq queue alter {queue.name} --partitions 2" in kmq.error("receive", queue.name)
        kmq("queue", "alter", queue.name, "--partitions", 2)
        kmq("send", queue.name, "x", "--partition", 1)
        assert kmq.lines("receive", queue.name)[0]["partition"] == 1

    def test_doctor_finds_what_is_planted(self, kmq, make_queue):
        queue = make_queue()
        queue.configure(queue.settings.markers_topic, {"retention.ms": "1000"})
        found = json.loads(kmq("doctor", queue.name, "-o", "json", code=1))
        errors = [one["what"] for one in found if one["severity"] == "error"]
        assert any("keeps records for 1s" in what for what in errors)
        assert "no tracker runs" in kmq("doctor", code=1)

    def test_r25_doctor_clears_up_in_zookeeper_what_it_shows_when_told_to(self, kmq, name, environment):
        root = environment["KMQ_ROOT"]
        queue, stray = f"{root}/queues/{name}", f"{root}/trackers/copy"
        paths = [f"{queue}/partitions/0/leader", f"{queue}/foreign/below", f"{queue}/foreign"]
        with connect(ZooKeeperConnection(hosts=environment["KMQ_ZOOKEEPER"])) as zk:
            for path in (*paths, stray):
                zk.ensure_path(path)
            shown = kmq("doctor", code=1)
            assert all(f"{path}: " in shown for path in [*paths, stray])
            assert "kmq doctor --fix" in shown
            out, err = kmq.both("doctor", "--fix", stdin="n\n", code=2)
            assert all(f"kmq: {path}: " in err for path in [*paths, stray])
            assert "Remove 4 znodes? It was not confirmed" in err
            assert all(map(zk.exists, [*paths, stray]))
            out, err = kmq.both("doctor", name, "--fix", "-o", "json", stdin="y\n", code=1)
            assert sorted(json.loads(out)["removed"]) == sorted(paths)
            assert f"removed {stray}" in kmq("doctor", "--fix", "--yes", code=1)
            assert not any(map(zk.exists, [*paths, stray]))
            assert f"removed {root}" not in kmq("doctor", "--fix", code=1)  # and nothing is asked
            assert zk.exists(f"{queue}/partitions/0")


@pytest.fixture
def patience(monkeypatch):
    """How long, in s, commands that run in this process were ready to wait for answers of each service."""
    allowed = Counter()

    def noted(service, timeout_s):
        found = first_contact.patience_s(service, timeout_s)
        allowed[service] += found
        return found

    for module in ("kafka.kafka_errors", "zookeeper.session"):
        monkeypatch.setattr(f"kmqpy.{module}.patience_s", noted)
    return allowed


class TestWhereTheServersAre:
    @pytest.mark.parametrize("command", ["queue list", "doctor", "stats {}", "in-flight {}", "dlq list {}"])
    def test_of_the_issue_a_root_that_is_not_there_is_told(self, kmq, name, command):
        error = kmq.error(*command.format(name).split(), "--root", "/typo")
        assert "root: there is no znode '/typo' in ZooKeeper" in error

    def test_the_default_root_may_be_missing(self, kmq, monkeypatch):
        monkeypatch.delenv("KMQ_ROOT")
        kmq("queue", "list")

    @pytest.mark.parametrize("silent", [True, pytest.param(False, marks=pytest.mark.breadth)])
    @pytest.mark.parametrize(
        "command",
        [
            "send {} x --zookeeper=",
            "receive {} --zookeeper=",
            "dlq list {} --zookeeper=",
            "stats {}",
            "doctor {}",
            "queue create {}",
        ],
    )
    def test_of_the_issue_kafka_that_is_away_is_told_soon(
        self, kmq, queue_name, monkeypatch, patience, command, silent
    ):
        monkeypatch.delenv("KMQ_ROOT")
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}" if silent else NOWHERE
            error = kmq.error(*command.format(queue_name).split(), "--bootstrap", address)
        assert 0 < patience[Service.KAFKA] < 9  # 10 s is how long clients wait
        assert f"Kafka at {address} does not answer" in error

    def test_of_the_issue_zookeeper_that_is_away_is_told_soon(self, kmq, patience):
        error = kmq.error("queue", "list", "--zookeeper", NOWHERE)
        assert 0 < patience[Service.ZOOKEEPER] < 9
        assert f"ZooKeeper at {NOWHERE} does not answer" in error
        assert "; check the address, and that it runs" in error

    @pytest.mark.parametrize("option", ["--bootstrap", "--zookeeper"])
    @pytest.mark.parametrize("address", ["ho st:x", "::"])
    def test_of_the_issue_an_address_that_is_none_is_told_at_once(self, kmq, option, address):
        assert f"{option[2:]}: {address!r} is not an address" in kmq.error("stats", "q", option, address)
