"""The queue over any engine, where the contract suite does not look."""

import dataclasses
import os
import pickle
import subprocess
import sys
import threading
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints

import pytest

import kmqpy.testing
from kmqpy import Worker, queue_for
from kmqpy.errors import Closed, ConfigError, NotSupported, QueueNotFound, ReceiptError
from kmqpy.queue import Capabilities, storage_for
from kmqpy.storages.engine import ANY_TAKE, QueueRow
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.receipts import Receipts
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.telemetry.base import Telemetry
from kmqpy.testing import ManualClock, memory_storage


class Noted(Telemetry):
    def __init__(self):
        self.calls = []

    @contextmanager
    def sending(self, queue, headers):
        yield (*headers, ("trace", b"1"))
        self.calls.append(("send", queue))

    def received(self, queue, messages):
        self.calls.append(("received", len(messages)))

    def finished(self, queue, op, count=1):
        self.calls.append((op, count))

    def failed(self, queue, what, count=1):
        self.calls.append((what, count))


def opened(engine, clock, telemetry=None, **settings):
    storage = StoredStorage(engine, clock=clock, telemetry=telemetry)
    storage.create("q", **settings)
    return storage.open("q")


def test_telemetry_hears_of_everything_late_acknowledgements_too(clock):
    telemetry = Noted()
    queue = opened(MemoryEngine(clock), clock, telemetry)
    queue.send_many(["a", "b", "c", "d"], headers={"own": "1"})
    messages = queue.receive(wait=0)
    assert messages[0].headers == (("own", b"1"), ("trace", b"1"))
    queue.ack(messages[0])
    queue.ack(messages[:2])
    queue.extend(messages[2], lease=5)
    queue.nack(messages[2])
    queue.dead_letter(messages[3])
    assert telemetry.calls == [
        *[("send", "q")] * 4,
        ("send", 4),
        ("received", 4),
        ("ack", 1),
        ("ack", 1),
        ("late ack", 1),
        ("extend", 1),
        ("nack", 1),
        ("dead-letter", 1),
    ]


def test_messages_whose_take_took_too_long_are_given_back_and_not_handed_out(clock):
    class Slow(MemoryEngine):
        seconds = 20.0

        def take(self, *arguments):
            taken = super().take(*arguments)
            clock.advance(self.seconds)
            return taken

    engine = Slow(clock, patience=0.01)
    telemetry = Noted()
    queue = opened(engine, clock, telemetry, lease_ms=30_000, max_redeliveries=0)
    queue.send("x")
    assert queue.receive(wait=0) == []
    assert ("receive", 1) in telemetry.calls
    engine.seconds = 10
    (message,) = queue.receive(wait=0)
    assert message.attempts == 1
    assert message.lease_until_ms == clock.wall_ms() + 20_000


def test_a_copied_message_cannot_acknowledge_itself_but_its_receipt_can(clock):
    with memory_storage(clock) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.send("x")
        (message,) = queue.receive(wait=0)
        copied = pickle.loads(pickle.dumps(message))
        assert copied == message
        with pytest.raises(ReceiptError, match="no client of this process"):
            copied.ack()
        queue.ack(copied)
        assert queue.in_flight() == 0


def test_a_message_counts_by_its_receipt_where_another_queue_handed_it_out_or_it_was_changed(clock):
    with memory_storage(clock) as storage:
        for name in ("q", "other"):
            storage.create(name)
            storage.open(name).send_many(["x", "y"])
        queue, other = storage.open("q"), storage.open("other")
        first, second = queue.receive(wait=0)
        (theirs, _) = other.receive(wait=0)
        with pytest.raises(ReceiptError, match="one of queue 'other'"):
            queue.ack(theirs)
        with pytest.raises(ReceiptError, match="one of queue 'other'"):
            queue.ack(dataclasses.replace(first, receipt=theirs.receipt))
        storage.open("q").ack(first)  # another handle of the same queue
        queue.ack(dataclasses.replace(first, receipt=second.receipt))
        assert (queue.in_flight(), other.in_flight()) == (0, 2)


