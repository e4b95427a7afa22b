"""Storages with one defect each, which the contract suite must find; and what it needs real time for."""

import dataclasses
import inspect
import threading
from functools import partial
from itertools import count

import pytest

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.errors import KmqError, Unavailable
from kmqpy.queue import Capabilities
from kmqpy.storages.engine import NewRow, Taken, TakeRef
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing import ManualClock, contract
from kmqpy.testing.contract import LEASE_S, Target, new_name

pytestmark = pytest.mark.breadth


class Lifo(MemoryEngine):
    def create_queue(self, settings):
        made = super().create_queue(settings)
        self._queues[settings.name].places = count(0, -1)
        return made


class NoCount(MemoryEngine):
    """Forgets the number of redeliveries, as after a failed lock."""

    def give_back(self, queue, takes, **how):
        return super().give_back(queue, takes, **{**how, "count": False})


class LoudSilence(MemoryEngine):
    def give_back(self, queue, takes, **how):
        return super().give_back(queue, takes, **{**how, "count": True})


class Twice(MemoryEngine):
    """Has one id twice in its list when two give it back."""

    def give_back(self, queue, takes, **how):
        doubled = self.taken_rows(queue, limit=1)
        done = super().give_back(queue, takes, **how)
        for row in doubled:
            found = self._queues[queue.name]
            with found.changed:
                found.rows[row.id].version += 1
                found.enter(found.rows[row.id], found.rows[row.id].state)
                found.counts[found.rows[row.id].state] += 1
        return done


class SendsAgain(MemoryEngine):
    """Puts what an at-most-once queue has forgotten back as a new message."""

    def give_back(self, queue, takes, *, gone=(), **how):
        if not gone:
            return super().give_back(queue, takes, **how)
        put = [NewRow(row.body, row.key, row.headers, how["delay_ms"] or 0, row.priority) for row in gone]
        return len(self.put(queue, put))


class NoPlace(MemoryEngine):
    """Puts it back before all others, as if it had been sent first."""

    def give_back(self, queue, takes, *, gone=(), **how):
        return super().give_back(queue, takes, gone=[row._replace(place=-1) for row in gone], **how)


class SizeOfAll(MemoryEngine):
    def counts(self, queue, limit=None):
        found = super().counts(queue, limit)
        return found._replace(ready=found.ready + found.in_flight)


class HundredOrphans(MemoryEngine):
    def taken_rows(self, queue, *, limit, **which):
        return super().taken_rows(queue, limit=min(limit, 100), **which)


class OneRow(MemoryEngine):
    """Takers that find another at the first row get nothing."""

    busy = threading.Lock()

    def take(self, queue, limit, lease_ms, **how):
        if not self.busy.acquire(blocking=False):
            return Taken([], 0)
        try:
            SYSTEM_CLOCK.sleep(0.002)
            return super().take(queue, limit, lease_ms, **how)
        finally:
            self.busy.release()


class NoFence(MemoryEngine):
    """Acknowledges by id alone."""

    def finish(self, queue, takes, connection=None):
        rows = self._queues[queue.name].rows
        return super().finish(queue, [TakeRef(one.id, rows[one.id].take) for one in takes if one.id in rows])


class EarlyAckOnly(MemoryEngine):
    """Ignores late acknowledgements, even when nobody has taken the message anew."""

    def finish(self, queue, takes, connection=None):
        held = {row.id for row in self.taken_rows(queue, limit=10**6)}
        return super().finish(queue, [one for one in takes if one.id in held])


class ExtendsAll(MemoryEngine):
    """Says that each lease could be extended."""

    def extend(self, queue, takes, lease_ms):
        super().extend(queue, takes, lease_ms)
        return []


class OnlyWhatIsTaken(MemoryEngine):
    """Acts by an id on taken messages only."""

    def _taken(self, queue, takes):
        held = {row.id for row in self.taken_rows(queue, limit=10**6)}
        return [one for one in takes if not one.is_any or one.id in held]

    def finish(self, queue, takes, connection=None):
        return super().finish(queue, self._taken(queue, takes))

    def extend(self, queue, takes, lease_ms):
        return super().extend(queue, self._taken(queue, takes), lease_ms)


class LastEndCounts(MemoryEngine):
    """Shortens leases by an id."""

    def extend(self, queue, takes, lease_ms):
        for row in self._queues[queue.name].rows.values():
            row.until_ms = min(row.until_ms, 1)
        return super().extend(queue, takes, lease_ms)


