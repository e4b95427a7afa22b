"""The pure parts of the benchmarks."""

import asyncio
import itertools
import json
import re
from types import SimpleNamespace

import pytest

from benchmarks import queue_load, report
from benchmarks.handlers import SIZE, Handlers, send_first, stamp
from benchmarks.lab import stamp_of, stamped
from benchmarks.peers import http_load, kmqpy_client
from benchmarks.peers.works import WINDOW, drain, shuffle_windows
from benchmarks.results import JVM, PLAIN, Case, Row, from_json, percentile, ratio, run_case, shown, to_json
from kmqpy.errors import Unavailable


def row(peer: str, *values: float, case: str = "small", metric: str = "speed", problem: str = "") -> Row:
    return Row(
        work="drain", case=case, metric=metric, unit="msg/s", peer=peer, values=list(values), problem=problem
    )


ROWS = [
    row(PLAIN, 900, 1000, 1300),
    row("kmqpy", 500),
    row(JVM, 40, 60, 50),
    row("share", problem="no broker"),
]


def test_ratios_are_of_medians_within_the_case_and_metric():
    kmqpy = ROWS[1]
    assert ratio(kmqpy, ROWS, PLAIN) == 0.5
    assert ratio(kmqpy, ROWS, JVM) == 10
    assert ratio(row("kmqpy", 500, case="large"), ROWS, PLAIN) is None
    assert ratio(row("kmqpy", 500, metric="p99"), ROWS, PLAIN) is None


def test_no_ratio_without_figures_or_to_zero():
    assert ratio(ROWS[3], ROWS, PLAIN) is None
    assert ratio(ROWS[1], ROWS, "share") is None
    assert ratio(ROWS[1], [row(PLAIN, 0)], PLAIN) is None


@pytest.mark.parametrize(
    ("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1), (0.5, 1), (99.5, 100)]
)
def test_percentile_is_one_of_the_values(percent, expected):
    assert percentile([float(n) for n in range(100, 0, -1)], percent) == expected


def test_percentile_of_one_value():
    assert percentile([7.0], 99) == 7


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.123, "0.12"), (9.87, "9.87"), (12.34, "12.3"), (1234567.8, "1,234,568"), (-0.5, "-0.50")],
)
def test_figures_have_the_digits_that_mean_something(value, text):
    assert shown(value) == text


def test_peers_take_turns_and_one_that_fails_ends_alone():
    calls: list[str] = []

    def good() -> dict[str, float]:
        calls.append("good")
        return {"speed": float(len(calls)), "rss": 5.0}

    def bad() -> dict[str, float]:
        calls.append("bad")
        raise RuntimeError("no\nbroker")

    case = Case(
        work="drain", name="small", metrics={"speed": "msg/s"}, peers={"bad": bad, "good": good}, repeats=3
    )
    failed, done = run_case(case)
    assert calls == ["bad", "good", "good", "good"]
    assert (failed.values, failed.problem) == ([], "no broker")
    assert (done.values, done.extra, done.problem) == ([2.0, 3.0, 4.0], {"rss": [5.0] * 3}, "")


def test_peers_turns_are_interleaved():
    calls: list[str] = []

    def peer(name: str):
        def turn() -> dict[str, float]:
            calls.append(name)
            return {"speed": 1.0}

        return turn

    run_case(Case(work="w", name="c", metrics={"speed": "x"}, peers={n: peer(n) for n in "abc"}, repeats=2))
    assert "".join(calls) == "abcabc"


def test_the_table_has_spread_ratios_and_problems():
    lines = report.table(ROWS).splitlines()
    assert lines[0] == "drain: small"
    plain = next(line for line in lines if line.startswith(PLAIN))
    assert plain.split()[-6:] == ["msg/s", "900", "1,000", "1,300", "1.00", "20.0"]
    share = lines.index(next(line for line in lines if line.startswith("share")))
    assert lines[share].split()[1:] == ["msg/s", *"-----"]
    assert lines[share + 1].strip() == "no broker"


def test_markdown_of_json_that_was_written_and_read():
    meta = {
        "when": "2026-01-02",
        "cores": 2,
        "system": "Linux",
        "python": "3.11",
        "confluent-kafka": "2",
        "kafka": "4",
    }
    data = json.loads(json.dumps(to_json(meta, ROWS)))
    assert from_json(data) == (meta, ROWS)
    text = report.markdown(data)
    assert "up to 3 turns" in text
    assert f"| drain: msg/s | {PLAIN} | kmqpy | {JVM} | share |" in text
    assert "| small | 1,000 | 500 | 50.0 | - |" in text


