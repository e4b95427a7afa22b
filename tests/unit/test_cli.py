"""The command line without servers: help, arguments, addresses, plug-ins."""

import re
import subprocess
import sys
from contextlib import nullcontext
from datetime import timedelta
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from kmqpy.cli import plugins
from kmqpy.cli.app import kmq, run
from kmqpy.cli.options import DURATION, Cli, connected, connected_to_any, queue_argument
from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.kafka.librdkafka import new_producer
from kmqpy.kafka.settings import KafkaConnection
from tracker.command import _from_environment

pytestmark = pytest.mark.usefixtures("own_environment")


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


def test_the_guide_names_every_command_that_asks_before_it_deletes():
    asking = {name for name, one in ALL.items() if any("--yes" in option.opts for option in one.params)}
    guide = (Path(__file__).parents[2] / "docs/guide.md").read_text()
    named = guide.partition("## Commands that delete")[2].partition(" first\n")[0]
    assert set(re.findall(r"`(kmq [a-z ]+)(?: --[a-z]+)?`", named)) == asking


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
        assert re.search(r"^ +Examples?:$", shown, re.MULTILINE), "the example's lines stay lines"
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
            ("queue lst", "'lst' is not a command; did you mean list?; see kmq queue --help"),
            ("dev start", "'start' is not a command; kmq dev has up; see kmq dev --help"),
            ("stats", "Missing argument 'QUEUE'"),
            ("stats q --bogus", "No such option"),
            ("queue create q --order group", "did you mean --set order=… with --queue-url?"),
            ("queue create --name q", "No such option '--name'; see kmq queue create --help"),
            ("queue create q --retry-delays 1s", "did you mean --set retry_delays=…?"),
            ("queue alter q --dedup-window 1m", "did you mean --set dedup_window_ms=… with --queue-url?"),
            ("stats q --config /no/such.toml", "No such file or directory; --config or KMQ_CONFIG names it"),
            ("trace nothing", "is not a receipt of kmqpy; or give the queue and an id: kmq trace QUEUE 0-42"),
            ("stats q -o yaml", "'yaml' is not one of 'text', 'json'"),
            ("receive q --lease -5s", "must not be negative"),
            ("receive q --lease 5", "write it like 500ms, 30s"),
            ("receive q --lease 1e3s", "is not a duration"),
            ("receive q --lease 99999999999h", "too long"),
            ("receive q --lease 0s", "must be at least 100ms"),
            ("receive q --lease 99ms", "must be at least 100ms"),
            ("queue create q --lease 99ms", "lease_ms: 99 ms is shorter than the least"),
            ("receive q --max 0", "--max"),
            ("receive q --max many", "is not a valid integer"),
            ("send q x --partition -1", "--partition"),
            ("send q x --header nonsense", "write it as name=value"),
            ("send q x --delay 8d", "longer than the queue allows, 7d"),
            ("send bad/name x", "invalid topic name"),
            ("queue create q --partitions many", "is not a valid integer"),
            ("queue create q --max-redeliveries -1", "neither a whole number nor none"),
            ("queue alter q", "name what is to be changed"),
            ("stats q -X nonsense", "write it as key=value"),
            ("queue list --zookeeper=", "no address given"),
            ("stats q --root kmq", "must start with /"),
            ("ack zzz", "is not a receipt"),
            (
                "ack 2.WyJhIiwicSIsImciXQ.1.1",
                "is not a receipt of kmqpy on Kafka; name its storage (for kmq: --queue-url)",
            ),
            ("nack 1.zzz", "is damaged or cut off"),
            ("extend 1.zzz", "Missing option '--lease'; see kmq extend --help"),
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


class TestNearestQueue:
    def told(self, monkeypatch, registry, *args):
        monkeypatch.setattr("kmqpy.zookeeper.session.connect", lambda *_, **__: nullcontext())
        monkeypatch.setattr("kmqpy.kafka.admin.registry.Registry", lambda *_: registry)

        @click.command()
        @queue_argument
        @connected_to_any
        def look(cli: Cli, queue: str) -> None:
            raise QueueNotFound(f"no queue {queue}")

        monkeypatch.setitem(kmq.commands, "look", look)
        assert run(["look", *args]) == 2

    @pytest.mark.parametrize(
        ("names", "args", "hint"),
        [
            (["mails", "jobs"], ["jbos", "--zookeeper", "h:1"], "; did you mean jobs?"),
            (["mails"], ["jbos", "--zookeeper", "h:1"], ""),
            (["jbos", "jobs"], ["jbos", "--zookeeper", "h:1"], ""),  # registered; its topic is missing
            (["jobs"], ["jbos"], ""),
            (["jobs"], ["jbos", "--zookeeper", "h:1", "--queue-url", "memory:"], ""),
        ],
    )
    def test_it_is_named_where_there_is_a_registry(self, monkeypatch, capsys, names, args, hint):
        self.told(monkeypatch, SimpleNamespace(names=lambda: names), *args)
        assert capsys.readouterr().err == f"kmq: error: no queue jbos{hint}\n"

    def test_a_registry_that_is_away_hides_no_error(self, monkeypatch, capsys):
        def names():
            raise Unavailable("away")

        self.told(monkeypatch, SimpleNamespace(names=names), "jbos", "--zookeeper", "h:1")
        assert capsys.readouterr().err == "kmq: error: no queue jbos\n"


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
        assert "how soon others replace a killed tracker [6s]" in shown
        assert "--http-port N The port that serves these; 0: any free one, -1: none [9404]" in shown
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


def test_a_setting_that_librdkafka_does_not_know_says_which_names_there_are():
    with pytest.raises(
        ConfigError, match=r'"no\.such"; names are those of librdkafka, like fetch\.min\.bytes'
    ):
        new_producer(KafkaConnection(bootstrap="127.0.0.1:1", kafka={"no.such": "1"}), {})
