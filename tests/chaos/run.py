"""One run: load and faults, then drain, then judgement."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kmqpy.errors import KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import QueueSettings

from .children import MAX_IN_FLIGHT
from .faults import Faults, SecondQueue
from .journal import Tail
from .judge import Seen, Silence, Verdict, judge, silence
from .observe import Times, keep_evidence, read_topics, take_in
from .schedule import Fault, Kind, Level, load_s, schedule
from .stage import PARTITIONS, Failed, Slot, Stage, until

_INTERRUPTIONS = {Kind.CONSUMER_KILL, Kind.CONSUMER_PAUSE}
_DRAIN_S = 120.0
_SAMPLE_S = 1.0
_SHOW_S = 5.0

Show = Callable[[str], None]


@dataclass
class Done:
    """A fault that was done; times in ms since 1970."""

    fault: Fault
    began_ms: int
    ended_ms: int
    silence: Silence = field(default_factory=lambda: Silence(None, None))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Result:
    """Everything that a report shows."""

    level: Level
    seed: int
    seconds: float
    load_began_ms: int
    load_ended_ms: int
    verdicts: dict[str, Verdict]
    problems: list[str]
    done: list[Done]
    held: dict[str, dict[str, tuple[int, int]]]
    times: Times

    @property
    def all_problems(self) -> list[str]:
        judged = [f"{name}: {text}" for name, verdict in self.verdicts.items() for text in verdict.problems]
        return [*judged, *self.problems]


class Events:
    """JSON lines, appended as things happen."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.write_text("")

    def add(self, event: str, **fields: Any) -> None:
        line = json.dumps({"ms": _now_ms(), "event": event, **fields})
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")


def run(
    level: Level,
    seed: int,
    out: Path,
    show: Show,
    *,
    late_acks: bool = True,
    lanes: bool = False,
    clocks_s: float = 0.0,
) -> Result:
    """One run; its queue has `late_acks`, and a retry lane and three priorities with `lanes`.

    Clocks are wrong by `clocks_s`.

    Raises Failed, or ClusterError, when the servers can't even be started.
    """
    for old in [*out.glob("*.journal"), *out.glob("*.log"), *out.glob("evidence-*.json")]:
        old.unlink()
    faults = schedule(level, seed)
    events = Events(out / "events.jsonl")
    events.add("start", level=level.name, seed=seed, messages=level.messages, faults=len(faults))
    show(f"{level.name}, seed {seed}: {level.messages:,} messages, {len(faults)} faults; starting servers")
    began = time.monotonic()
    settings = {"late_acks": late_acks, "retry_lane": lanes, "priorities": 3 if lanes else 1}
    with Stage(level, load_s(level, faults), out, settings, clocks_s=clocks_s) as stage:
        return _Run(stage, seed, faults, events, show, began).run()


