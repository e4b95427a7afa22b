"""Counts, messages in flight and purge, on a real Kafka and ZooKeeper."""

import tracemalloc
from dataclasses import replace

from admin_support import errors, store
from support import LEASE_S, collect, until

from kmqpy.core.clock import SYSTEM_CLOCK, SystemClock
from kmqpy.core.int64 import INT64_MAX
from kmqpy.kafka import librdkafka, partition_reader
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import MAX_SPAN, Marker, Op
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.topics import Topics


class TestStats:
    def test_each_kind_of_message_is_counted_once(self, make_queue, admin_of):
        queue = make_queue(2)
        admin = admin_of(queue)
        queue.send("a", "b", "c", "d", partition=0)
        queue.send("late", delay=60, partition=1)
        before = admin.stats(queue.name)
        assert (before.depth, before.in_flight, before.delayed, before.exact) == (5, 0, 0, True)
        client = queue.client(holder="me")
        taken = collect(client, 4, lease=30)
        until(lambda: client.receive(wait=0.05) == [] and admin.stats(queue.name).delayed == 1)
        client.ack(taken[0])
        client.nack(taken[1], delay=30, reason="no", confirmed=True)
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight, found.delayed, found.overdue) == (1, 3, 1, 0)
        assert [part.in_flight for part in found.partitions] == [3, 0]
        listed = {one.offset: one for one in admin.in_flight(queue.name) if one.partition == 0}
        assert {offset: one.state for offset, one in listed.items()} == {
            taken[1].offset: EntryState.RELEASED,
            taken[2].offset: EntryState.LEASED,
            taken[3].offset: EntryState.LEASED,
        }
        leased = listed[taken[2].offset]
        assert (leased.holder, leased.attempts, leased.receipt) == ("me", 1, taken[2].receipt)
        assert abs(leased.lease_until_ms - leased.since_ms - 30_000) < 2_000
        assert listed[taken[1].offset].reason == "no"
        (delayed,) = (one for one in admin.in_flight(queue.name) if one.partition == 1)
        assert (delayed.state, delayed.attempts) == (EntryState.DELAYED, 0)
        assert len(admin.in_flight(queue.name, limit=2)) == 2

    def test_what_nobody_redelivers_gets_overdue_by_the_clock_on_the_wall(self, make_queue):
        """No tracker runs, so nothing is written any more that would tell the time."""
        queue = make_queue(2)
        queue.send("a", "b", "c")
        queue.mark_all([Marker(0, 0, Op.TAKE, 60_000), Marker(0, 1, Op.TAKE, 3_600_000)])

        class Later(SystemClock):
            ahead_ms = 0

            def wall_ms(self):
                return super().wall_ms() + self.ahead_ms

        clock = Later()
        with Admin(queue.connection, queue.zookeeper, clock=clock) as admin:
            for clock.ahead_ms, overdue in ((0, 0), (120_000, 1), (7_200_000, 2), (-120_000, 0)):
                found = admin.stats(queue.name)
                assert (found.overdue, found.in_flight, found.depth) == (overdue, 2, 1)
                assert [part.overdue for part in found.partitions] == [overdue, 0]

    def test_the_oldest_is_the_first_that_nobody_has_taken(self, make_queue, admin_of):
        queue = make_queue(2)
        minutes = {0: (9, 5, 3), 1: (7, 6)}
        now_ms = SYSTEM_CLOCK.wall_ms()
        for partition, ages in minutes.items():
            for age in ages:
                sent_ms = now_ms - 60_000 * age
                queue.append(None, b"m", partition=partition, timestamp_ms=sent_ms, topic=queue.name)
        queue.mark(Marker(0, 0, Op.TAKE, 60_000))
        found = admin_of(queue).stats(queue.name)
        oldest = [now_ms - 60_000 * age for age in (5, 7)]
        assert [part.oldest_ms for part in found.partitions] == oldest
        assert found.oldest_ms == min(oldest)

    def test_control_records_and_started_messages_are_no_depth(self, queue, admin_of):
        """Offsets from the committed one to the end are 6 here, and one message waits."""
        queue.send("waits")
        producer = librdkafka.new_producer(queue.connection, {"transactional.id": queue.name})
        producer.init_transactions()
        for body, commit in (("aborted", False), ("started", True)):
            producer.begin_transaction()
            producer.produce(queue.name, body.encode(), partition=0)
            producer.flush()
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        assert [record.offset() for record in queue.records()] == [0, 3]
        queue.mark(Marker(0, 3, Op.TAKE, 60_000))  # by a client that died before its commit
        low, end = partition_reader.bounds(queue.connection, queue.name, [0])[0]
        assert (low, end) == (0, 5)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.in_flight, found.exact) == (1, 1, True)

    def test_above_the_limit_offsets_are_counted(self, queue, admin_of, monkeypatch):
        queue.send(*"abcdef")
        monkeypatch.setattr(stats, "COUNT_LIMIT", 4)
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.exact) == (6, False)

    def test_above_the_limit_what_was_started_is_no_depth(self, queue, admin_of, monkeypatch):
        """By clients that commit no offsets, as those of the JVM library."""
        queue.send(*"abcdefghijkl")
        monkeypatch.setattr(stats, "COUNT_LIMIT", 2)
        queue.mark_all(Marker(0, offset, Op.TAKE, 60_000) for offset in (0, 1, 2, 4, 8, 9))
        found = admin_of(queue).stats(queue.name)
        assert (found.depth, found.in_flight, found.exact) == (6, 6, False)

    def test_a_lying_marker_changes_nothing(self, queue, admin_of):
        """It names messages that do not exist, or those of another partition."""
        queue.send(*"abc")
        start = Marker(0, 0, Op.TAKE, 60_000)
        queue.mark(start)
        lies = [Marker(0, 0, Op.TAKE, INT64_MAX, runs=((0, MAX_SPAN),)), Marker(0, 3, Op.TAKE, 1)]
        lies += [Marker(partition, 1, Op.TAKE, 1) for partition in (-1, -3, 1)]
        for lie in lies:
            queue.append(*codec.encode(lie))
        queue.append(*codec.encode(replace(start, offset=1, redeliver_after_ms=INT64_MAX)))
        admin = admin_of(queue)
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight, found.overdue, found.exact) == (1, 2, 0, True)
        listed = admin.in_flight(queue.name)
        assert [(one.offset, one.state) for one in listed] == [(0, EntryState.LEASED), (1, EntryState.LEASED)]
        lengths = [one.lease_until_ms - one.since_ms for one in listed]
        assert lengths == [60_000, queue.settings.max_lease_ms]

    def test_an_offset_stored_for_an_earlier_markers_topic_hides_nothing(self, queue, admin_of):
        queue.send("a")
        queue.mark(Marker(0, 0, Op.TAKE, 60_000))
        store(queue, StoredOffset(1, "earlier", 0))
        assert [one.offset for one in admin_of(queue).in_flight(queue.name)] == [0]

    def test_many_lying_markers_cost_nothing(self, queue, admin_of):
        queue.send("a")
        lie = Marker(0, 0, Op.TAKE, INT64_MAX, runs=((0, MAX_SPAN),))
        queue.mark_all(replace(lie, offset=n, runs=((n * MAX_SPAN, MAX_SPAN),)) for n in range(100))
        admin = admin_of(queue)
        admin.stats(queue.name)  # imports, connections
        tracemalloc.start()
        try:
            found, listed = admin.stats(queue.name), admin.in_flight(queue.name)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert (found.depth, found.in_flight, listed) == (1, 0, [])
        assert peak < 2_000_000  # bytes; for 6,553,600 messages

    def test_an_open_transaction_holds_nobody_up(self, queue, admin_of):
        queue.send("a")
        producer = librdkafka.new_producer(queue.connection, {"transactional.id": queue.name})
        producer.init_transactions()
        producer.begin_transaction()
        producer.produce(queue.name, b"open", partition=0)
        producer.produce(queue.settings.markers_topic, b"\0", bytes(12), partition=0)
        producer.flush()
        found = admin_of(queue).stats(queue.name)
        assert found.depth == 1
        producer.abort_transaction()

    def test_owner_attempts_and_dead_letters_with_a_tracker(self, make_queue, admin_of):
        queue = make_queue(max_redeliveries=1)
        admin = admin_of(queue)
        tracker = queue.tracker(tracker_id="t1")
        assert errors(admin.doctor(queue.name)) == []
        queue.send("poison")
        client = queue.client()
        collect(client, 1, lease=LEASE_S)
        again = collect(client, 1, lease=LEASE_S)
        until(lambda: [one.attempts for one in admin.in_flight(queue.name)] == [2])
        assert again[0].attempts == 2

        def counts():
            found = admin.stats(queue.name)
            return found.dead_letters, found.depth, found.in_flight

        until(lambda: counts() == (1, 0, 0), what=counts)
        assert admin.stats(queue.name).partitions[0].owner == "t1"
        tracker.stop()
        assert admin.stats(queue.name).partitions[0].stored_offset > 0

    def test_purge_ends_what_is_in_flight(self, queue, admin_of):
        admin = admin_of(queue)
        queue.send("a", "b", "c")
        taken = collect(queue.client(), 1, max_messages=1, lease=30)
        assert len(taken) == 1
        assert admin.purge(queue.name) == 3
        found = admin.stats(queue.name)
        assert (found.depth, found.in_flight) == (0, 0)
        queue.send("after")
        assert admin.stats(queue.name).depth == 1

    def test_purge_ends_what_is_taken_while_it_runs(self, queue, admin_of, monkeypatch):
        queue.send("a")
        delete = Topics.delete_records

        def taken_just_before(*arguments):
            queue.mark(Marker(0, 0, Op.TAKE, 30_000))
            delete(*arguments)

        monkeypatch.setattr(Topics, "delete_records", taken_just_before)
        assert admin_of(queue).purge(queue.name) == 1
        assert queue.ended() == {0}


def test_a_foreign_receipt_names_the_queue(queue):
    receipt = Receipt.parse(collect_one(queue).receipt)
    assert (receipt.queue, receipt.topic_id) == (queue.name, queue.found.queue.topic_id)


def collect_one(queue):
    queue.send("x")
    return collect(queue.client(), 1, lease=60.0)[0]
