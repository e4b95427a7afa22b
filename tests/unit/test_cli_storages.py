"""The command line over storages other than Kafka, in one process with a storage in memory."""

import io
import json
import subprocess
import sys
import time
import uuid

import click
import pytest

from kmqpy.cli import messages
from kmqpy.cli.app import _COMMANDS, _KNOWN_HELP, kmq, run
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.queue import opening, storage_for

KAFKA_ONLY = [
    "spark-jars",
    "spark-state q --table x",
    "pipeline q --out x --schema y",
    "tracker",
]


@pytest.fixture
def url(monkeypatch):
    for name in ("BOOTSTRAP", "ZOOKEEPER", "ROOT", "CONFIG", "QUEUE_URL"):
        monkeypatch.delenv(f"KMQ_{name}", raising=False)
    return f"memory://cli-{uuid.uuid4().hex}"


@pytest.fixture
def kmq_at(url, capsys):
    """Runs a command line over the storage; its exit code, lines of stdout and stderr."""

    def ran(*line, at=url):
        capsys.readouterr()
        code = run(["--queue-url", at, *line])
        shown = capsys.readouterr()
        return code, shown.out.splitlines(), shown.err

    return ran


def test_a_queue_that_the_url_names_is_administered_without_its_name(kmq_at, url):
    named = f"{url}?queue=jobs&max_redeliveries=7&requeue_to=front"
    assert kmq_at("queue", "create", "--max-redeliveries", "3", at=named) == (0, ["queue jobs"], "")
    shown = kmq_at("queue", "describe", "jobs")[1]
    assert "max_redeliveries          3" in shown
    assert "requeue_to                front" in shown
    assert kmq_at("queue", "describe", at=named)[1] == shown
    assert "names queue 'jobs' already" in kmq_at("queue", "describe", "other", at=named)[2]
    assert kmq_at("queue", "delete", "--yes", at=named)[0] == 0
    assert "Missing argument 'QUEUE'" in kmq_at("queue", "create")[2]


def test_a_queue_is_altered(kmq_at):
    kmq_at("queue", "create", "jobs")
    assert kmq_at("queue", "alter", "jobs", "--lease", "7s", "--max-redeliveries", "none")[:2] == (
        0,
        ["queue jobs changed"],
    )
    assert {"lease                     7s", "max_redeliveries          none"} <= {
        *kmq_at("queue", "describe", "jobs")[1]
    }
    assert kmq_at("queue", "alter", "jobs", "--set", "retry_delays=1000ms,1m")[0] == 0
    assert "retry_delays              1s,1m" in kmq_at("queue", "describe", "jobs")[1]
    for delay, waiting in ((["--delay", "0s"], 0), ([], 1)):
        kmq_at("send", "jobs", "x")
        (told,) = kmq_at("receive", "jobs")[1]
        assert kmq_at("nack", json.loads(told)["receipt"], *delay)[0] == 0
        assert json.loads(kmq_at("stats", "jobs", "-o", "json")[1][0])["delayed"] == waiting
    kmq_at("queue", "create", "tenants", "--fair", "--max-in-flight-per-group", "5")
    assert kmq_at("queue", "alter", "tenants", "--max-in-flight-per-group", "none")[0] == 0
    assert {"fair                      True", "max_in_flight_per_group   none"} <= {
        *kmq_at("queue", "describe", "tenants")[1]
    }
    assert "was made with them" in kmq_at("queue", "alter", "tenants", "--no-fair")[2]
    assert kmq_at("queue", "alter", "jobs")[0] == 2
    assert "did you mean jobs" in kmq_at("queue", "alter", "jbos", "--lease", "7s")[2]


@pytest.mark.parametrize("line", ["size", "size jobs", "size other"])
def test_a_url_of_kafka_says_where_kafka_is(kmq_at, monkeypatch, line):
    made = []

    class Opened:
        def __init__(self, settings, connection, zookeeper):
            made.append((settings.name, connection.bootstrap, connection.root, zookeeper.hosts))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def size(self):
            return 7

    monkeypatch.setattr("kmqpy.kafka.kmq_client.KmqClient", Opened)
    monkeypatch.setattr("kmqpy.kafka.settings_mirror.settings_of", lambda name, _: QueueSettings(name=name))
    monkeypatch.setenv("KMQ_BOOTSTRAP", "elsewhere:1")
    url = "kafka://h:9,h2:9?root=/r" + ("&queue=jobs" if line == "size" else "")
    assert kmq_at(*line.split(), at=url)[:2] == (0, ["7"])
    queue = "jobs" if line == "size" else line.split()[1]
    assert made == [(queue, "h:9,h2:9", "/r", "127.0.0.1:2181")]
    assert "unknown setting 'lease_ms'" in kmq_at("size", "q", at="kafka://h:9?lease_ms=5")[2]
    assert "must not stand on a command line" in kmq_at("size", "q", at="kafka://h:9?sasl.password=x")[2]


