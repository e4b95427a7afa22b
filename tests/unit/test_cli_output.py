"""What commands print: fields of messages, escaped text of others, tables."""

import io
import json
import logging
import re
import sys

import click
import pytest
from kafka_messages import message

from kmqpy.cli import output
from kmqpy.cli.app import run
from kmqpy.cli.options import _ErrorLines
from kmqpy.cli.output import as_object
from kmqpy.core import logs
from kmqpy.core.clock import SystemClock
from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import QueueDetails
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.admin.stats import InFlightMessage, PartitionStats, QueueStats
from kmqpy.kafka.dead_letters import KafkaDeadLetter
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.topics import TopicInfo

pytestmark = pytest.mark.usefixtures("own_environment")


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


class TestOutput:
    def message(self, **fields):
        return as_object(message(**fields))

    def test_a_message_has_the_fields_of_the_documentation(self):
        found = message(key=b"k", headers=[("a", b"1")])
        assert as_object(found) == {
            "receipt": found.receipt,
            "queue": "q",
            "id": "0-1",
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
        monkeypatch.setattr(logger, "handlers", [_ErrorLines()])
        logger.error("queue %s", text, extra={"reason": text})
        shown = capsys.readouterr()
        assert shown.out.count("\n") == 1
        assert shown.err.count("\n") == 3
        assert (shown.out + shown.err).replace("\n", "").isprintable()

    @pytest.mark.parametrize("text", FOREIGN, ids=ascii)
    def test_the_line_of_an_exception_says_which_and_escapes_it(self, text, capsys):
        try:
            raise ValueError(f"of {text}")
        except ValueError:
            record = logging.makeLogRecord(
                {"name": "kmqpy.test", "msg": "it failed", "exc_info": sys.exc_info(), "queue": "q"}
            )
        _ErrorLines().emit(record)
        shown = capsys.readouterr().err
        assert shown.startswith("kmq: it failed queue=q: ValueError: of")
        assert shown.removesuffix("\n").isprintable()

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
        assert rows("stats q", "kmqpy.kafka.admin.admin.Admin", stats=QueueStats.of("q", [part, other])) == [
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
        assert rows("in-flight q", "kmqpy.kafka.admin.admin.Admin", in_flight=[one]) == [
            [*headings, "receipt"],
            ["3", "42", "released", "me", "5s ago", "in 9s", "2", "not now", "1.x"],
        ]

    def test_dead_letters(self, rows):
        one = KafkaDeadLetter(
            id="0-17",
            partition=1,
            offset=3,
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
        settings = QueueSettings(name="jobs", lease_ms=7_000, max_redeliveries=9)
        one = RegisteredQueue(settings, partitions=4, deleting=True)
        assert rows("queue list", "kmqpy.kafka.admin.admin.Admin", list_queues=[one]) == [
            ["queue", "partitions", "lease", "max redeliveries"],
            ["jobs", "4", "7s", "9", "deleting"],
        ]

    def test_a_queue_with_its_topics_and_trackers(self, rows):
        found = QueueDetails(
            settings=QueueSettings(name="jobs"),
            registered=True,
            deleting=False,
            partitions=1,
            topics=(TopicInfo("jobs__markers", "id-of-it", 6, 2),),
            owners={0: "t1"},
            offsets={0: 17},
        )
        shown = rows("queue describe jobs", "kmqpy.kafka.admin.admin.Admin", describe_queue=found)
        topics, trackers = (next(row for row in shown if row[0] == name) for name in ("topic", "partition"))
        assert topics == ["topic", "partitions", "replicas", "id"]
        assert shown[shown.index(topics) + 1] == ["jobs__markers", "6", "2", "id-of-it"]
        assert trackers == ["partition", "tracker", "stored offset"]
        assert shown[shown.index(trackers) + 1] == ["0", "t1", "17"]