class KeepsTwins(MemoryEngine):
    def put(self, queue, rows, connection=None):
        return super().put(queue, [row._replace(digest=None) for row in rows])


class CollapsesWhatIsTaken(MemoryEngine):
    """Drops a message if an equal one was handed out before."""

    def put(self, queue, rows, connection=None):
        ids = super().put(queue, rows)
        found = self._queues[queue.name]
        for row_id in ids:
            if found.rows[row_id].body in {row.body for row in found.rows.values() if row.take}:
                found.remove(found.rows[row_id])
        return ids


class ShortTake(MemoryEngine):
    """Returns less where messages collapse, although others wait."""

    def take(self, queue, limit, lease_ms, **how):
        first = self.peek(queue, limit)
        return super().take(queue, len({row.body for row in first}) or 1, lease_ms, **how)


class NoGroups(MemoryEngine):
    def put(self, queue, rows, connection=None):
        return super().put(queue, [row._replace(group=None) for row in rows])


class NewPlace(MemoryEngine):
    """Puts what failed behind its successors."""

    def give_back(self, queue, takes, **how):
        found = self._queues[queue.name]
        for take in takes:
            found.rows[take.id].place = next(found.places)
        return super().give_back(queue, takes, **how)


class NoHold(MemoryEngine):
    """Forgets which groups a dead letter holds."""

    def bury(self, queue, takes, reason, *, gone=()):
        done = super().bury(queue, takes, reason, gone=gone)
        for group in self._queues[queue.name].groups.values():
            group.dead.clear()
        return done


class OneTooMany(MemoryEngine):
    def create_queue(self, settings):
        most = settings.max_in_flight_per_group
        return super().create_queue(
            dataclasses.replace(settings, max_in_flight_per_group=None if most is None else most + 1)
        )


class FirstComeFirstServed(MemoryEngine):
    """Forgets that a queue is fair."""

    def create_queue(self, settings):
        return super().create_queue(
            dataclasses.replace(
                settings,
                fair=False,
                fair_by="in_flight",
                max_in_flight_per_group=10**6 if settings.fair else None,
            )
        )


class EveryGroupIsNoisy(MemoryEngine):
    def create_queue(self, settings):
        return super().create_queue(dataclasses.replace(settings, fair_by="in_flight"))


class NoKeys(MemoryEngine):
    def put(self, queue, rows, connection=None):
        return super().put(queue, [row._replace(dedup=None) for row in rows])


class EndlessKeys(MemoryEngine):
    """Keeps a dedup key for ever."""

    def put(self, queue, rows, connection=None):
        dedup = self._queues[queue.name].dedup
        dedup.update({key: (row_id, 2**62) for key, (row_id, _) in dedup.items()})
        return super().put(queue, rows)


class NoRetryDelay(MemoryEngine):
    def give_back(self, queue, takes, *, delay_ms, **how):
        return super().give_back(queue, takes, delay_ms=delay_ms or 0, **how)


class CStrings(MemoryEngine):
    def put(self, queue, rows, connection=None):
        return super().put(queue, [row._replace(body=row.body.split(b"\0")[0]) for row in rows])


class NoDelay(MemoryEngine):
    def put(self, queue, rows, connection=None):
        return super().put(queue, [row._replace(delay_ms=0) for row in rows])


class PurgeOfAll(MemoryEngine):
    def purge(self, queue):
        return super().purge(queue) + self.purge_dead(queue)


class OldRedrive(MemoryEngine):
    def redrive(self, queue, *, ids, limit):
        rows = self._queues[queue.name].rows
        before = {row_id: row.requeues for row_id, row in rows.items()}
        done = super().redrive(queue, ids=ids, limit=limit)
        for row_id, row in rows.items():
            row.requeues = before[row_id] + 1
        return done


class DoubleTake(MemoryEngine):
    """Two takers can take one row."""

    def take(self, queue, limit, lease_ms, **how):
        taken = super().take(queue, limit, lease_ms, **how)
        if taken.rows and taken.rows[0].id % 100 == 0:
            self.give_back(queue, [TakeRef(taken.rows[0].id, 1)], delay_ms=0, count=False, reason=None)
        return taken


