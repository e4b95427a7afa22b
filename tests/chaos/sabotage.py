"""What is changed inside a process: safeguards taken out, and the moments at which it stops or dies.

Never in shipped code: the classes are patched here, by name, before the process begins its work.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from kmqpy.kafka import librdkafka
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.start_markers import StartMarkerWriter, StartOutcome
from kmqpy.kafka.copies.copy_transaction import CopyTransaction, NewRecord
from kmqpy.kafka.copies.late_acks import CheckedCopies, LateAckCheck
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.open_claims import OpenClaims
from tracker.offset_keeper import OffsetKeeper
from tracker.redelivery.claim import Claim
from tracker.redelivery.redeliverer import Redeliverer

LATE_S = 60.0


class PlainSends:
    """A producer whose transactions are none: each record counts as soon as it is sent."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer

    def begin_transaction(self) -> None:
        pass

    def commit_transaction(self, timeout_s: float) -> None:
        self._producer.flush(timeout_s)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._producer, name)


def two_sends() -> None:
    """Copies and end markers are sent one after the other, without a transaction, and nobody mends that."""

    def open_plain(self: Redeliverer, timeout_s: float) -> None:
        self.close()
        self._producer = PlainSends(librdkafka.new_producer(self._connection, {"linger.ms": 5}))  # type: ignore[assignment]

    Redeliverer.open = open_plain  # type: ignore[method-assign]
    OpenClaims.torn = lambda _: []  # type: ignore[method-assign]


def no_fencing() -> None:
    """Every tracker has a transactional.id of its own, so that none fences its predecessor.

    Nor does it look before a commit whether it leads, nor make a claim, from which it would learn what its
    successor has copied.
    """
    make, transact = librdkafka.new_producer, Redeliverer._transact

    def unfenced(connection: Any, settings: Any) -> Any:
        own = {**settings}
        if "transactional.id" in own:
            own["transactional.id"] += f"-{uuid.uuid4().hex}"
        return make(connection, own)

    def transact_unseen(self: Redeliverer, batch: Any, gone: Any, _may_go_on: Any) -> Any:
        return transact(self, batch, gone, lambda: True)

    librdkafka.new_producer = unfenced
    Redeliverer._transact = transact_unseen  # type: ignore[method-assign]
    Claim.record = property(_tick)  # type: ignore[assignment]
    Claim.decide = lambda *_: []  # type: ignore[method-assign]


def _tick(claim: Claim) -> NewRecord:
    return NewRecord(claim._partition, *codec.encode(codec.tick(claim._partition)))


def safe_offset() -> None:
    """The stored offset is how far was read, beyond the starts of what is in flight."""
    real = OffsetKeeper.offset_of

    def unsafe(self: OffsetKeeper, part: Any) -> Callable[[], StoredOffset] | None:
        real(self, part)
        if part.catch_up_offset is None or part.state.position == part.stored_offset:
            return None
        stored = StoredOffset(part.state.position, part.topic_ids[1], part.state.now_ms)
        return lambda: stored

    OffsetKeeper.offset_of = unsafe  # type: ignore[method-assign]


def no_start_wait() -> None:
    """Messages are handed out and committed while their start markers are on their way."""

    class Unconfirmed:
        def __init__(self, started: StartOutcome) -> None:
            self.wait_until_confirmed = lambda _=None: started
            self.give_back = lambda: None

    def start(self: StartMarkerWriter, takes: Any, delays: Any, *more: Any) -> Unconfirmed:
        write = threading.Timer(LATE_S, _start, (self, takes, delays, *more))
        write.daemon = True
        write.start()
        return Unconfirmed(
            StartOutcome({**dict.fromkeys(takes, -1), **{place[0]: -1 for place in delays}}, {})
        )

    _start = StartMarkerWriter.start
    StartMarkerWriter.start = start  # type: ignore[method-assign, assignment]


def no_late_look() -> None:
    """Who takes a copy hands it out, whatever was acknowledged."""
    LateAckCheck.examine = lambda *_: CheckedCopies()  # type: ignore[method-assign]


def producers_used_on() -> None:
    """A producer is used on although a request that has ended its transaction may come once more."""
    librdkafka.REPEATED_END_S = float("inf")


def late_end_txn() -> None:
    """Nothing is done about late requests: torn transactions are not looked for either."""
    producers_used_on()
    OpenClaims.torn = lambda _: []  # type: ignore[method-assign]


def stop_before_transaction() -> None:
    """Halt (SIGSTOP) at the worst moment: it may redeliver, knows what, and has sent nothing."""
    real = Redeliverer._transact
    stopped = threading.Event()

    def transact(self: Redeliverer, *arguments: Any) -> Any:
        if not stopped.is_set():
            stopped.set()
            os.kill(os.getpid(), signal.SIGSTOP)
            # The kernel may let this thread run on for a moment; what it then gave to librdkafka would be
            # too old to be sent when the process goes on.
            time.sleep(0.5)
        return real(self, *arguments)

    Redeliverer._transact = transact  # type: ignore[method-assign]


def die_within_transaction() -> None:
    """kill -9 when the copies of a redelivery are at the broker, and no end marker is."""
    real = CopyTransaction._produce_one

    def produce_one(self: CopyTransaction, topic: str, *arguments: Any) -> None:
        if topic == self.markers_topic and self._places:  # not the claim, which comes first
            self._producer.flush(10)
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, topic, *arguments)

    CopyTransaction._produce_one = produce_one  # type: ignore[method-assign]


ALL: dict[str, Callable[[], None]] = {
    change.__name__.replace("_", "-"): change
    for change in (
        two_sends,
        no_fencing,
        safe_offset,
        no_start_wait,
        no_late_look,
        producers_used_on,
        late_end_txn,
        stop_before_transaction,
        die_within_transaction,
    )
}


def apply(names: str) -> None:
    """Make these changes, separated by commas."""
    for name in names.split(","):
        ALL[name]()
