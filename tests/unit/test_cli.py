"""The command line without servers: parsing, help, errors."""

import errno
import io
import json
import logging
import re
import subprocess
import sys
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka import Message as Record

from kmqpy.cli import output, plugins
from kmqpy.cli.app import kmq, run
from kmqpy.cli.options import DURATION, Cli, _Lines, connected
from kmqpy.cli.text import as_object
from kmqpy.core import logs
from kmqpy.core.clock import SystemClock
from kmqpy.errors import KmqError, MessageError, MissingExtra, Unavailable, Unfinished
from kmqpy.kafka.admin.admin import QueueDescription
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.admin.stats import InFlightMessage, PartitionStats, QueueStats
from kmqpy.kafka.client.record_message import KafkaMessage, ReceiveContext
from kmqpy.kafka.dead_letters import KafkaDeadLetter
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import TopicInfo
from kmqpy.telemetry.base import Telemetry
from tracker.command import _from_environment


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    for name in ("BOOTSTRAP", "ZOOKEEPER", "ROOT", "CONFIG"):
        monkeypatch.delenv(f"KMQ_{name}", raising=False)
    yield
    logging.getLogger("kmqpy").handlers.clear()


FOREIGN = [
    "\x1b]0;owned\x07",
    "\x9b31m",
    "one\ntwo\r\n",
    "\u202egpj.exe",
    "\u2028",
    "\x7f",
    "\ud800",
    "\U000e0041",
]
"""What keys, reasons and names of others may hold: escape codes, controls, lines, directions, halves."""

NOW_MS = 1_795_262_400_000


class Standing(SystemClock):
    """It is always NOW_MS."""

    def wall_ms(self):
        return NOW_MS


def commands(group=kmq, path=("kmq",)):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


ALL = {" ".join(path): command for path, command in commands()}


def given(*args):
    """The `Cli` that a command gets for these arguments; those before `--` stand before its name."""
    before, after = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else ((), args)
    seen = []

    @click.command()
    @connected
    def look(cli: Cli) -> None:
        seen.append(cli)

    kmq.add_command(look)
    try:
        assert run([*before, "look", *after]) == 0
    finally:
        del kmq.commands["look"]
    return seen[0]