def test_sending_to_a_closed_queue_says_that_it_is_closed_whatever_is_sent(clock):
    with memory_storage(clock) as storage:
        storage.create("q")
        queue = storage.open("q")
        queue.close()
        with pytest.raises(Closed):
            queue.send(5, delay=-1)
        with pytest.raises(Closed):
            queue.send_many([], delay=-1)


def test_an_acknowledgement_in_a_transaction_must_not_be_late(clock):
    queue = opened(MemoryEngine(clock, capabilities=Capabilities(transactions=True)), clock)
    queue.send("x")
    (late,) = queue.receive(wait=0)
    clock.advance(30)
    (current,) = queue.receive(wait=0)
    with pytest.raises(ReceiptError, match=r"1 of 1 messages .* roll the transaction back"):
        queue.ack(late, transaction=object())
    queue.ack(current, transaction=object())
    assert queue.in_flight() == 0


def test_receipts_say_what_is_wrong_with_them():
    settings = StoredQueueSettings(name="q")
    ours = Receipts("storage", QueueRow("g1", settings))
    assert ours.parse(ours.make(5, 2)) == (5, 2)
    assert ours.make(5, ANY_TAKE).endswith(".5.any")
    assert ours.parse(ours.make(5, ANY_TAKE)) == (5, ANY_TAKE)
    others = {
        "of another storage": Receipts("other", QueueRow("g1", settings)),
        "of queue 'p', not of 'q'": Receipts("storage", QueueRow("g1", StoredQueueSettings(name="p"))),
        "was deleted": Receipts("storage", QueueRow("g2", settings)),
    }
    for told, one in others.items():
        with pytest.raises(ReceiptError, match=told):
            ours.parse(one.make(5, 2))
    for damaged in (
        "",
        ".1",
        ".1.2.",
        ".1.-1",
        ".1.-2",
        ".1.²",
        ".1." + "9" * 20,
        ".any.1",
        ".any.any",
        ".1.*",
    ):
        with pytest.raises(ReceiptError):
            ours.parse(ours.make(5, 2).removesuffix(".5.2") + damaged)


def test_a_memory_url_names_a_storage_of_this_process():
    url = "memory://unit-one?queue=q&lease_ms=5s&max_redeliveries=none"
    with queue_for(url) as queue, queue_for("memory://unit-one?queue=q") as same:
        queue.send("x")
        assert [one.body for one in same.receive(wait=0)] == [b"x"]
        assert same.default_lease == 5
    with pytest.raises(Closed):
        queue.size()
    with storage_for("memory://unit-one") as storage, storage_for("memory:") as other:
        assert storage.describe("q").in_flight == 1
        assert "q" not in other.list()


@pytest.mark.parametrize(
    ("url", "error", "told"),
    [
        ("memory://unit-two?queue=q&create=false", QueueNotFound, "no queue 'q'"),
        ("memory://unit-two?queue=q&create=perhaps", ConfigError, "create"),
        ("memory://unit-two?queue=q&lease=1", ConfigError, "did you mean lease_ms"),
        ("memory://unit-two?queue=q&lease_ms=1", ConfigError, "lease_ms: 1 ms"),
        ("memory://me:pass@unit-two?queue=q", ConfigError, "memory:"),
        ("memory:/path?queue=q", ConfigError, "memory:"),
        ("memory:", ConfigError, "names no queue"),
    ],
)
def test_a_memory_url_that_is_wrong_is_refused(url, error, told):
    with pytest.raises(error, match=told) as caught:
        queue_for(url)
    assert "pass" not in str(caught.value)


def test_settings_in_a_url_must_be_those_of_the_queue():
    queue_for("memory://unit-three?queue=q&max_redeliveries=5").close()
    queue_for("memory://unit-three?queue=q&max_redeliveries=5").close()
    with pytest.raises(ConfigError, match="max_redeliveries: the url says 6, the queue 'q' has 5; leave"):
        queue_for("memory://unit-three?queue=q&max_redeliveries=6")


def test_the_url_of_a_storage_names_no_queue():
    with pytest.raises(ConfigError, match="leave queue= out"):
        storage_for("memory:?queue=q")
    for setting in ("max_redeliveries=1", "create=true", "order=any"):
        name = setting.partition("=")[0]
        with pytest.raises(ConfigError, match=f"{name} is a setting of a queue"):
            storage_for(f"memory:?{setting}")