def test_a_queue_from_its_creation_to_its_deletion(kmq_at):
    created = ["queue", "create", "jobs", "--max-redeliveries", "0", "--set", "requeue_to=front"]
    assert kmq_at(*created) == (0, ["queue jobs"], "")
    assert kmq_at("queue", "create", "jobs")[2] == (
        "kmq: error: queue: there is a queue 'jobs' already; use it as it is (kmq queue describe shows its "
        "settings), or delete it first (kmq queue delete)\n"
    )
    assert kmq_at("queue", "list")[1] == ["queue", "jobs"]
    assert json.loads(kmq_at("queue", "list", "-o", "json")[1][0])[0]["requeue_to"] == "front"
    assert "max_redeliveries          0" in kmq_at("queue", "describe", "jobs")[1]

    assert kmq_at("send", "jobs", "one", "two", "three", "--key", "k", "--header", "a=b")[0] == 0
    assert kmq_at("send", "jobs", "first", "--priority", "9", "-o", "json")[1] == ['{"id": "4"}']
    assert kmq_at("size", "jobs")[1] == ["4"]
    peeked = [json.loads(line) for line in kmq_at("peek", "jobs", "--limit", "2")[1]]
    assert [one["body"] for one in peeked] == ["first", "one"]
    assert peeked[1].keys() >= {"id", "key", "headers", "attempts"}
    assert not peeked[1].keys() & {"receipt", "partition", "offset"}

    code, lines, _ = kmq_at("receive", "jobs", "--max", "4", "--lease", "1m", "--wait", "0s")
    receipts = {one["body"]: one["receipt"] for one in map(json.loads, lines)}
    assert (code, [*receipts]) == (0, ["first", "one", "two", "three"])
    assert kmq_at("ack", receipts["first"])[:2] == (0, ["1 acknowledged"])
    assert kmq_at("nack", receipts["one"], "--no-count")[:2] == (0, ["1 given back"])
    assert kmq_at("extend", receipts["two"], "--lease", "5m")[:2] == (0, ["1 extended"])
    code, lines, problem = kmq_at("extend", receipts["first"], receipts["two"], "--lease", "5m")
    assert (code, lines) == (1, ["1 extended"])
    assert f"{receipts['first']!r} has no lease any more" in problem
    assert kmq_at("dead-letter", receipts["three"], "--reason", "bad")[:2] == (0, ["1 rejected"])
    stats = json.loads(kmq_at("stats", "jobs", "-o", "json")[1][0])
    assert stats == {"queue": "jobs", "depth": 1, "ready": 1, "delayed": 0, "in_flight": 1, "dead": 1}
    assert kmq_at("stats", "jobs")[1][1].split() == ["jobs", "1", "1", "0", "1"]

    (taken,) = json.loads(kmq_at("in-flight", "jobs", "-o", "json")[1][0])
    assert (taken["receipt"], taken["body"]) == (receipts["two"], "two")
    assert json.loads(kmq_at("orphans", "jobs", "--older-than", "1h", "-o", "json")[1][0]) == []
    assert len(kmq_at("orphans", "jobs", "--older-than", "0s")[1]) == 2
    assert len(kmq_at("orphans", "jobs")[1]) == 2
    for moment, count in (("1h", 1), ("0s", 2), ("2001-01-01", 1), ("2200-01-01T00:00+02:00", 2)):
        assert len(kmq_at("orphans", "jobs", "--queued-before", moment)[1]) == count, moment
    assert "'soon'" in kmq_at("orphans", "jobs", "--queued-before", "soon")[2]
    assert "not both" in kmq_at("orphans", "jobs", "--queued-before", "1h", "--older-than", "1h")[2]

    (letter,) = json.loads(kmq_at("dlq", "list", "jobs", "-o", "json")[1][0])
    assert letter["reason"] == "rejected: bad"
    assert json.loads(kmq_at("dlq", "peek", "jobs")[1][0])["body"] == "three"
    assert kmq_at("dlq", "redrive", "jobs", letter["id"], "77")[0] == 1
    assert kmq_at("size", "jobs")[1] == ["2"]
    assert kmq_at("dlq", "purge", "jobs", "--yes")[:2] == (0, ["queue jobs: 0 dead letters deleted"])
    assert kmq_at("queue", "delete", "jobs", "--yes", "--if-empty")[0] == 2
    assert kmq_at("purge", "jobs", "--yes")[:2] == (0, ["queue jobs: 3 messages deleted"])
    assert kmq_at("queue", "delete", "jobs", "--yes", "--if-empty")[:2] == (0, ["queue jobs deleted"])
    code, lines, errors = kmq_at("stats", "jobs")
    assert (code, lines, errors) == (2, [], "kmq: error: queue: there is no queue 'jobs'\n")


