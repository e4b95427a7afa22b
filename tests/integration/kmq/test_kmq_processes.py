"""`kmq` in processes of its own: signals, pipes, closed streams."""

import json
import os
import re
import signal
import subprocess

import pytest
from kmq_support import KMQ


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

    def test_send_imports_nothing_that_only_others_need(self, kmq, name):
        """All of it takes longer than to send."""
        kmq.environment["PYTHONPROFILEIMPORTTIME"] = "1"
        out, imports = kmq.process("send", name).communicate("a", timeout=60)
        assert out == "0-0\n"
        imported = set(re.findall(r"\| +(\S+)$", imports, re.MULTILINE))
        assert "kmqpy.kafka.kmq_client" in imported
        heavy = {"rich.console", "importlib.metadata", "kmqpy.storages", "kmqpy.worker", "kmqpy.gateway"}
        heavy |= {
            f"kmqpy.kafka.{name}" for name in ("admin.admin", "admin.stats", "client.consumer", "trace")
        }
        assert heavy & imported == set()

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