def test_storages_of_others_are_found_by_their_entry_point(monkeypatch):
    point = EntryPoint("mine", "test_stored_queue:open_mine", "kmqpy.storages")
    points = EntryPoints([point])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points.select(group=group))
    with queue_for("mine://h?queue=q") as queue:
        queue.send("x")
        assert queue.size() == 1
    with pytest.raises(NotSupported, match="did you mean mine"):
        queue_for("mnie://h?queue=q")


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("Mine", "test_stored_queue:open_mine", None),  # a url has its scheme in lower case
        ("mine", "no_such_module:open", "'no_such_module:open' .* can't be loaded: ModuleNotFoundError"),
        ("mine", "test_stored_queue:missing", "can't be loaded: AttributeError"),
        ("mine", "test_stored_queue", "is of type module; it must be a function"),
        (
            "mine",
            "test_stored_queue:opens_nothing",
            "returned an object of type NoneType, which is not a Storage",
        ),
        ("mine", "test_stored_queue:raises", "can't be opened: ZeroDivisionError"),
    ],
)
def test_a_broken_entry_point_is_one_clear_error(monkeypatch, name, value, told):
    points = EntryPoints([EntryPoint(name, value, "kmqpy.storages")])
    monkeypatch.setattr("importlib.metadata.entry_points", lambda *, group: points.select(group=group))
    url = "MINE://h?queue=q"
    if told is None:
        queue_for(url).close()
        return
    with pytest.raises(ConfigError, match=told):
        queue_for(url)
    with pytest.raises(ConfigError, match=told):
        storage_for("mine://h")


def opens_nothing(url, telemetry):
    return None


def raises(url, telemetry):
    return 1 // 0


def open_mine(url, telemetry):
    assert url.address == "h"
    storage = memory_storage()
    storage.create(url.queue)
    return storage


def test_a_worker_works_over_memory():
    done = threading.Event()
    seen = []

    def handle(message):
        seen.append((message.body, message.attempts))
        if message.attempts == 1:
            raise ValueError
        done.set()

    with queue_for("memory://unit-worker?queue=q") as queue:
        queue.send("x")
        with Worker(queue, handle, backoff=kmqpy.Backoff(0.01)):
            assert done.wait(60)
        assert seen == [(b"x", 1), (b"x", 2)]
        assert (queue.size(), queue.in_flight()) == (0, 0)


def test_void_entries_of_the_memory_engine_do_not_pile_up(clock):
    engine = MemoryEngine(clock)
    queue = opened(engine, clock)
    queue.send("x")
    (message,) = queue.receive(wait=0)
    for _ in range(1000):
        queue.extend(message, lease=60)
    assert len(engine._queues["q"].due._entries) < 100


def test_pytest_holds_the_storage_of_a_url_against_the_contract_wherever_kmqpy_is_installed(tmp_path):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:valkey"]
    few = ["-k", "test_bodies_come or no_receipt_of_the_queue"]
    (tmp_path / "test_own.py").write_text("def test_own(): pass")

    def passed(*arguments):
        ended = subprocess.run(
            [*command, *arguments], check=False, cwd=tmp_path, capture_output=True, text=True
        )
        return ended.stdout.splitlines()[-1] if ended.returncode == 0 else ended.stdout + ended.stderr

    assert "2 passed" in passed("--kmq-storage=memory://unit-plugin", *few)
    assert "1 passed" in passed()


def test_a_test_run_of_others_loads_nothing_of_kmqpy_but_its_errors():
    code = "import pytest, sys, kmqpy.pytest_plugin; print(*(one for one in sys.modules if 'kmqpy' in one))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert set(loaded.split()) == {"kmqpy", "kmqpy.errors", "kmqpy.pytest_plugin"}


def test_the_example_of_the_docstring_runs():
    text = kmqpy.testing.__doc__
    code = "\n".join(line.removeprefix("    ") for line in text.splitlines() if line.startswith("    "))
    exec(compile(code, "docstring", "exec"), {})


def test_headers_given_once_are_those_of_every_message(clock):
    queue = opened(MemoryEngine(clock), clock)
    queue.send_many(["a", "b"], headers=iter([("own", "1")]))
    assert [message.headers for message in queue.receive(wait=0)] == [(("own", b"1"),)] * 2


