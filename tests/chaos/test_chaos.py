"""`make chaos` in small, the checker by itself, and what it must catch."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.message import Message

from . import clocks, controls, journal
from .children import LateAcks
from .claims import ClaimOrder, LateAckOrder
from .judge import Seen, Stored, concerned, judge, silence
from .proxy import Cut, Proxy
from .schedule import FULL, LEVELS, QUICK, TINY, Kind, load_s, schedule
from .stage import ROOT

# --- the checker ------------------------------------------------------------------------------------


def good() -> Seen:
    """Message 1 was acknowledged; 2 was dropped, copied, acknowledged; 3 was dropped and dead-lettered."""
    seen = Seen(attempted={1, 2, 3}, sent={1, 2, 3}, acked={1, 2})
    seen.records = {(0, n): Stored(n, (0, n)) for n in (1, 2, 3)}
    seen.records[0, 5] = Stored(2, (0, 2))
    seen.dead = [Stored(3, (0, 3))]
    seen.taken = set(seen.records)
    seen.ended = {(0, 1), (0, 5)}
    seen.moved.update([(0, 2), (0, 3)])
    seen.handed_out.update(list(seen.records))
    seen.delivered.update({1: 1, 2: 2, 3: 1})
    return seen


def lost(seen: Seen) -> None:
    del seen.delivered[1]


def unfinished(seen: Seen) -> None:
    seen.ended.remove((0, 5))
    seen.taken.remove((0, 5))


def stuck(seen: Seen) -> None:
    seen.ended.remove((0, 5))


def unexpected(seen: Seen) -> None:
    seen.delivered[99] = 1


def sent_twice(seen: Seen) -> None:
    seen.records[0, 9] = Stored(1, (0, 9))


def tracker_duplicate(seen: Seen) -> None:
    seen.records[0, 9] = Stored(2, (0, 2))


def moved_twice(seen: Seen) -> None:
    tracker_duplicate(seen)
    seen.moved[0, 2] += 1


def second_dead_letter(seen: Seen) -> None:
    seen.dead.append(Stored(3, (0, 3)))


def missing_copy(seen: Seen) -> None:
    del seen.records[0, 5]
    seen.ended.add((0, 2))


def wrong_copy(seen: Seen) -> None:
    seen.records[0, 5] = Stored(1, (0, 2))


def ended_by_nobody(seen: Seen) -> None:
    seen.acked.remove(1)


def second_delivery(seen: Seen) -> None:
    seen.handed_out[0, 1] += 1


def undecodable(seen: Seen) -> None:
    seen.undecodable += 1


def not_there(seen: Seen) -> None:
    seen.moved[0, 77] += 1


def not_given_up(seen: Seen) -> None:
    seen.log_start[0] = 4
    seen.deleted.add((0, 0))


def copied_after_ack(seen: Seen) -> None:
    seen.copied_after_ack.add((0, 2))


def handed_out_late(seen: Seen) -> None:
    seen.handed_out_late.add((0, 5))


@pytest.mark.parametrize(
    ("fault", "finding"),
    [
        (lost, "lost: 1"),
        (unfinished, "unfinished: 1"),
        (stuck, "stuck: 1"),
        (unexpected, "unexpected: 1"),
        (sent_twice, "sent twice: 1"),
        (tracker_duplicate, "tracker duplicates: 1"),
        (moved_twice, "tracker duplicates: 1"),
        (second_dead_letter, "tracker duplicates: 1"),
        (missing_copy, "missing copies: 1"),
        (wrong_copy, "wrong copies: 1"),
        (ended_by_nobody, "acks of nobody: 1"),
        (second_delivery, "consumer duplicates: 1"),
        (undecodable, "undecodable: 1"),
        (not_there, "not there: 1"),
        (not_given_up, "not given up: 1"),
        (copied_after_ack, "copied after ack: 1"),
        (handed_out_late, "handed out late: 1"),
    ],
)
def test_the_checker_finds(fault, finding):
    seen = good()
    assert judge(seen).problems == []
    fault(seen)
    assert any(problem.startswith(finding) for problem in judge(seen).problems), judge(seen).problems


def test_a_second_copy_of_a_message_that_was_taken_twice_is_a_finding():
    seen = good()
    moved_twice(seen)
    seen.taken.add((0, 9))
    seen.ended.add((0, 9))
    seen.lives[0, 2] = 2
    verdict = judge(seen)
    assert verdict.counts["taken_again"] == 1
    assert verdict.found == {"tracker_duplicates": [(0, 2)]}
    assert concerned(seen, [(0, 2)]) == concerned(seen, [2]) == {(0, 2), (0, 5), (0, 9)}


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("take claim end", set()),
        ("take claim ack end", set()),
        ("take claim end ack", set()),
        ("take ack end", set()),
        ("take ack claim end", {(0, 7)}),
        ("take ack take claim end", set()),
        ("take ack claim take end", set()),
        ("take claim ack claim end", {(0, 7)}),
    ],
)
def test_an_ack_before_the_claim_is_told_from_one_behind_it(log, found):
    order = ClaimOrder()
    markers = {
        "take": Marker(0, 7, Op.TAKE, 500),
        "ack": Marker(0, 7, Op.END),
        "end": Marker(0, 7, Op.END, by_tracker=True),
    }
    for at, word in enumerate(log.split()):
        if word == "claim":
            order.read_claim(0, at, naming_tick(0, CLAIM, [6, 7])[2])
        else:
            order.read_marker((0, 7), markers[word], at)
    assert order.copied == found


@pytest.mark.parametrize(
    ("log", "found"),
    [
        ("take claim end copy's-take", set()),
        ("take claim end ack copy's-take", {(0, 9)}),
        ("take claim ack end copy's-take", {(0, 9)}),
        ("take ack claim end copy's-take", set()),
        ("take claim end copy's-take ack", set()),
        ("take claim end copy's-take copy's-end ack copy's-copy's-take", {(0, 12)}),
    ],
)
def test_a_copy_that_was_taken_behind_a_late_ack_is_found(log, found):
    order = LateAckOrder({"chaos": 0})
    markers = {
        "take": (Marker(0, 7, Op.TAKE, 500), []),
        "ack": (Marker(0, 7, Op.END), []),
        "end": (Marker(0, 7, Op.END, by_tracker=True), [(COPY, b"0:9")]),
        "copy's-take": (Marker(0, 9, Op.TAKE, 500), []),
        "copy's-end": (Marker(0, 9, Op.END, by_tracker=True), [(COPY, b"0:12")]),
        "copy's-copy's-take": (Marker(0, 12, Op.TAKE, 500), []),
    }
    for at, word in enumerate(log.split()):
        if word == "claim":
            order.read_claim("chaos", 0, at, naming_tick(0, CLAIM, [6, 7])[2])
        else:
            marker, headers = markers[word]
            order.read_marker("chaos", marker, at, headers)
    assert set(order.copies_after_late_ack()) == found


def test_what_was_ended_below_the_start_of_the_log_is_not_counted_against_its_copies():
    seen = good()
    seen.log_start[0] = 3
    for offset in (1, 2):
        del seen.records[0, offset]
    seen.deleted_bodies.add(1)
    assert judge(seen).problems == []


def test_what_was_acknowledged_and_deleted_after_that_is_finished():
    seen = good()
    seen.log_start[0] = 2
    del seen.records[0, 1]
    assert judge(seen).problems == []
    seen.acked.remove(1)
    assert judge(seen).found["unfinished"] == [1]


def test_what_an_interruption_may_cost_is_no_finding():
    seen = good()
    second_delivery(seen)
    seen.interruptions, seen.max_in_flight = 1, 1
    assert judge(seen).problems == []
    assert judge(seen).counts["consumer_duplicates"] == 1


def test_silence_is_the_longest_gap_of_any_partition_that_begins_in_time():
    assert silence([[0, 1_000, 1_500], [1_200, 9_000]], 500, 2_000) == 7.8
    assert silence([[0, 1_000, 1_500, 9_000]], 500, 1_200) == 0.5
    assert silence([[100]], 500, 2_000) is None


# --- the processes ----------------------------------------------------------------------------------


def test_late_acks_that_are_due_at_the_same_moment_are_all_made():
    late = LateAcks()
    for at_s, name in ((5.0, "0-7"), (5.0, "1-7"), (4.0, "0-8")):
        late.add(at_s, message(name))
    assert list(late.due(4.0)) == []
    assert [one.id for one in late.due(6.0)] == ["0-8", "0-7", "1-7"]
    assert not late


def message(name: str) -> Message:
    return Message(
        queue="chaos",
        id=name,
        body=b"1",
        headers=[],
        attempts=1,
        enqueued_ms=0,
        first_enqueued_ms=0,
        lease_until_ms=0,
        receipt="",
    )


# --- the schedule -----------------------------------------------------------------------------------


def test_a_wrong_clock_is_that_of_everything_but_the_journal(monkeypatch):
    for name in ("time", "time_ns"):
        monkeypatch.setattr(time, name, getattr(time, name))  # and back at the end
    clocks.shift(-180)
    assert journal.time_ns() // 1_000_000 - SYSTEM_CLOCK.wall_ms() == pytest.approx(180_000, abs=5_000)
    assert clocks.spread(120, 4) == [0, -120, 120, 0]


def test_a_seed_fixes_the_schedule():
    assert schedule(QUICK, 1) == schedule(QUICK, 1) != schedule(QUICK, 2)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_has_every_fault_and_strikes_nothing_twice_at_once(name, seed):
    level = LEVELS[name]
    faults = schedule(level, seed)
    done = [tuple(one.kind for one in fault.all) for fault in faults]
    assert {kind: done.count((kind,)) for kind in Kind} == level.faults
    assert Counter(pair for pair in done if len(pair) > 1) == level.pairs
    free: dict[str, float] = {}
    for fault in faults:
        assert fault.at_s >= max(free.get(one, 0.0) for one in fault.strikes)
        free |= dict.fromkeys(fault.strikes, fault.free_at_s)
    ends = [one.at_s + one.hold_s for fault in faults for one in fault.all]
    assert load_s(level, faults) > max(ends)


def test_two_faults_at_a_time_overlap_and_strike_the_same_tracker():
    for first, second in (fault.all for fault in schedule(FULL, 1) if fault.beside):
        assert first.at_s <= second.at_s < first.at_s + first.hold_s
        if first.kind is Kind.ZOOKEEPER_CUT:
            assert (second.kind, second.target) == (Kind.TRACKER_PAUSE, first.target)


def test_the_full_run_is_what_was_asked_for_and_takes_less_than_an_hour():
    assert FULL.messages == 1_000_000
    assert load_s(FULL, schedule(FULL, 1)) < 55 * 60


# --- the proxy --------------------------------------------------------------------------------------


def test_the_proxy_cuts_and_heals():
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy() as proxy:

        def echo() -> None:
            with contextlib.suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    with connection, contextlib.suppress(ConnectionError):
                        while data := connection.recv(100):
                            connection.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        gate = proxy.gate()
        port = proxy.listen(gate, lambda: server.getsockname()[1])

        def talk(connection: socket.socket, text: bytes) -> bytes:
            connection.sendall(text)
            return connection.recv(100)

        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            assert talk(connection, b"one") == b"one"
            gate.cut(Cut.BLACKHOLE)
            connection.settimeout(0.3)
            with pytest.raises(TimeoutError):
                talk(connection, b"two")
            gate.heal()
            assert connection.recv(100) == b"two"
            gate.cut(Cut.REFUSE)
            with pytest.raises(ConnectionResetError):
                connection.recv(100)
        with (  # the reset may come as early as connect() itself
            pytest.raises(ConnectionResetError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        ):
            talk(connection, b"three")
        gate.heal()
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            assert talk(connection, b"four") == b"four"


# --- real servers -----------------------------------------------------------------------------------

_CAUGHT_AS = {
    "no-start-wait": "unfinished: ",
    "no-fencing": "tracker duplicates: ",
    "safe-offset": "unfinished: ",
    "two-sends": "tracker duplicates: ",
    "no-late-look": "handed out late: ",
    "late-end-txn": "tracker duplicates: ",
}


@pytest.mark.breadth
@pytest.mark.parametrize("name", controls.SCENARIOS)
def test_the_checker_catches(cluster, zookeeper, tmp_path, name):
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    for attempt in range(3):  # a busy machine may let the moment pass
        folder = tmp_path / str(attempt)
        folder.mkdir()
        caught = controls.run(name, connection, zookeeper, folder, sabotaged=True).problems
        if any(problem.startswith(_CAUGHT_AS[name]) for problem in caught):
            (evidence,) = folder.glob("*/evidence-*.json")
            ops = {record.get("op") for record in json.loads(evidence.read_text())["records"]}
            assert None in ops  # a message, not a marker
            assert name == "no-start-wait" or "take" in ops
            return
    pytest.fail(f"not caught: {caught}")


@pytest.mark.breadth
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("two-sends", ""),
        ("late-end-txn", ""),
        pytest.param("late-end-txn", "producers-used-on", marks=pytest.mark.breadth),
    ],
)
def test_with_its_safeguard_there_is_nothing_to_catch(cluster, zookeeper, tmp_path, name, changes):
    """Against a late EndTxn there are two, and either is enough here."""
    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    found = controls.run(name, connection, zookeeper, tmp_path, sabotaged=False, changes=changes)
    assert found.problems == []


@pytest.mark.breadth
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_chaos(tmp_path):
    command = [sys.executable, "-m", "tests.chaos", "run", "--tiny", "--seed=3643", f"--out={tmp_path}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    report = json.loads((tmp_path / "report.json").read_text())
    main, second = report["queues"]["chaos"], report["queues"]["chaos-second"]
    assert main["sent"] >= TINY.messages
    assert min(main["copies"], main["dead_letters"], second["lost_to_retention"]) > 0
    assert set(report["recovery"]) == {*Kind, *(" + ".join(pair) for pair in TINY.pairs)}
    assert min(by_api["END_TXN"][0] for by_api in report["held"].values()) > 0