META = {
    "quick": True,
    "when": "2026-01-02",
    "cores": 2,
    "system": "x",
    "python": "3",
    "confluent-kafka": "2",
    "kafka": "4",
}


def test_cases_with_few_peers_in_common_have_tables_of_their_own():
    def workers(case: str, *peers: str) -> list[Row]:
        return [
            Row(work="workers", case=case, metric=metric, unit=metric, peer=peer, values=[value])
            for peer in peers
            for metric, value in (("p50", 3.0), ("p99", 9.0))
        ]

    rows = [
        *workers("a", "kmqpy", "celery", "rq"),
        *workers("b", "kmqpy", "rq"),
        *workers("c", "kmqpy", "huey"),
    ]
    text = report.markdown(to_json(META, rows))
    assert text.count("| workers: p50, below it p99 | ") == 2
    assert "| b | 3.00<br>9.00 | - | 3.00<br>9.00 |" in text
    assert "| kmqpy | huey |" in text


def test_a_page_leaves_rows_out_and_says_once_what_is_the_same():
    rows = [
        Row(work="drain", case=case, metric="m", unit="u", peer=peer, values=[value])
        for case, value in (("small, 4 partitions", 1.0), ("large, 4 partitions", 2.0), ("huge, idle", 3.0))
        for peer in ("kmqpy", "own statements")
    ]
    shown = report.without(to_json(META, rows), re.compile("^drain: huge|: own statements$"))
    assert report.markdown(shown, shown).splitlines() == [
        "2026-01-02, as above. One turn.",
        "",
        "| drain, 4 partitions: u | kmqpy |",
        "|---|---:|",
        "| small | 1.00 |",
        "| large | 2.00 |",
    ]
    assert "as above" not in report.markdown(shown, {"meta": {**META, "python": "4"}})


def test_the_summary_has_a_line_for_each_peer_and_says_what_is_missing():
    columns = {"fast": ("drain", str.lower, "speed"), "late": ("drain", str.lower, "p50")}
    lines = report.summary(to_json(META, ROWS), {"Small": ("kmqpy", "share")}, columns).splitlines()
    assert lines[:4] == [
        "| | fast | late |",
        "|---|---:|---:|",
        "| Small: kmqpy | 500 | - |",
        "| Small: share | - | - |",
    ]
    assert lines[-1] == "2026-01-02, x, 2 cores, small sizes; one run."


def test_a_work_that_was_measured_again_later_stands_there_alone():
    other = Row(work="bulk", case="c", metric="m", unit="u", peer="kmqpy")
    older, newer = to_json({"when": "2026-01-02"}, [*ROWS, other]), to_json({"when": "2026-01-03"}, ROWS)
    found = report.newest({"old": older, "new": newer})
    assert [row["work"] for row in found["old"]["rows"]] == ["bulk"]
    assert found["new"] == newer


def test_handlers_do_not_time_the_first_tenth():
    handlers = Handlers({"ms": 0, "messages": 20, "rate": 0})
    for _ in range(20):
        assert not handlers.done.is_set()
        handlers.handle(b"")
    assert handlers.figures()["handled_per_s"] > 0


def test_a_backlog_is_sent_in_batches_and_stamps_are_ages(monkeypatch):
    sent: list[int] = []
    send_first({"messages": 250, "rate": 0}, lambda bodies: sent.append(len(bodies)))
    assert sent == [100, 100, 50]
    monkeypatch.setattr("benchmarks.handlers.subprocess.run", lambda *_, **__: None)
    handlers = Handlers({"ms": 0, "messages": 2, "rate": 1})
    bodies: list[str] = []
    send_first({"messages": 2, "rate": 1000, "is_sender": True}, bodies.extend)
    for body in (stamp(), *bodies):
        assert len(body) == SIZE
        handlers.handle(body.encode())
    assert 0 <= handlers.figures()["p50_ms"] < 10_000


def test_only_what_stands_between_the_markers_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    for _ in range(2):
        report.put_between_markers(page, "new")
        assert page.read_text() == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"