def test_the_guides_table_of_deletions_has_every_command_that_asks_before_it_deletes():
    asking = {name for name, one in ALL.items() if any("--yes" in option.opts for option in one.params)}
    guide = (Path(__file__).parents[2] / "docs/guide.md").read_text()
    table = guide.partition("## Commands that delete")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(kmq [a-z ]+?)(?: --.*)?`", table, re.MULTILINE)) == asking


class TestHelp:
    def test_of_the_issue_every_command_is_there(self):
        wanted = """queue create|queue list|queue describe|queue alter|queue delete|send|receive|ack|nack|
            extend|dead-letter|in-flight|stats|dlq list|dlq peek|dlq redrive|dlq purge|purge|doctor|dev up|
            tracker"""
        assert {f"kmq {name.strip()}" for name in wanted.split("|")} <= ALL.keys()

    @pytest.mark.parametrize("name", ALL)
    def test_it_has_an_example_and_says_what_the_command_does(self, name, capsys):
        assert run([*name.split()[1:], "--help"]) == 0
        shown = capsys.readouterr().out
        assert "Example" in shown
        assert f"{name} " in shown
        assert ALL[name].get_short_help_str(200)

    @pytest.mark.parametrize("name", ALL)
    def test_every_option_is_explained(self, name):
        options = [one for one in ALL[name].params if isinstance(one, click.Option)]
        assert [one.name for one in options if not one.help] == []

    def test_without_a_command_it_is_shown(self, capsys):
        assert run([]) == 2
        shown = capsys.readouterr()
        assert "kmq queue create" in shown.err
        assert not shown.out

    def test_version(self, capsys):
        assert run(["--version"]) == 0
        assert capsys.readouterr().out.startswith("kmq ")


class TestBadUse:
    """One line on stderr, exit code 2, nothing on stdout."""

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ("staz q", "did you mean stats?"),
            ("queue", None),
            ("queue mak q", "No such command 'mak'"),
            ("stats", "Missing argument 'QUEUE'"),
            ("stats q --bogus", "No such option"),
            ("stats q -o yaml", "'yaml' is not one of 'text', 'json'"),
            ("receive q --lease -5s", "must not be negative"),
            ("receive q --lease 5", "write it like 500ms, 30s"),
            ("receive q --lease 1e3s", "is not a duration"),
            ("receive q --lease 99999999999h", "too long"),
            ("receive q --lease 0s", "must be at least 100ms"),
            ("receive q --lease 99ms", "must be at least 100ms"),
            ("queue create q --redeliver-after 99ms", "redeliver_after_ms: 99 ms is shorter than the least"),
            ("receive q --max 0", "--max"),
            ("receive q --max many", "is not a valid integer"),
            ("send q x --partition -1", "--partition"),
            ("send q x --header nonsense", "write it as name=value"),
            ("send q x --delay 8d", "longer than the queue allows, 7d"),
            ("send bad/name x", "is no topic name"),
            ("queue create q --partitions many", "is not a valid integer"),
            ("queue create q --max-redeliveries -1", "neither a whole number nor none"),
            ("queue alter q", "name what is to be changed"),
            ("stats q -X nonsense", "write it as key=value"),
            ("queue list --zookeeper=", "no address given"),
            ("stats q --root kmq", "must start with /"),
            ("ack zzz", "is not a receipt"),
            ("nack 1.zzz", "can't be decoded"),
            ("extend 1.zzz", "Missing option '--lease'"),
            ("extend 1.WzFd --lease 5s", "has other fields"),
            *((f"dlq redrive q --zookeeper= --rate {rate}", "above 0") for rate in ("inf", "nan", "0", "-1")),
            ("dev up --brokers 2", "'2' is not one of"),
            ("stats q --config /nonexistent.toml", "No such file"),
        ],
    )
    def test_it_is_said_in_one_line(self, line, expected, capsys):
        assert run(line.split()) == 2
        shown = capsys.readouterr()
        assert not shown.out
        if expected is not None:
            assert expected in shown.err
            assert shown.err.startswith("kmq: error: ")
            assert shown.err.count("\n") == 1

    def test_an_unknown_setting_in_the_file_is_named(self, tmp_path, capsys):
        file = tmp_path / "kmq.toml"
        file.write_text('bootstap = "h:1"')
        assert run(["stats", "q", "--config", str(file)]) == 2
        assert "bootstap: unknown setting; did you mean bootstrap?" in capsys.readouterr().err

    def test_a_wrong_type_in_the_file_is_named(self, tmp_path, capsys):
        file = tmp_path / "kmq.toml"
        file.write_text("bootstrap = 9092")
        assert run(["stats", "q", "--config", str(file)]) == 2
        assert "bootstrap: 9092 is not of type str" in capsys.readouterr().err

    def test_an_unknown_kafka_setting_is_named_and_its_value_is_not(self, capsys):
        assert run(["stats", "q", "-X", "sasl.pasword=hunter2", "--zookeeper="]) == 2
        shown = capsys.readouterr().err
        assert "sasl.pasword" in shown
        assert "hunter2" not in shown

    def test_no_traceback_in_a_process_of_its_own(self):
        done = subprocess.run(
            [sys.executable, "-c", "from kmqpy.cli import main; main()", "ack", "zzz"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == "kmq: error: receipt: 'zzz' is not a receipt of kmqpy\n"


class TestClosedStreams:
    @staticmethod
    def with_closed(stream, *args):
        main = [sys.executable, "-c", "from kmqpy.cli import main; main()", *args]
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {stream}', "sh", *main], capture_output=True, text=True, check=False
        )

    @pytest.mark.parametrize(
        "command", ["send q", "ack", "nack", "extend --lease 5s", "dead-letter", "queue delete q"]
    )
    def test_of_the_issue_stdin(self, command):
        done = self.with_closed("<&-", *command.split())
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("kmq: error: ")
        assert done.stderr.count("\n") == 1

    def test_of_the_issue_stdout(self):
        assert self.with_closed(">&-", "--version").returncode == 0
        done = self.with_closed(">&-", "receive", "q")
        assert done.returncode == 2
        assert done.stderr.startswith("kmq: error: standard output is closed")

    def test_stderr(self):
        done = self.with_closed("2>&-", "ack", "zzz")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")

    def test_connections_do_not_get_their_numbers(self):
        code = """if True:
            import os, sys
            import kmqpy.cli
            sys.argv = ["kmq", "--version"]
            try:
                kmqpy.cli.main()
            finally:
                sys.exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)"""
        shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
        assert subprocess.run(shell, check=False).returncode == 0

    def test_a_table_without_stdout(self, monkeypatch):
        monkeypatch.setattr("sys.stdout", None)
        output.replace_closed_streams()
        output.print_table(["a"], [[1]])
        output.print_json({})
        sys.stdout.close()


class TestWithoutTheExtra:
    @pytest.mark.parametrize("missing", ["click", "rich"])
    def test_it_says_the_one_line_to_run(self, missing):
        code = f"import sys; sys.modules['{missing}'] = None; from kmqpy.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == f"kmq: error: {MissingExtra('cli', 'kmq')}\n"
        assert 'pip install "kmqpy[cli]"' in done.stderr

    @pytest.mark.parametrize(
        "command",
        [
            ["pipeline", "q", "--out", "o", "--schema", "id long"],
            ["spark-jars"],
            ["spark-state", "q", "--table", "t"],
            ["spark-tracker", "--queue", "q"],
        ],
    )
    def test_of_spark(self, command):
        code = (
            "import importlib.util, sys; importlib.util.find_spec = lambda name: None;"
            f"sys.argv[1:] = {command}; from kmqpy.cli import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert 'run: pip install "kmqpy[spark]"' in done.stderr
        assert done.stderr.count("\n") == 1


class TestConnection:
    def test_later_layers_win(self, tmp_path, monkeypatch):
        file = tmp_path / "kmq.toml"
        file.write_text(
            'bootstrap = "file:1"\nzookeeper = "file:2"\nroot = "/file"\n[kafka]\na = "1"\nb = "1"\n'
        )
        monkeypatch.setenv("KMQ_ZOOKEEPER", "environment:2")
        monkeypatch.setenv("KMQ_ROOT", "/environment")
        found = given("--config", str(file), "--root", "/option", "-X", "b=2")
        hosts, found = found.zookeeper.hosts, found.connection
        assert (found.bootstrap, hosts, found.root) == ("file:1", "environment:2", "/option")
        assert found.kafka == {"a": "1", "b": "2"}

    def test_options_stand_before_or_after_the_command(self):
        found = given("--bootstrap", "before:1", "-X", "a=1", "-o", "json", "--", "-X", "b=2")
        assert found.connection.bootstrap == "before:1"
        assert found.connection.kafka == {"a": "1", "b": "2"}
        assert found.json

    def test_after_the_command_wins(self):
        found = given("--bootstrap", "before:1", "-o", "json", "--", "--bootstrap", "after:1", "-o", "text")
        assert found.connection.bootstrap == "after:1"
        assert not found.json

    def test_the_file_can_be_named_by_the_environment(self, tmp_path, monkeypatch):
        file = tmp_path / "kmq.toml"
        file.write_text('bootstrap = "file:1"\n[tracker]\nworkers = 3\n')
        monkeypatch.setenv("KMQ_CONFIG", str(file))
        assert given().connection.bootstrap == "file:1"

    def test_settings_are_asked_of_a_registry_only_where_one_was_named(self):
        assert not given().has_registry
        assert given("--zookeeper", "h:1").has_registry
        assert not given("--zookeeper", "").has_registry

    def test_options_before_a_plug_in_reach_it(self):
        context = click.Context(kmq, info_name="kmq")
        with context:
            context.meta["kmqpy.given"] = {"bootstrap": "h:1", "kafka": ("a=1",)}
            kmq.get_command(context, "tracker")
        assert context.default_map == {"tracker": {"bootstrap": "h:1", "kafka": ("a=1",)}}


class TestAway:
    def look(self, text, *args):
        @click.command()
        @connected
        def look(cli: Cli) -> None:
            raise Unavailable(text)

        kmq.add_command(look)
        try:
            assert run(["look", *args]) == 2
        finally:
            del kmq.commands["look"]

    @pytest.mark.parametrize(("service", "name"), [("Kafka", "BOOTSTRAP"), ("ZooKeeper", "ZOOKEEPER")])
    def test_an_address_that_nobody_gave_is_said(self, service, name, capsys):
        self.look(f"{service} at 127.0.0.1:1 does not answer")
        assert f"answer; KMQ_{name} is not set; kmq dev up prints it" in capsys.readouterr().err
        self.look(f"{service} at h:1 does not answer", f"--{name.lower()}", "h:1")
        assert capsys.readouterr().err == f"kmq: error: {service} at h:1 does not answer\n"


class TestTracker:
    def test_of_the_issue_a_level_that_is_none_is_bad_use(self, capsys):
        assert run(["tracker", "--log-level", "LOUD"]) == 2
        shown = capsys.readouterr().err
        assert shown.startswith("kmq: error: Invalid value for '--log-level': 'LOUD' is not one of")
        assert shown.count("\n") == 1

    def test_of_the_issue_an_unknown_variable_is_named(self, monkeypatch, capsys):
        monkeypatch.setenv("KMQ_TRACKER_WORKRES", "3")
        assert run(["tracker", "--log-level", "error"]) == 2
        shown = capsys.readouterr().err
        assert "KMQ_TRACKER_WORKRES: unknown setting; did you mean KMQ_TRACKER_WORKERS?" in shown

    def test_variables_of_others_are_left_alone(self):
        service = {
            "KMQ_TRACKER_PORT": "tcp://10.0.0.1:9404",
            "KMQ_TRACKER_PORT_9404_TCP_ADDR": "10.0.0.1",
            "KMQ_TRACKER_SERVICE_HOST": "10.0.0.1",
            "KMQ_TRACKER_B_SERVICE_PORT_HTTP": "9404",
        }
        others = {"KMQ_TRACKERS": "1", "KMQ_BOOTSTRAP": "h:1"}
        assert _from_environment({**service, **others, "KMQ_TRACKER_WORKERS": "3"}) == {"workers": "3"}

    def test_every_setting_is_shown_with_what_it_is_by_default(self, capsys):
        assert run(["tracker", "--help"]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert "how soon a killed tracker is replaced [6s]" in shown
        assert "--http-port N their port; 0: any free one, -1: none [9404]" in shown
        assert "--tick-after, --use-now-for-redeliver" in shown


class TestPlugIns:
    def test_one_that_can_not_be_loaded_breaks_only_itself(self, monkeypatch, capsys):
        missing = EntryPoint("broken", "no_such_package:command", plugins.GROUP)
        monkeypatch.setattr("kmqpy.cli.app.plugins", lambda: {"broken": missing})
        assert run(["--help"]) == 0
        assert "broken" in capsys.readouterr().out
        assert run(["broken", "--now"]) == 2
        shown = capsys.readouterr().err
        assert "command 'broken' can't be loaded: No module named 'no_such_package'" in shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", timedelta(milliseconds=500)),
        ("1.5s", timedelta(seconds=1.5)),
        ("5m", timedelta(minutes=5)),
        ("7d", timedelta(days=7)),
        ("0s", timedelta()),
    ],
)
def test_durations_have_units(text, expected):
    assert DURATION.convert(text, None, None) == expected


def message(offset=1, **fields):
    """A message of Kafka at this offset."""
    record = Record(
        topic="q",
        partition=0,
        offset=offset,
        timestamp=(TIMESTAMP_LOG_APPEND_TIME, 5),
        **{"value": b"b", **fields},
    )
    return KafkaMessage(record, ReceiveContext(QueueSettings(name="q"), "an-id", 6, Telemetry(), None))


class TestOutput:
    def message(self, **fields):
        return as_object(message(**fields))

    def test_a_message_has_the_fields_of_the_documentation(self):
        found = message(key=b"k", headers=[("a", b"1")])
        assert as_object(found) == {
            "receipt": found.receipt,
            "queue": "q",
            "partition": 0,
            "offset": 1,
            "key": "k",
            "body": "b",
            "headers": {"a": "1"},
            "attempts": 1,
            "enqueued_ms": 5,
            "first_enqueued_ms": 5,
            "lease_until_ms": 6,
        }

    def test_what_is_no_text_is_base64(self):
        found = self.message(value=b"\xff\x00", key=b"\xfe", headers=[("count", b"\x01"), ("none", None)])
        assert found["body_base64"] == "/wA="
        assert "body" not in found
        assert found["key_base64"] == "/g=="
        assert found["headers"] == {"none": None}
        assert found["headers_base64"] == {"count": "AQ=="}

    def test_of_a_repeated_header_the_last_counts(self):
        found = self.message(headers=[("a", b"\xff"), ("a", b"2")])
        assert found["headers"] == {"a": "2"}
        assert "headers_base64" not in found

    def test_a_line_breaks_no_json(self, capsys):
        output.print_json(self.message(value="zwei\nZeilen ü".encode()))
        line = capsys.readouterr().out
        assert line.count("\n") == 1
        assert json.loads(line)["body"] == "zwei\nZeilen ü"

    def test_tables_are_not_cut_off_in_a_pipe(self, capsys):
        output.print_table(["a", "receipt"], [[1, "x" * 500], [None, "[bold]y"]])
        assert capsys.readouterr().out.splitlines() == [
            "a  receipt",
            "1  " + "x" * 500,
            "-  [bold]y",
        ]

    @pytest.mark.parametrize("text", FOREIGN, ids=ascii)
    def test_of_the_issue_tables_escape_what_others_wrote(self, text, capsys):
        output.print_table(["key", "reason"], [[text, f"a{text}b :boom:"]])
        shown = capsys.readouterr().out
        assert shown.removesuffix("\n").replace("\n", "").isprintable()
        assert shown.count("\n") == 2
        assert ascii(text)[1:-1] in shown
        assert ":boom:" in shown

    @pytest.mark.parametrize("text", FOREIGN, ids=ascii)
    def test_json_escapes_it_and_keeps_it(self, text, capsys):
        output.print_json({text: [f"grüße {text}"]})
        shown = capsys.readouterr().out.removesuffix("\n")
        assert shown.isprintable()
        assert json.loads(shown) == {text: [f"grüße {text}"]}
        assert "grüße" in shown

    @pytest.mark.parametrize("text", FOREIGN, ids=ascii)
    def test_lines_errors_and_warnings_escape_it(self, text, capsys, monkeypatch):
        output.print_text(f"queue {text}")
        output.warn(f"queue {text}")
        output.print_error(KmqError(f"queue {text}"))
        logger = logging.getLogger("kmqpy.test")
        # Not to pytest, which could not hand it on to the process that reports.
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "handlers", [_Lines()])
        logger.error("queue %s", text, extra={"reason": text})
        shown = capsys.readouterr()
        assert shown.out.count("\n") == 1
        assert shown.err.count("\n") == 3
        assert (shown.out + shown.err).replace("\n", "").isprintable()

    @pytest.mark.parametrize("form", ["text", "json"])
    @pytest.mark.parametrize("text", FOREIGN, ids=ascii)
    def test_logs_escape_it(self, text, form):
        try:
            raise KmqError(f"of {text}")
        except KmqError:
            record = logging.makeLogRecord(
                {"msg": "reason %s", "args": (text,), "levelname": "ERROR", "exc_info": sys.exc_info()}
            )
        record.reason = text
        formatter = logs.JsonFormatter() if form == "json" else logs.TextFormatter()
        shown = formatter.format(record)
        assert shown.replace("\n", "").isprintable()
        if form == "json":
            assert json.loads(shown)["reason"] == text
        else:
            assert ascii(text)[1:-1] in shown.splitlines()[0]

    @pytest.mark.parametrize(
        ("ms", "text"),
        [(0, "0ms"), (350, "350ms"), (1_000, "1s"), (4_250, "4.2s"), (60_000, "1m"), (86_400_000, "1d")],
    )
    def test_spans(self, ms, text):
        assert output.span(ms) == text

    @pytest.mark.parametrize("answer", ["n\n", "no\n", "", "\n", "yep\n", "y es\n"])
    def test_what_is_not_confirmed_is_refused(self, answer, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        with pytest.raises(click.UsageError, match=r"Delete it\? .* use --yes"):
            output.confirmed("Delete it?", yes=False)

    @pytest.mark.parametrize("answer", ["y\n", "YES\n", " y"])
    def test_what_is_confirmed_is_done(self, answer, monkeypatch):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        output.confirmed("Delete it?", yes=False)

    def test_nothing_is_read_where_yes_was_given(self, monkeypatch):
        monkeypatch.setattr("sys.stdin", None)
        output.confirmed("Delete it?", yes=True)
        with pytest.raises(click.UsageError, match="use --yes"):
            output.confirmed("Delete it?", yes=False)

    def test_a_lease_without_end_can_be_printed(self):
        assert output.when(2**63 - 1) == "never"
        assert output.distance(2**63 - 1).startswith("in ")


class TestSend:
    class Producer:
        """Sends what is not large; one that is, the broker refuses together with nothing or with others."""

        def __init__(self, error):
            self.error, self.sent = error, []

        def __call__(self, *_):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def send_many(self, bodies, **_):
            small = [body for body in bodies if body != b"large"]
            if len(small) == len(bodies):
                self.sent += small
            elif small and self.error is Unfinished:
                self.sent += small
                raise Unfinished("too large; 2 of these 3 messages were sent", 2)
            else:
                raise MessageError("too large")
            return [f"0-{at}" for at in range(len(bodies))]

    @pytest.mark.parametrize("error", [MessageError, Unfinished])
    @pytest.mark.parametrize("before", [[], [b"0"]])
    def test_nothing_is_sent_twice_when_one_is_too_large(self, before, error, monkeypatch, capsys):
        producer = self.Producer(error)
        monkeypatch.setattr("kmqpy.cli.messages.KmqProducer", producer)
        batches = [*([before] if before else []), [b"a", b"large", b"b"]]
        monkeypatch.setattr("kmqpy.cli.messages._lines", lambda: iter(batches))
        assert run(["send", "q", "--zookeeper", ""]) == 1
        assert producer.sent == [*before, b"a", b"b"]
        assert "too large" in capsys.readouterr().err


class TestReceive:
    class Clock:
        def __init__(self):
            self.now = 0.0

        def monotonic(self):
            return self.now

    class LateClient:
        """Is assigned partitions after a while; the message comes a second later."""

        def __init__(self, clock, joined_at):
            self.clock, self.joined_at = clock, joined_at

        def __call__(self, *_, **__):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        @property
        def partitions(self):
            return [0] if self.clock.now >= self.joined_at else []

        def receive(self, _max, *, wait, lease):
            if self.clock.now >= self.joined_at + 1:
                return [message()]
            self.clock.now += wait
            return []

        def flush(self):
            pass

    @pytest.mark.parametrize(
        ("joined_at", "wait", "comes"),
        [(0, "2s", True), (9, "2s", True), (9, "500ms", False), (99, "2s", False)],
    )
    def test_the_time_to_join_the_group_does_not_count(self, joined_at, wait, comes, monkeypatch, capsys):
        clock = self.Clock()
        monkeypatch.setattr("kmqpy.cli.messages.SYSTEM_CLOCK", clock)
        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", self.LateClient(clock, joined_at))
        assert run(["receive", "q", "--wait", wait, "--zookeeper", ""]) == 0
        shown = capsys.readouterr()
        assert bool(shown.out) == comes
        assert ("no message within" in shown.err) != comes
        assert clock.now < 20

    def test_follow_waits_for_as_long_as_it_takes(self, monkeypatch, capsys):
        clock = self.Clock()
        monkeypatch.setattr("kmqpy.cli.messages.SYSTEM_CLOCK", clock)
        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", self.LateClient(clock, 60))
        assert run(["receive", "q", "--follow", "--max", "1", "--wait", "1s", "--zookeeper", ""]) == 0
        assert capsys.readouterr().out.count("\n") == 1

    class Client(LateClient):
        """Has three messages, and notes what it is told of them."""

        def __init__(self):
            self.left = [message(offset) for offset in (1, 2, 3)]
            self.told = []

        @property
        def partitions(self):
            return [0]

        def receive(self, most, **_):
            taken, self.left = self.left[:most], self.left[most:]
            return taken

        def ack(self, *messages):
            self.told += [("ack", one.offset) for one in messages]

        def nack(self, *messages, count=True, **_):
            self.told += [("nack", one.offset, count) for one in messages]

    @pytest.mark.parametrize("ack", [[], ["--ack"]])
    @pytest.mark.parametrize("printed", [0, 1, 3])
    def test_what_could_not_be_printed_is_given_back_and_was_no_attempt(self, ack, printed, monkeypatch):
        client, shown = self.Client(), []

        def print_json(one):
            if len(shown) == printed < 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            shown.append(one["offset"])

        monkeypatch.setattr("kmqpy.cli.messages.KmqClient", lambda *_, **__: client)
        monkeypatch.setattr("kmqpy.cli.messages.print_json", print_json)
        code = run(["receive", "q", "--max", "3", *ack, "--zookeeper", ""])
        assert code == (0 if printed == 3 else 2)
        assert shown == [1, 2, 3][:printed]
        given_back = [one for one in client.told if one[0] == "nack"]
        assert given_back == [("nack", offset, False) for offset in [1, 2, 3][printed:]]
        acknowledged = [one for one in client.told if one[0] == "ack"]
        assert acknowledged == ([("ack", offset) for offset in shown] if ack else [])


class Opened:
    """Answers each call by its name; stands for Admin and KafkaDeadLetters, which are context managers."""

    def __init__(self, **answers):
        self.answers = answers

    def __call__(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        answer = self.answers[name]
        return lambda *_, **__: answer


class TestTables:
    """Each value stands under its heading."""

    @pytest.fixture
    def rows(self, monkeypatch, capsys):
        """`rows(command, where, answers)`: the cells of all that a command prints, line by line."""

        def rows(command, where, **answers):
            monkeypatch.setattr("kmqpy.cli.output.SYSTEM_CLOCK", Standing())
            monkeypatch.setattr(where, Opened(**answers))
            assert run([*command.split(), "--zookeeper", ""]) == 0
            return [re.split(" {2,}", line) for line in capsys.readouterr().out.splitlines()]

        return rows

    def test_stats(self, rows):
        counts = {"depth": 11, "in_flight": 12, "delayed": 13, "overdue": 14, "dead_letters": 15}
        counts |= {"exact": True, "oldest_ms": NOW_MS - 16_000}
        part = PartitionStats(partition=7, **counts, owner="t1", stored_offset=17)
        other = PartitionStats(partition=8, **{**counts, "exact": False, "oldest_ms": None})
        assert rows("stats q", "kmqpy.cli.options.Admin", stats=QueueStats.of("q", [part, other])) == [
            ["partition", "depth", "in flight", "delayed", "overdue", "dead", "oldest", "tracker", "offset"],
            ["7", "11", "12", "13", "14", "15", "16s ago", "t1", "17"],
            ["8", "~11", "12", "13", "14", "~15", "-", "-", "-"],
            ["total", "~22", "24", "26", "28", "~30", "16s ago"],
        ]

    def test_in_flight(self, rows):
        one = InFlightMessage(
            receipt="1.x",
            partition=3,
            offset=42,
            holder="me",
            since_ms=NOW_MS - 5_000,
            lease_until_ms=NOW_MS + 9_000,
            state=EntryState.RELEASED,
            reason="not now",
            attempts=2,
        )
        headings = ["partition", "offset", "state", "holder", "since", "lease ends", "attempts", "reason"]
        assert rows("in-flight q", "kmqpy.cli.options.Admin", in_flight=[one]) == [
            [*headings, "receipt"],
            ["3", "42", "released", "me", "5s ago", "in 9s", "2", "not now", "1.x"],
        ]

    def test_dead_letters(self, rows):
        one = KafkaDeadLetter(
            id="0-17",
            key=b"user-1",
            origin_topic="jobs",
            origin_partition=2,
            origin_offset=5,
            attempts=4,
            first_enqueued_ms=1_000,
            dead_since_ms=2_000,
            reason="nack: no",
            size=99,
        )
        first, dead = "1970-01-01T00:00:01.000Z", "1970-01-01T00:00:02.000Z"
        assert rows("dlq list q", "kmqpy.kafka.dead_letters.KafkaDeadLetters", list=[one]) == [
            ["id", "key", "attempts", "dead since", "first enqueued", "origin", "reason"],
            ["0-17", "user-1", "4", dead, first, "jobs 2-5", "nack: no"],
        ]

    def test_queues(self, rows):
        settings = QueueSettings(name="jobs", redeliver_after_ms=7_000, max_redeliveries=9)
        one = RegisteredQueue(settings, partitions=4, deleting=True)
        assert rows("queue list", "kmqpy.cli.options.Admin", list_queues=[one]) == [
            ["queue", "partitions", "redeliver after", "max redeliveries"],
            ["jobs", "4", "7s", "9", "deleting"],
        ]

    def test_a_queue_with_its_topics_and_trackers(self, rows):
        found = QueueDescription(
            settings=QueueSettings(name="jobs"),
            registered=True,
            deleting=False,
            partitions=1,
            topics=(TopicInfo("jobs__markers", "id-of-it", 6, 2),),
            owners={0: "t1"},
            offsets={0: 17},
        )
        shown = rows("queue describe jobs", "kmqpy.cli.options.Admin", describe_queue=found)
        topics, trackers = (next(row for row in shown if row[0] == name) for name in ("topic", "partition"))
        assert topics == ["topic", "partitions", "replicas", "id"]
        assert shown[shown.index(topics) + 1] == ["jobs__markers", "6", "2", "id-of-it"]
        assert trackers == ["partition", "tracker", "stored offset"]
        assert shown[shown.index(trackers) + 1] == ["0", "t1", "17"]