def test_who_is_interrupted_while_it_enters_a_queue_leaves_no_lock_behind(clock):
    class Interrupted(ManualClock):
        interrupts = False

        def wall_ms(self):
            if self.interrupts:
                raise KeyboardInterrupt
            return super().wall_ms()

        def monotonic(self):
            if self.interrupts:
                raise KeyboardInterrupt
            return super().monotonic()

    own = Interrupted()
    queue = opened(MemoryEngine(own), clock)
    own.interrupts = True
    with pytest.raises(KeyboardInterrupt):
        queue.size()
    own.interrupts = False
    found = []
    other = threading.Thread(target=lambda: found.append(queue.size()), daemon=True)
    other.start()
    other.join(60)
    assert found == [0]


def test_a_close_that_comes_just_before_a_take_is_noticed_at_once():
    engine = MemoryEngine()
    take = engine.take
    queue = opened(engine, ManualClock())

    def close_first(*arguments):
        queue.close()
        return take(*arguments)

    engine.take = close_first
    with pytest.raises(Closed):
        queue.receive(wait=100)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_has_memory_of_its_own():
    with storage_for("memory://forked") as storage:
        storage.create("q")
        with storage.open("q") as queue:
            queue.send("a")
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    status = 0 if storage_for("memory://forked").list() == [] else 2
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert queue.size() == 1


class FractionClock(ManualClock):
    """A ManualClock that is some microseconds ahead."""

    ahead_us = 0

    def monotonic(self):
        return super().monotonic() + self.ahead_us / 1_000_000


@pytest.mark.parametrize("fraction_us", [0, 1, 499, 501, 999])
def test_no_delay_and_no_lease_of_memory_is_shorter_than_asked(fraction_us):
    clock = FractionClock()
    with memory_storage(clock) as storage:
        storage.create("q", lease_ms=100)
        queue = storage.open("q")
        clock.ahead_us = fraction_us
        queue.send("x", delay=0.1)
        clock.advance(0.1)
        clock.ahead_us = fraction_us - 1  # a microsecond too early
        assert queue.receive(wait=0) == []
        clock.ahead_us = fraction_us
        clock.advance(0.001)
        assert len(queue.receive(wait=0)) == 1
        clock.advance(0.1)
        clock.ahead_us = fraction_us - 1
        assert queue.receive(wait=0) == []


@pytest.mark.parametrize("how", ["ack", "purge", "purge dead letters", "at most once"])
def test_memory_lets_go_of_the_bodies_of_what_is_finished(clock, how):
    with memory_storage(clock) as storage:
        storage.create("q", delivery="at-most-once" if how == "at most once" else "at-least-once")
        queue = storage.open("q")
        body = os.urandom(100)
        before = sys.getrefcount(body)
        queue.send(body)
        messages = [] if how == "purge" else queue.receive(wait=0)
        if how == "ack":
            queue.ack(messages)
        elif how == "purge":
            queue.purge()
        elif how == "purge dead letters":
            queue.dead_letter(messages)
            queue.dead_letters.purge()
        messages.clear()
        assert sys.getrefcount(body) == before


def test_a_wait_on_memory_may_be_longer_than_timers_can():
    with queue_for("memory:?queue=long-wait") as queue:
        sender = threading.Timer(0.05, queue.send, ["x"])
        sender.start()
        assert len(queue.receive(wait=1e12)) == 1
        sender.join()


def test_the_leases_that_could_not_be_extended_are_told_by_one_call(clock):
    calls = []

    class Counting(MemoryEngine):
        def extend(self, queue, takes, lease_ms):
            calls.append(len(takes))
            return super().extend(queue, takes, lease_ms)

    telemetry = Noted()
    queue = opened(Counting(clock), clock, telemetry)
    queue.send_many(["x"] * 1_000)
    messages = queue.receive(1_000)
    assert queue.extend(messages, lease=60) == []
    assert telemetry.calls[-1] == ("extend", 1_000)
    queue.ack(messages[::2])
    assert queue.extend(messages, lease=60) == [message.receipt for message in messages[::2]]
    assert telemetry.calls[-2:] == [("extend", 500), ("late extend", 500)]
    assert calls == [1_000, 1_000]