@pytest.mark.parametrize("text", ["", report.BEGIN, report.END, f"{report.END} {report.BEGIN}"])
def test_a_page_without_the_markers_is_refused(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="bench: begin"):
        report.put_between_markers(page, "new")
    assert page.read_text() == text


def test_a_queue_is_warmed_up_and_keeps_its_depth(monkeypatch):
    ticks = itertools.count()  # each look at the clock takes 10 ms
    monkeypatch.setattr(queue_load, "time", SimpleNamespace(monotonic=lambda: next(ticks) / 100))
    calls: list[str] = []
    held: list[int] = list(range(50))

    class Worker:
        def put(self, count):
            calls.append("put")
            held.extend(range(count))

        def take(self, count):
            calls.append("take")
            return [held.pop() for _ in range(min(count, len(held)))]

        def finish(self, taken):
            assert taken

        def close(self):
            calls.append("close")

    figures = queue_load.measure(Worker, takers=1, batch=10, seconds=1)
    assert min(figures.values()) > 0
    assert calls[:4] == ["put", "take", "put", "take"]
    assert calls[-1] == "close"
    assert len(held) == 50


def test_stamped_bodies():
    body = stamped(7, 123456789, 100)
    assert len(body) == 100
    assert stamp_of(body) == (7, 123456789)


def test_windows_are_shuffled_each_by_itself():
    batch = list(range(2 * WINDOW + 10))
    mixed = shuffle_windows(batch)
    assert mixed != batch
    for first in range(0, len(batch), WINDOW):
        assert sorted(mixed[first : first + WINDOW]) == batch[first : first + WINDOW]


def test_a_drain_counts_what_comes_after_the_first_tenth():
    class Peer:
        confirmed = False
        acknowledged = 0

        def take(self) -> list[bytes]:
            return [b"xx"] * 30

        def bodies(self, batch: list[bytes]) -> list[bytes]:
            return batch

        def ack(self, batch: list[bytes], *, shuffled: bool) -> None:
            assert shuffled
            self.acknowledged += len(batch)

        def confirm(self) -> None:
            self.confirmed = True

    peer = Peer()
    found = drain(peer, {"messages": 200, "random": True})
    assert peer.confirmed
    assert peer.acknowledged == 210
    assert found["messages"] == 180
    assert found["body_bytes"] == 420
    assert found["messages_per_s"] == found["messages"] / found["seconds"]


class Acknowledging:
    """A client that was given 300 messages, and counts the acks that wait and those that don't."""

    fails = False
    made: "Acknowledging"

    def __init__(self, options: dict[str, object]) -> None:
        self.client = self
        self.waited = self.others = 0
        Acknowledging.made = self

    def take(self) -> list[str]:
        return ["m"] * 300

    def ack(self, *messages, confirmed: bool = False, shuffled: bool = False) -> None:
        if not confirmed:
            self.others += len(messages[0])
            return
        self.waited += 1
        if self.fails:
            raise Unavailable("not confirmed")

    def close(self) -> None:
        pass


WAITING = {"batch": 300, "threads": 2, "rate": 0, "warm_up_s": 0.0, "seconds": 0.05}


@pytest.mark.parametrize("rate", [0, 10_000])
def test_acks_that_wait_are_timed_beside_those_that_do_not(monkeypatch, rate):
    monkeypatch.setattr(kmqpy_client, "Client", Acknowledging)
    found = kmqpy_client.wait({**WAITING, "rate": rate})
    assert len(found["delays_ms"]) == Acknowledging.made.waited > 0
    assert found["others_per_s"] == Acknowledging.made.others / 0.05
    assert bool(Acknowledging.made.others) == bool(rate)


def test_an_ack_that_waits_in_vain_leaves_no_figure(monkeypatch):
    monkeypatch.setattr(kmqpy_client, "Client", Acknowledging)
    monkeypatch.setattr(Acknowledging, "fails", True)
    with pytest.raises(Unavailable):
        kmqpy_client.wait(WAITING)


def test_a_load_of_http_counts_what_all_connections_have_done():
    did = []

    async def do(_):
        await asyncio.sleep(0)
        did.append(10)
        return 10

    done, _ = asyncio.run(http_load._until([1, 2, 3], do, 60.0, 90))
    assert done == sum(did) >= 90
