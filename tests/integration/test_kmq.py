"""`kmq` on a real Kafka and ZooKeeper, from create to delete; what goes wrong is one line and exit code 2."""

import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka.admin import NewTopic
from support import configure, until

from kmqpy.cli.app import run
from kmqpy.core import first_contact
from kmqpy.core.first_contact import Service
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_names import topics_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection

KMQ = str(Path(sys.executable).with_name("kmq"))
NOWHERE = "127.0.0.1:1"


class Kmq:
    """Runs `kmq` in this process; `process` runs it in one of its own."""

    def __init__(self, environment, capsys, monkeypatch):
        self.environment = environment
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, *args, stdin=None, code=0):
        """Standard output of a command that ends with `code`."""
        out, err = self.both(*args, stdin=stdin, code=code)
        if code == 0:
            assert err == ""
        return out

    def both(self, *args, stdin=None, code=0):
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        found = run([str(arg) for arg in args])
        shown = self.capsys.readouterr()
        assert found == code, shown
        return shown.out, shown.err

    def json(self, *args, **more):
        return json.loads(self(*args, "-o", "json", **more))

    def lines(self, *args, **more):
        return [json.loads(line) for line in self(*args, **more).splitlines()]

    def error(self, *args, stdin=None, code=2):
        """The one line on standard error of a command that fails."""
        out, err = self.both(*args, stdin=stdin, code=code)
        assert not out
        assert err.startswith("kmq: error: ")
        assert err.count("\n") == 1, err
        return err

    def process(self, *args, **more):
        return subprocess.Popen(
            [KMQ, *args],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            **more,
        )


@pytest.fixture
def environment(cluster, queue_name):
    return {
        "KMQ_BOOTSTRAP": cluster.bootstrap,
        "KMQ_ZOOKEEPER": cluster.zookeeper,
        "KMQ_ROOT": f"/kmq-{queue_name}",
    }