@pytest.mark.parametrize("line", [("ack",), ("nack",), ("extend", "--lease", "5s"), ("dead-letter",)])
@pytest.mark.parametrize("given", [b"", b"\n \n"])
def test_of_the_issue_an_empty_input_is_no_error_and_told(kmq_at, monkeypatch, line, given):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    assert kmq_at(*line) == (0, [], "kmq: no receipts came on standard input\n")


def test_a_url_that_names_a_queue_leaves_out_the_argument(kmq_at, url):
    named = f"{url}?queue=jobs&max_redeliveries=1"
    assert kmq_at("send", "one", "two", at=named)[0] == 0
    assert kmq_at("size", at=named)[1] == ["2"]
    code, lines, _ = kmq_at("receive", "--ack", "--wait", "0s", at=named)
    assert (code, [json.loads(line)["body"] for line in lines]) == (0, ["one"])
    assert kmq_at("stats", at=named)[1][1].split() == ["jobs", "1", "0", "0", "0"]
    code, lines, errors = kmq_at("size", "other", at=named)
    assert (code, lines) == (2, [])
    assert "names queue 'jobs' already" in errors


@pytest.mark.parametrize("line", [("send", "jobs"), ("send", "jobs", "hi"), ("dlq", "redrive", "jobs")])
def test_of_the_issue_the_name_of_the_urls_queue_is_no_message(kmq_at, url, line):
    named = f"{url}?queue=jobs"
    code, lines, errors = kmq_at(*line, at=named)
    assert (code, lines) == (2, [])
    assert errors == "kmq: error: QUEUE: --queue-url names queue 'jobs' already; leave 'jobs' out\n"
    assert kmq_at("size", at=named)[1] == ["0"]


def test_the_url_may_come_from_the_environment_and_the_option_wins(monkeypatch, url, capsys):
    with storage_for(url) as storage:
        storage.create("here")
    monkeypatch.setenv("KMQ_QUEUE_URL", "memory://elsewhere-" + uuid.uuid4().hex)
    assert run(["queue", "list"]) == 0
    assert run(["queue", "list", "--queue-url", url]) == 0
    assert capsys.readouterr().out.splitlines() == ["queue", "queue", "here"]


@pytest.mark.parametrize("line", KAFKA_ONLY)
def test_what_only_kafka_has_says_so_in_a_line(kmq_at, line):
    code, lines, errors = kmq_at(*line.split())
    assert (code, lines) == (2, [])
    assert errors.startswith("kmq: error: kmq ")
    assert errors.endswith("is for Kafka only; leave --queue-url and KMQ_QUEUE_URL out\n")


@pytest.mark.parametrize(
    "line",
    [
        "send q x --partition 1",
        "receive q --holder me",
        "dlq list q --origin other",
        "dlq redrive q --rate 5",
        "queue create q --partitions 4",
        "queue create q --dead-letter-topic d",
        "queue delete q --leftovers",
        "queue alter q --late-acks",
        "queue alter q --partitions 3",
    ],
)
def test_an_option_that_only_kafka_has_is_named(kmq_at, line):
    kmq_at("queue", "create", "q")
    code, lines, errors = kmq_at(*line.split())
    assert (code, lines) == (2, [])
    assert "is for queues on Kafka only" in errors
    assert errors.count("\n") == 1


def test_groups_are_refused_for_kafka(url, capsys):
    assert run(["send", "q", "x", "--group", "g", "--zookeeper="]) == 2
    assert "--group: queues on Kafka have none" in capsys.readouterr().err