class Hurried(SystemClock):
    """A clock that runs five times as fast."""

    def monotonic(self):
        return 5 * super().monotonic()

    def sleep(self, seconds):
        super().sleep(seconds / 5)


class DeepSleep(MemoryEngine):
    """Never hears of a message while it waits; looks once a second of `Hurried`, whenever the wait began."""

    def wait(self, queue, taken, seconds):
        Hurried().sleep(min(seconds, 1 - Hurried().monotonic() % 1))
        return True


class Outages(MemoryEngine):
    """Calls can fail on demand, before or after they have happened; `losing`: they forget what they did."""

    losing = False

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.cuts = count()
        self.to_cut = None

    def cut(self):
        self.to_cut = next(self.cuts)

    def kill(self):
        self.to_cut = 0
        for queue in self._queues.values() if self.losing else ():
            self.lose_one(queue)

    def lose_one(self, queue):
        with queue.changed:
            queue.remove(next(row for row in queue.rows.values() if row.state.value == "ready"))

    def cut_one(self, call):
        number, self.to_cut = self.to_cut, None
        if number is not None and number % 2:
            raise Unavailable("cut before")
        done = call()
        if number is not None:
            raise Unavailable("cut after")
        return done

    def put(self, *arguments):
        return self.cut_one(lambda: super(Outages, self).put(*arguments))

    def take(self, *arguments):
        return self.cut_one(lambda: super(Outages, self).take(*arguments))

    def finish(self, queue, takes, connection=None):
        SYSTEM_CLOCK.sleep(0.01)
        if self.losing and self.to_cut is not None:
            self.lose_one(self._queues[queue.name])
        return self.cut_one(lambda: super(Outages, self).finish(queue, takes))


class LosingOutages(Outages):
    losing = True


def call(test, target, **parameters):
    """Call a test of the suite as pytest would."""
    with target.open() as storage:

        def make(**settings):
            name = new_name()
            storage.create(name, **{"lease_ms": int(LEASE_S * 1000), **settings})
            return storage.open(name)

        given = {"kmq_target": target, "kmq_storage": storage, "make_queue": make, **parameters}
        given["forgetful"] = partial(make, delivery="at-most-once")
        given["collapsing"] = partial(make, collapse=True)
        given["grouped"] = partial(make, order="group")
        given["unique"] = given["shared"] = make
        if "queue" in inspect.signature(test).parameters:
            given["queue"] = make()
        test(**{name: given[name] for name in inspect.signature(test).parameters})


def target_of(engine, clock) -> Target:
    is_manual = isinstance(clock, ManualClock)
    return Target(
        open=lambda: StoredStorage(engine, clock=clock),
        pass_time=clock.advance if is_manual else clock.sleep,
        real_time=not is_manual,
        open_with_clock=lambda other: StoredStorage(engine, clock=other),
    )