@pytest.fixture
def kmq(environment, capsys, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    yield Kmq(environment, capsys, monkeypatch)
    logging.getLogger("kmqpy").handlers.clear()


@pytest.fixture
def name(kmq, queue_name):
    """A queue of one partition, made by the command."""
    kmq("queue", "create", queue_name)
    return queue_name


class TestFlow:
    def test_from_create_to_delete(self, kmq, queue_name):
        made = kmq.json("queue", "create", queue_name, "--partitions", 2, "--redeliver-after", "20s")
        assert (made["partitions"], made["redeliver_after_ms"]) == (2, 20_000)
        assert [one["name"] for one in kmq.json("queue", "list")] == [queue_name]
        assert queue_name in kmq("queue", "list")

        sent = kmq("send", queue_name, "--key", "k", "--header", "a=b=c", stdin="one\ntwo\n\nfour").split()
        assert len(sent) == 4
        taken = kmq.lines("receive", queue_name, "--max", 4, "--holder", "me")
        assert [one["body"] for one in taken] == ["one", "two", "", "four"]
        assert {one["key"] for one in taken} == {"k"}
        assert taken[0]["headers"] == {"a": "b=c"}
        assert {one["attempts"] for one in taken} == {1}
        assert abs(taken[0]["lease_until_ms"] - taken[0]["enqueued_ms"] - 20_000) < 15_000

        # By another process: by arguments, and by what receive printed on its standard input.
        first = kmq.process("ack", taken[0]["receipt"])
        assert first.communicate() == ("1 acknowledged\n", "")
        assert kmq("ack", stdin=json.dumps(taken[1]) + "\n") == "1 acknowledged\n"
        assert kmq.json("nack", taken[2]["receipt"], "--delay", "1h", "--reason", "later") == {
            "done": 1,
            "failed": 0,
        }
        kmq("extend", taken[3]["receipt"], "--lease", "2h")

        listed = kmq.json("in-flight", queue_name)
        assert [(one["state"], one["reason"]) for one in listed] == [("released", "later"), ("leased", None)]
        assert {one["holder"] for one in listed} == {"me"}
        assert listed[1]["receipt"] == taken[3]["receipt"]
        assert listed[1]["lease_until_ms"] - listed[1]["since_ms"] > 7_000_000
        assert "released" in kmq("in-flight", queue_name)
        counts = kmq.json("stats", queue_name)
        assert (counts["depth"], counts["in_flight"], counts["overdue"]) == (0, 2, 0)
        assert "total" in kmq("stats", queue_name)

        out, err = kmq.both("purge", queue_name, stdin="y\n")
        assert out.startswith(f"queue {queue_name}: 2 messages")
        assert err == "kmq: to be deleted: 0 messages waiting, 2 in flight\n"
        kmq("send", queue_name, "five", "--partition", 1)
        out, err = kmq.both("queue", "delete", queue_name, "--yes", "-o", "json")
        names = [f"{queue_name}{end}" for end in ("", "__markers", "__undelivered", "__undelivered__markers")]
        assert json.loads(out) == {"queue": queue_name, "deleted": True, "topics": names, "kept": []}
        shown = [line.removeprefix("kmq: to be deleted: topic ") for line in err.splitlines()]
        assert [line.split()[0] for line in shown] == names
        assert shown[0] == f"{queue_name} with about 1 record"
        assert kmq.json("queue", "list") == []
        assert "no such" in kmq.error("queue", "describe", queue_name)

    def test_receive_and_acknowledge_at_once(self, kmq, name):
        kmq("send", name, "a", "b", "c")
        assert [one["body"] for one in kmq.lines("receive", name, "--max", 2, "--ack")] == ["a", "b"]
        counts = kmq.json("stats", name)
        assert (counts["depth"], counts["in_flight"]) == (1, 0)

    def test_nothing_to_receive_is_no_output(self, kmq, name):
        out, err = kmq.both("receive", name, "--wait", "1s")
        assert out == ""
        assert err == "kmq: no message within 1s; no tracker runs, so nothing is redelivered: kmq tracker\n"
        assert (
            kmq.both("receive", name, "--wait", "1s", "--zookeeper", "")[1] == "kmq: no message within 1s\n"
        )

    @pytest.mark.parametrize("answer", ["n\n", "", "\n", "yep\n"])
    def test_nothing_is_deleted_unless_it_is_confirmed(self, kmq, name, answer):
        kmq("send", name, "x")
        for command in (["purge"], ["queue", "delete"], ["dlq", "purge"]):
            out, err = kmq.both(*command, name, stdin=answer, code=2)
            assert out == ""
            assert err.splitlines()[-1].endswith("use --yes")
            assert "kmq: to be deleted: " in err
        assert kmq.json("stats", name)["depth"] == 1

    def test_delete_takes_registered_queues_and_with_leftovers_what_is_of_none(self, kmq, name, environment):
        topics = Topics(KafkaConnection(bootstrap=environment["KMQ_BOOTSTRAP"]))
        foreign, left = f"{name}-foreign", f"{name}-left"
        topics._admin.create_topics([NewTopic(foreign, 1, 1)])[foreign].result()
        topics.create(QueueSettings(name=left))
        for topic in (foreign, left, f"{name}__undelivered", f"{name}__markers"):
            assert "is not registered" in kmq.error("queue", "delete", topic, "--yes")
        for topic in (foreign, name, f"{name}__undelivered"):
            kmq.error("queue", "delete", topic, "--leftovers", "--yes")
        _, err = kmq.both("queue", "delete", left, "--leftovers", stdin="n\n", code=2)
        assert [line.split()[5] for line in err.splitlines()[:-1]] == [*topics_of(QueueSettings(name=left))]
        assert "Delete 4 topics left over from a queue" in err

        def own_topics() -> set[str]:
            return {topic for topic in topics.names() if topic.startswith(name)}

        before = own_topics()
        kmq.both("queue", "delete", left, "--leftovers", "--yes")
        until(lambda: before - own_topics() == {*topics_of(QueueSettings(name=left))})
        kmq("send", name, "x")
        assert (
            "is not empty (1 waiting)" in kmq.both("queue", "delete", name, "--if-empty", "--yes", code=2)[1]
        )
        kmq.lines("receive", name, "--ack")
        kmq.both("queue", "delete", name, "--if-empty", "--yes")
        until(lambda: topics.names().isdisjoint(topics_of(QueueSettings(name=name))))

    def test_bytes_survive(self, kmq, name):
        kmq("send", name, stdin=b"\xff\xfe\nplain\n")
        found = kmq.lines("receive", name, "--max", 2)
        assert found[0]["body_base64"] == "//4="
        assert found[1]["body"] == "plain"

    def test_delay_and_partition(self, kmq, queue_name):
        kmq("queue", "create", queue_name, "--partitions", 3)
        sent = kmq.json("send", queue_name, "x", "--delay", "1h", "--partition", 2)
        assert sent == {"id": "2-0", "partition": 2, "offset": 0}
        for _ in range(5):  # on a busy machine it takes a while to join the group
            assert kmq.both("receive", queue_name, "--wait", "3s")[0] == ""
            counts = kmq.json("stats", queue_name)
            if counts["delayed"]:
                break
        assert (counts["depth"], counts["delayed"], counts["in_flight"]) == (1, 1, 0)

    def test_kafka_alone_is_enough_for_messages(self, kmq, name):
        kmq("send", name, "x", "--zookeeper", "")
        (found,) = kmq.lines("receive", name, "--zookeeper", "")
        kmq("ack", found["receipt"], "--zookeeper", "")
        assert kmq.json("stats", name, "--zookeeper", "")["in_flight"] == 0

    def test_names_of_topics_come_from_the_registry_and_without_it_from_its_copy(self, kmq, queue_name):
        kmq("queue", "create", queue_name, "--markers-topic", f"{queue_name}-m", "--max-redeliveries", "none")
        kmq("send", queue_name, "x")
        (found,) = kmq.lines("receive", queue_name)
        kmq("ack", found["receipt"])
        settings = kmq.json("queue", "describe", queue_name)["settings"]
        assert (settings["markers_topic"], settings["max_redeliveries"]) == (f"{queue_name}-m", None)
        kmq("send", queue_name, "y", "--zookeeper", "")
        (found,) = kmq.lines("receive", queue_name, "--zookeeper", "")
        assert found["body"] == "y"

    def test_alter(self, kmq, name):
        assert kmq.json("queue", "alter", name, "--max-redeliveries", "9")["max_redeliveries"] == 9
        altered = kmq.json("queue", "alter", name, "--partitions", 2, "--claims", "--late-acks")
        assert (altered["claims"], altered["late_acks"]) == (True, True)
        assert kmq.json("queue", "describe", name)["partitions"] == 2
        assert "needs claims" in kmq.error("queue", "alter", name, "--no-claims")
        assert "fewer than the 2" in kmq.error("queue", "alter", name, "--partitions", 1)


class TestWithTracker:
    def test_redelivery_dead_letters_and_redrive(self, kmq, make_queue, queue_name):
        queue = make_queue(max_redeliveries=0)  # its root is that of the fixture `environment`
        queue.tracker()
        kmq("send", queue_name, "poison", "bad")
        taken = kmq.lines("receive", queue_name, "--max", 2, "--lease", "1m")
        kmq("nack", taken[0]["receipt"])
        kmq("dead-letter", taken[1]["receipt"], "--reason", "no such user")
        until(lambda: len(kmq.json("dlq", "list", queue_name)) == 2)
        listed = kmq.json("dlq", "list", queue_name)
        assert {one["attempts"] for one in listed} == {1}
        assert any("no such user" in one["reason"] for one in listed)
        assert "no such user" in kmq("dlq", "list", queue_name)
        peeked = kmq.lines("dlq", "peek", queue_name)
        assert {one["body"] for one in peeked} == {"poison", "bad"}
        assert kmq.json("stats", queue_name)["dead_letters"] == 2
        out, err = kmq.both("dlq", "redrive", queue_name, listed[0]["id"], "7-7", code=1)
        assert "1 dead letter sent back" in out
        assert "no dead letter 7-7" in err
        assert kmq.both("dlq", "purge", queue_name, "--yes")[0].startswith(
            f"queue {queue_name}: 1 dead letter deleted"
        )
        assert kmq.json("stats", queue_name)["dead_letters"] == 0
        (again,) = kmq.lines("receive", queue_name)
        assert (again["body"], again["attempts"]) == (peeked[0]["body"], 1)
        kmq("ack", again["receipt"])
        assert kmq("doctor", queue_name).count("error") == 0


class TestBadInput:
    def test_kafka_or_zookeeper_away(self, kmq, name):
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

    def test_a_missing_queue(self, kmq, queue_name):
        for command in ("send", "receive", "stats", "in-flight", "doctor", "purge"):
            arguments = {"send": ["x"], "purge": ["--yes"]}.get(command, [])
            assert queue_name in kmq.error(command, queue_name, *arguments)
        assert queue_name in kmq.error("queue", "delete", queue_name, "--yes")
        assert queue_name in kmq.error("queue", "alter", queue_name, "--partitions", 2)

    def test_a_receipt_of_a_topic_that_was_made_anew_acknowledges_nothing(self, kmq, name):
        kmq("send", name, "old")
        (old,) = kmq.lines("receive", name)
        kmq.both("queue", "delete", name, "--yes")
        assert "no such topic" in kmq.error("ack", old["receipt"])
        kmq("queue", "create", name)
        kmq("send", name, "new")
        (new,) = kmq.lines("receive", name)
        assert "which was deleted since" in kmq.error("ack", old["receipt"])
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

    def test_partition_counts_that_differ(self, kmq, make_queue):
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


class TestProcess:
    """What needs a process of its own: signals, pipes."""

    def follow(self, kmq, name, *more):
        process = kmq.process("receive", name, "--follow", "--lease", "1h", *more)
        return process, json.loads(process.stdout.readline())

    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_a_signal_ends_receive_quietly_and_the_receipts_stay_good(self, kmq, name, number, code):
        kmq("send", name, "a")
        process, taken = self.follow(kmq, name)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err) == (code, "", "")
        assert kmq.json("stats", name)["in_flight"] == 1
        kmq("ack", taken["receipt"])
        assert kmq.json("stats", name)["in_flight"] == 0

    def test_what_could_not_be_printed_is_given_back(self, kmq, name):
        kmq("send", name, stdin="\n".join(f"{n} {'x' * 500}" for n in range(1_000)))
        process = kmq.process("receive", name, "--max", "1000", "--lease", "1h", "--wait", "10s")
        json.loads(process.stdout.readline())
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == 0
        states = [one["state"] for one in kmq.json("in-flight", name, "--limit", 1_000)]
        assert 0 < states.count("leased") < 1_000
        assert states.count("leased") + states.count("released") == len(states)

    def test_send_goes_on_when_nobody_reads_the_ids(self, kmq, name):
        process = kmq.process("send", name)
        process.stdout.close()
        process.stdin.write("".join(f"{n}\n" for n in range(3_000)))
        process.stdin.close()
        assert process.stderr.read() == ""
        process.stderr.close()
        assert process.wait(60) == 0
        assert kmq.json("stats", name)["depth"] == 3_000

    def test_a_line_is_sent_when_it_comes(self, kmq, name):
        process = kmq.process("send", name)
        for n in range(2):
            process.stdin.write(f"{n}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"0-{n}\n"
        process.communicate()


@pytest.mark.slow
def test_dev_up_serves_until_it_is_told_to_stop(kmq, tmp_path, queue_name):
    process = kmq.process("dev", "up", "--keep", str(tmp_path))
    try:
        shown = [process.stdout.readline() for _ in range(4)]
        addresses = dict(word.split("=") for word in shown[3].split()[1:])
        assert shown[3].startswith("export ")
        assert shown[0].split()[1] == addresses["KMQ_BOOTSTRAP"]
        more = ["--bootstrap", addresses["KMQ_BOOTSTRAP"], "--zookeeper", addresses["KMQ_ZOOKEEPER"]]
        kmq("queue", "create", queue_name, *more)
        kmq("send", queue_name, "x", *more)
        assert kmq.lines("receive", queue_name, *more)[0]["body"] == "x"
    finally:
        process.send_signal(signal.SIGINT)
        out, _err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")


@pytest.fixture
def patience(monkeypatch):
    """How long, in s, commands that run in this process were ready to wait for answers of each service."""
    allowed = Counter()

    def noted(service, timeout_s):
        found = first_contact.patience_s(service, timeout_s)
        allowed[service] += found
        return found

    for module in ("kafka.librdkafka", "zookeeper.session"):
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

    @pytest.mark.parametrize("silent", [True, False])
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

    @pytest.mark.parametrize("option", ["--bootstrap", "--zookeeper"])
    @pytest.mark.parametrize("address", ["ho st:x", "::"])
    def test_of_the_issue_an_address_that_is_none_is_told_at_once(self, kmq, option, address):
        assert f"{option[2:]}: {address!r} is no address" in kmq.error("stats", "q", option, address)


class TestClosedStreams:
    def test_of_the_issue_a_table_that_nobody_wants(self, kmq, name):
        shell = ["sh", "-c", 'exec "$@" >&-', "sh", KMQ, "stats", name]
        done = subprocess.run(
            shell, env={**os.environ, **kmq.environment}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")

    def test_of_the_issue_no_message_is_taken_that_nobody_sees(self, kmq, name):
        kmq("send", name, "a")
        shell = ["sh", "-c", 'exec "$@" >&-', "sh", KMQ, "receive", name, "--ack"]
        done = subprocess.run(shell, env={**os.environ, **kmq.environment}, capture_output=True, check=False)
        assert done.returncode == 2
        assert kmq.json("stats", name)["depth"] == 1


def test_peek_size_and_orphans_work_as_on_other_storages(kmq, name):
    kmq("send", name, "one", "two", "--partition", 0)
    assert kmq("size", name) == "2\n"
    assert [one["body"] for one in kmq.lines("peek", name)] == ["one", "two"]
    (taken,) = kmq.lines("receive", name, "--lease", "5m", "--wait", "30s")
    until(lambda: kmq.json("orphans", name, "--older-than", "0s"))
    (orphan,) = kmq.json("orphans", name, "--older-than", "0s")
    assert orphan["receipt"] == taken["receipt"]
    assert kmq("size", name) == "1\n"