@pytest.mark.parametrize(
    "secret",
    [
        "memory://me:hunter2@h",
        "memory://h?password=hunter2",
        "memory://h?queue=q&sasl.password=hunter2",
        "http://127.0.0.1:1?timeout_ms=1&api_key=hunter2",
    ],
)
def test_a_secret_must_not_stand_on_the_command_line_and_is_never_shown(kmq_at, monkeypatch, capsys, secret):
    code, lines, errors = kmq_at("size", "q", at=secret)
    assert (code, lines) == (2, [])
    assert errors.endswith("give it as KMQ_QUEUE_URL\n")
    monkeypatch.setenv("KMQ_QUEUE_URL", secret)
    assert run(["size", "q", "-v"]) == 2  # memory has no passwords, and no gateway is there
    shown = capsys.readouterr()
    assert "hunter2" not in errors + shown.err + shown.out


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ("nonsense", "it has no scheme"),
        ("memroy://x", "did you mean memory?"),
        ("memory://x?requeu_to=front", "did you mean requeue_to?"),
        ("memory://x?queue=a&queue=b", "more than once"),
    ],
)
def test_a_bad_url_is_one_line(kmq_at, bad, expected):
    code, lines, errors = kmq_at("size", "q", at=bad) if "?queue=" not in bad else kmq_at("size", at=bad)
    assert (code, lines) == (2, [])
    assert expected in errors
    assert errors.count("\n") == 1


def test_a_receipt_of_something_else_is_named(kmq_at):
    code, lines, errors = kmq_at("ack", "zzz", "1.WyJqb2JzIiwi")
    assert (code, lines) == (2, [])
    assert errors.count("is not a receipt") == 2
    assert errors.count("but perhaps of a queue on Kafka") == 1


@pytest.mark.parametrize(
    "bad", [b"\xff\xfe", b'{"receipt":' + b"[" * 100_000, b'{"receipt": null}', b"{}", b"x" * 100_000, b"\0"]
)
def test_a_line_that_is_no_receipt_costs_only_itself(kmq_at, monkeypatch, bad):
    kmq_at("queue", "create", "jobs")
    kmq_at("send", "jobs", "one", "two")
    first, second = (line.encode() for line in kmq_at("receive", "jobs", "--max", "2")[1])
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n".join([first, bad, second])), "utf-8"))
    code, lines, errors = kmq_at("ack")
    assert (code, lines) == (1, ["2 acknowledged"])
    assert errors.count("is not a receipt") == errors.count("\n") == 1
    assert len(errors) < 300


@pytest.mark.parametrize("tool", ["jq .", "jq -s .", "jq -c .", "jq -s -c .", "jq .receipt", "jq --tab ."])
def test_receipts_come_in_json_as_tools_print_it(kmq_at, monkeypatch, tool):
    kmq_at("queue", "create", "jobs")
    kmq_at("send", "jobs", "one", "two", "three")
    messages = [json.loads(line) for line in kmq_at("receive", "jobs", "--max", "3", "-o", "json")[1]]
    indent = None if "-c" in tool else "\t" if "--tab" in tool else 2
    if ".receipt" in tool:
        messages = [message["receipt"] for message in messages]
    documents = [messages] if "-s" in tool else messages
    given = "\n".join(json.dumps(one, indent=indent) for one in documents)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    assert kmq_at("ack") == (0, ["3 acknowledged"], "")


@pytest.mark.parametrize("bad", ["{", "{\n", '{\n  "receipt": 7,', "[\n  {\n", '{\n  "a": 1\n}', "]", "}"])
def test_json_that_is_cut_off_or_holds_no_receipt_costs_only_itself(kmq_at, monkeypatch, bad):
    kmq_at("queue", "create", "jobs")
    kmq_at("send", "jobs", "one")
    (receipt,) = kmq_at("receive", "jobs")[1]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{bad}\n{receipt}\n".encode())))
    code, lines, errors = kmq_at("ack")
    assert (code, lines) == (1, ["1 acknowledged"])
    assert "is not a receipt" in errors


def test_a_huge_line_costs_time_in_proportion_to_its_size(monkeypatch):
    """Parts of a pipe come by 64 KiB at most; a body may have 256 MiB."""

    class Pipe(io.BytesIO):
        def read1(self, _size=-1):
            return super().read1(4096)

    huge = b"x" * (32 << 20)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(Pipe(b"first\n\n" + huge + b"\nlast")))
    begun = time.process_time()
    lines = [line for batch in messages._lines() for line in batch]
    assert lines == [b"first", b"", huge, b"last"]
    assert time.process_time() - begun < 10  # 0.1 s; with a copy of all for each part, minutes