class _Run:
    def __init__(
        self, stage: Stage, seed: int, faults: list[Fault], events: Events, show: Show, began: float
    ) -> None:
        self._stage = stage
        self._seed = seed
        self._schedule = faults
        self._events = events
        self._show = show
        self._began = began
        self._seen = Seen(max_in_flight=MAX_IN_FLIGHT)
        self._times = Times()
        self._tail = Tail(stage.out)
        self._second = SecondQueue(stage)
        self._faults = Faults(stage, self._second)
        self._done: list[Done] = []
        self._problems: list[str] = []
        self._shown_at = self._sampled_at = 0.0
        self._t0 = 0.0
        self._strikes: dict[str, threading.Lock] = {}

    def run(self) -> Result:
        stage = self._stage
        self._t0, load_began_ms = time.monotonic(), _now_ms()
        for sender in stage.senders:
            sender.start()
        self._do_faults()
        self._end_load()
        load_ended_ms = _now_ms()
        self._say("all is sent and every fault is over; waiting for the rest to be finished")
        self._drain()
        self._end()
        self._say("reading the topics")
        second = self._second.seen
        take_in(self._tail.lines(), self._seen, self._times)
        read_topics(stage.connection, stage.queue, PARTITIONS, self._seen, self._times)
        read_topics(stage.connection, stage.second, 1, second, Times())
        self._seen.interruptions = sum(
            fault.kind in _INTERRUPTIONS for done in self._done for fault in done.fault.all
        )
        if not stage.clocks_s:  # else nobody knows when the copies were made
            self._measure(load_ended_ms)
        verdicts = {
            queue.name: self._judge(queue, partitions, seen)
            for queue, partitions, seen in ((stage.queue, PARTITIONS, self._seen), (stage.second, 1, second))
        }
        if self._seen.acked_late < stage.level.late_acks:
            self._problems.append(f"too few late acks: {self._seen.acked_late}, not {stage.level.late_acks}")
        result = Result(
            stage.level,
            self._seed,
            round(time.monotonic() - self._began, 1),
            load_began_ms,
            load_ended_ms,
            verdicts,
            self._problems,
            self._done if not stage.clocks_s else [],
            self._faults.held(),
            self._times,
        )
        for tracker, log in self._faults.log_of_held():
            self._events.add("held", tracker=tracker, requests=log)
        self._events.add("end", problems=result.all_problems)
        return result

    def _judge(self, queue: QueueSettings, partitions: int, seen: Seen) -> Verdict:
        verdict = judge(seen)
        try:
            keep_evidence(self._stage.connection, queue, partitions, seen, verdict, self._stage.out)
        except KmqError as error:
            self._problems.append(f"the evidence of {queue.name} could not be read: {error}")
        return verdict

    # --- load and faults --------------------------------------------------------------------------

    def _do_faults(self) -> None:
        for fault in self._schedule:
            self._watch_until(lambda at_s=fault.at_s: time.monotonic() - self._t0 >= at_s)
            # A daemon: nothing waits for the time that is left to what was struck last.
            threading.Thread(target=self._do, args=(fault,), name=fault.kind, daemon=True).start()
        self._watch_until(lambda: len(self._done) == len(self._schedule), 300.0, "the last faults")

    def _end_load(self) -> None:
        """Stop the senders once all is sent, and only some time after the last fault.

        On a busy machine a fault may come long after its planned moment. Without load after the last fault,
        nobody could say how long the fault was felt.
        """
        tail_ends = time.monotonic() + self._stage.level.tail_s

        def is_over() -> bool:
            return time.monotonic() >= tail_ends and len(self._seen.sent) >= self._stage.level.messages

        self._watch_until(is_over, 600.0, "every message is sent")
        self._stop(self._stage.senders)

    def _do(self, fault: Fault) -> None:
        """One fault, or two at a time, when what struck the same before is over."""
        with ExitStack() as struck:
            for name in sorted(fault.strikes):
                struck.enter_context(self._strikes.setdefault(name, threading.Lock()))
            began_ms = _now_ms()
            threads = [
                threading.Thread(target=self._strike, args=(one, one.at_s - fault.at_s), daemon=True)
                for one in fault.all
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self._done.append(Done(fault, began_ms, _now_ms()))
            time.sleep(fault.settle_s)  # as scheduled, also where a restart took longer than that

    def _strike(self, fault: Fault, after_s: float) -> None:
        time.sleep(after_s)
        name = f"{fault.kind} {fault.target or ''} {fault.how}".strip()
        self._events.add("fault", kind=fault.kind, target=fault.target, how=fault.how)
        self._say(f"fault: {name}")
        try:
            self._faults.begin(fault)
            time.sleep(fault.hold_s)
            self._faults.end(fault)
        except (Failed, KmqError) as error:
            self._problems.append(f"{name}: {error}")
        self._events.add("over", kind=fault.kind, target=fault.target)

    def _drain(self) -> None:
        queue = self._stage.queue
        try:
            self._second.finish()
        except (Failed, KmqError) as error:
            self._problems.append(str(error))
        with Admin(self._stage.connection, self._stage.zookeeper) as admin:

            def empty() -> bool:
                try:
                    found = [admin.stats(name) for name in (queue, self._stage.second)]
                except KmqError:
                    return False
                return all(stats.depth == 0 and stats.in_flight == 0 for stats in found)

            looked_at, is_empty = 0.0, False

            def now_and_then() -> bool:
                nonlocal looked_at, is_empty
                if time.monotonic() - looked_at > 2:
                    is_empty, looked_at = empty(), time.monotonic()
                return is_empty

            self._watch_until(now_and_then, _DRAIN_S, "the queues are empty")

    def _end(self) -> None:
        """Everybody must be well in the end, and go in an orderly way."""
        try:
            until(lambda: not self._stage.unready(), 120, "every tracker is ready")
        except Failed:
            self._problems += self._stage.unready()
        self._second.close()
        self._stop(self._stage.consumers)
        self._stop(self._stage.trackers)

    def _stop(self, slots: Sequence[Slot]) -> None:
        """Stop all of these at once."""
        with ThreadPoolExecutor(len(slots)) as pool:
            list(pool.map(self._stop_slot, slots))

    def _stop_slot(self, slot: Slot) -> None:
        try:
            slot.stop()
        except Failed as error:
            self._problems.append(str(error))

    # --- watching ---------------------------------------------------------------------------------

    def _watch_until(self, is_so: Callable[[], bool], timeout_s: float = 1e9, what: str = "") -> None:
        """Follow the journals until then; a timeout is a problem of the run, not its end."""
        deadline = time.monotonic() + timeout_s
        while not is_so():
            if time.monotonic() > deadline:
                self._problems.append(f"not within {timeout_s:.0f} s: {what}")
                return
            self._sample()
            time.sleep(0.1)

    def _sample(self) -> None:
        now = time.monotonic()
        if now - self._sampled_at < _SAMPLE_S:
            return
        self._sampled_at = now
        take_in(self._tail.lines(), self._seen, self._times)
        for slot in self._stage.slots:
            if slot.died:
                self._problems.append(f"{slot.name} ended by itself: {slot.last_words()}")
                slot.kill()
                if slot not in self._stage.senders:
                    slot.start()
        figures = {
            "sent": len(self._seen.sent),
            "deliveries": self._seen.delivered.total(),
            "acknowledged": len(self._seen.acked),
        }
        self._events.add("figures", **figures)
        if now - self._shown_at > _SHOW_S:
            self._shown_at = now
            self._say("  ".join(f"{name} {count:,}" for name, count in figures.items()))

    def _say(self, text: str) -> None:
        self._show(f"{time.monotonic() - self._t0:6.0f} s  {text}")

    def _measure(self, load_ended_ms: int) -> None:
        """How long partitions went without redeliveries and deliveries after each fault.

        A fault is charged with the silences that begin while it lasts, or within the session after it
        began, and before the next one. Where faults follow closely, each is charged with what both cost.
        """
        self._done.sort(key=lambda done: done.began_ms)
        copies, deliveries = self._times.copies, self._times.deliveries
        for moments in deliveries.values():
            moments.sort()
        starts = [done.began_ms for done in self._done] + [load_ended_ms]
        for index, done in enumerate(self._done):
            session_ms = self._stage.level.session_ms
            lasts_ms = max(session_ms, done.fault.lasts_s * 1000)
            until_ms = done.began_ms + min(lasts_ms, max(session_ms, starts[index + 1] - done.began_ms))
            window = (done.began_ms, min(load_ended_ms, round(until_ms)))
            found = Silence(
                *(silence((by[p] for p in range(PARTITIONS)), *window) for by in (copies, deliveries))
            )
            done.silence = found
            for what, seconds in (("redelivery", found.redelivery), ("delivery", found.delivery)):
                if seconds is None:
                    self._problems.append(f"no progress: a partition without {what} after {done.fault.name}")


def _now_ms() -> int:
    return int(time.time() * 1000)