DEFECTS = [
    (Lifo, "messages_are_taken_in_the_order_they_were_sent", {}),
    (Lifo, "a_requeued_message_goes_to_the_back", {}),
    (NoCount, "a_counted_nack_is_an_attempt_and_enqueues_anew", {}),
    (NoCount, "a_nack_counts_once_however_often_it_is_given", {}),
    (NoCount, "what_fails_too_often_is_a_dead_letter", {"how": "nack"}),
    (LoudSilence, "a_silent_nack_changes_neither_number_nor_time", {}),
    (Twice, "a_nack_counts_once_however_often_it_is_given", {}),
    (NoCount, "at_most_once_puts_back_what_is_given_back", {}),
    (NoCount, "at_most_once_has_dead_letters_of_what_was_given_back_too_often", {}),
    (LoudSilence, "at_most_once_puts_back_what_is_given_back", {}),
    (SendsAgain, "at_most_once_puts_back_what_is_given_back", {}),
    (SendsAgain, "at_most_once_puts_back_one_message_however_often_it_is_given", {}),
    (NoPlace, "at_most_once_puts_back_in_order", {"requeue_to": "front"}),
    (SizeOfAll, "the_size_is_what_is_neither_in_flight_nor_dead", {}),
    (SizeOfAll, "eight_takers_get_nothing_twice_within_its_lease", {}),
    (HundredOrphans, "orphans_are_all_that_is_taken_and_not_finished", {}),
    (OneRow, "takers_do_not_wait_for_one_row", {}),
    (NoFence, "a_receipt_never_touches_the_take_of_another", {}),
    (EarlyAckOnly, "a_late_acknowledgement_counts_until_the_message_is_taken_anew", {}),
    (ExtendsAll, "an_extension_says_which_messages_are_no_longer_the_callers", {}),
    (OnlyWhatIsTaken, "what_is_finished_by_its_id_is_finished_in_any_state", {}),
    (OnlyWhatIsTaken, "what_is_extended_by_its_id_is_taken_anew_if_nobody_has_it", {}),
    (LastEndCounts, "of_leases_extended_by_an_id_the_later_end_counts", {}),
    (KeepsTwins, "equal_messages_that_wait_are_handed_out_once", {}),
    (CollapsesWhatIsTaken, "what_was_handed_out_never_collapses_again", {}),
    (ShortTake, "a_take_finds_as_many_as_it_may_behind_messages_that_collapse", {}),
    (NoGroups, "messages_of_a_group_come_one_at_a_time_and_others_go_on", {}),
    (NoGroups, "many_takers_keep_the_order_of_each_group", {}),
    (NewPlace, "a_message_that_failed_comes_again_before_its_successors", {"how": "nack"}),
    (NoHold, "a_dead_letter_holds_its_group_where_that_is_asked_for", {}),
    (OneTooMany, "of_a_group_as_many_are_in_flight_as_may_be", {"one_by_one": False}),
    (OneTooMany, "many_takers_keep_to_the_cap", {}),
    (FirstComeFirstServed, "groups_with_fewer_in_flight_come_first", {"one_by_one": False}),
    (EveryGroupIsNoisy, "only_noisy_groups_come_after_others_where_that_is_asked_for", {"one_by_one": False}),
    (NoKeys, "a_second_send_with_an_id_stores_nothing", {}),
    (NoKeys, "ids_are_unique_within_a_batch", {}),
    (EndlessKeys, "an_id_is_free_again_after_its_window", {}),
    (NoRetryDelay, "each_redelivery_waits_as_long_as_the_queue_says", {"how": "nack"}),
    (CStrings, "bodies_come_as_they_were_sent", {}),
    (NoDelay, "a_delayed_message_comes_when_it_is_due", {}),
    (PurgeOfAll, "purge_removes_all_but_dead_letters", {}),
    (OldRedrive, "dead_letters_are_redriven_as_new", {}),
    (DoubleTake, "eight_takers_get_nothing_twice_within_its_lease", {}),
]


@pytest.mark.parametrize(("engine", "test", "parameters"), DEFECTS)
def test_the_suite_finds_a_defect(engine, test, parameters):
    def run_often() -> None:
        for _ in range(5):  # some show only where threads meet
            clock = ManualClock()
            target = target_of(engine(clock, patience=0.02), clock)
            call(getattr(contract, f"test_{test}"), target, **parameters)

    with pytest.raises((AssertionError, KmqError, RuntimeError)):
        run_often()


WAITING = [
    "a_waiting_receive_returns_as_soon_as_a_message_is_sent",
    "a_waiting_receive_returns_when_a_message_is_due",
    "receive_waits_as_long_as_asked",
]


@pytest.mark.parametrize("test", WAITING)
def test_waiting_on_memory_in_real_time(test):
    call(getattr(contract, f"test_{test}"), target_of(MemoryEngine(), SYSTEM_CLOCK))


def test_the_suite_finds_a_lost_wake_up(monkeypatch):
    monkeypatch.setattr("kmqpy.testing.contract.sending.SYSTEM_CLOCK", Hurried())
    with pytest.raises(AssertionError):
        call(getattr(contract, f"test_{WAITING[0]}"), target_of(DeepSleep(), SYSTEM_CLOCK))


OUTAGES = ["what_was_confirmed_outlives_a_killed_server", "cut_connections_lose_and_double_nothing"]


@pytest.mark.parametrize("test", OUTAGES)
@pytest.mark.parametrize("engine", [Outages, LosingOutages])
def test_the_suite_finds_what_an_outage_loses(engine, test):
    clock = ManualClock()
    made = engine(clock, patience=0.02, capabilities=Capabilities())
    target = dataclasses.replace(target_of(made, clock), kill_server=made.kill, cut_connections=made.cut)
    if engine is Outages:
        call(getattr(contract, f"test_{test}"), target)
    else:
        with pytest.raises((AssertionError, StopIteration)):
            call(getattr(contract, f"test_{test}"), target)