def test_help_loads_no_command_and_nothing_that_they_need():
    program = (
        "import sys\nfrom kmqpy.cli.app import run\nrun(['--help'])\n"
        "light = {'app', 'options', 'output', 'plugins', 'storage_url'}\n"
        "print({*light} ^ {n[10:] for n in sys.modules if n.startswith('kmqpy.cli.')}, file=sys.stderr)\n"
        "heavy = {'confluent_kafka', 'kazoo', 'rich.console', 'tracker', 'prometheus_client', 'sqlalchemy'}\n"
        "print(heavy & {*sys.modules}, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\nset()\n"
    assert "tracker" in done.stdout


def test_the_short_help_of_commands_that_are_not_loaded_is_their_own():
    known = {**_KNOWN_HELP, **{name: text for name, (_, text) in _COMMANDS.items()}}
    context = click.Context(kmq)
    assert known == {name: kmq.get_command(context, name).get_short_help_str(78) for name in known}


def test_variables_that_nothing_reads_are_named_with_the_nearest(monkeypatch, kmq_at, caplog):
    monkeypatch.setenv("KMQ_BOOTSTAP", "h:1")
    monkeypatch.setenv("KMQ_FOO_BAR", "1")
    for known in ("KMQ_TRACKER_WORKERS", "KMQ_KAFKA_CLIENT_ID", "KMQ_CACHE", "KMQ_QUEUE_URL"):
        monkeypatch.setenv(known, "")
    monkeypatch.setenv("KMQ_FOO_SERVICE_HOST", "10.0.0.1")  # Kubernetes
    code, lines, errors = kmq_at("queue", "list")
    assert (code, lines) == (0, ["queue"])
    assert errors.splitlines() == [
        "kmq: KMQ_BOOTSTAP in the environment is unknown; did you mean KMQ_BOOTSTRAP?",
        "kmq: KMQ_FOO_BAR in the environment is unknown",
    ]
    monkeypatch.setattr("kmqpy.kafka.settings._logged_unknown", set())
    caplog.clear()
    for _ in range(2):
        KafkaConnection.from_environment()
    assert len([record for record in caplog.records if "KMQ_BOOTSTAP" in record.getMessage()]) == 1


_JOBS = "sqlite:///{}/jobs.db"
_JOBS_Q = f"{_JOBS}?queue=q"


@pytest.mark.parametrize(
    ("url", "line"),
    [
        (_JOBS, "queue list"),
        *((_JOBS, line) for line in ("queue describe q", "stats q", "receive q --wait 0s", "send q x")),
        *((_JOBS_Q, line) for line in ("queue describe", "stats", "peek", "send x", "purge --yes")),
    ],
)
def test_a_command_that_creates_no_queue_makes_no_file(kmq_at, tmp_path, url, line):
    code, lines, errors = kmq_at(*line.split(), at=url.format(tmp_path))
    assert (code, lines, errors.count("\n")) == (2, [], 1)
    told = f"there is no file '{tmp_path}/jobs.db'; check the path, or create it together with a queue"
    assert told in errors
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("url", "line"), [(_JOBS, "queue create q"), (_JOBS_Q, "queue create")])
def test_the_command_that_creates_a_queue_makes_the_file(kmq_at, tmp_path, url, line):
    assert kmq_at(*line.split(), at=url.format(tmp_path))[:2] == (0, ["queue q"])
    assert kmq_at("queue", "list", at=_JOBS.format(tmp_path))[:2] == (0, ["queue", "q"])


@pytest.mark.skipif("sqlite" not in opening._STORAGES, reason="no storage here is shared by processes yet")
def test_processes_share_a_queue(kmq_at, tmp_path):
    jobs = f"sqlite:///{tmp_path}/jobs.db"

    def kmq_in_a_process(*line, given=""):
        main = [sys.executable, "-c", "from kmqpy.cli import main; main()", *line]
        environment = {"KMQ_QUEUE_URL": jobs, "PATH": ""}
        done = subprocess.run(main, env=environment, input=given, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert kmq_at("queue", "create", "jobs", at=jobs)[0] == 0
    kmq_in_a_process("send", "jobs", given="one\ntwo\n")
    _, taken, _ = kmq_at("receive", "jobs", "--max", "2", "--lease", "5m", at=jobs)
    assert [json.loads(line)["body"] for line in taken] == ["one", "two"]
    assert kmq_in_a_process("ack", given="\n".join(taken)) == "2 acknowledged\n"
    _, (shown,), _ = kmq_at("stats", "jobs", "-o", "json", at=jobs)
    stats = json.loads(shown)
    assert (stats["depth"], stats["in_flight"], stats["dead"]) == (0, 0, 0)
