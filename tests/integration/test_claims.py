"""Redelivery with claims (rules R27, R28), on a real Kafka."""

import pytest
from support import delete_topic, until, value

from kmqpy.kafka.copies.copy_transaction import CopyTransaction
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, named_offsets
from kmqpy.kafka.markers.codec import Marker, Op


@pytest.fixture
def claiming(make_queue):
    """A queue with claims."""
    return make_queue(claims=True)


def named(queue, name):
    """What the headers `name` of the markers topic hold, all together."""
    records = queue.records(queue.settings.markers_topic)
    return set().union(*(named_offsets(record.headers(), name, 0) for record in records))


def take(offset):
    return Marker(0, offset, Op.TAKE, 300)


def test_r28_each_redelivery_begins_with_a_claim(claiming):
    claiming.tracker()
    claiming.send("a", "b", "c")
    claiming.mark_all(map(take, range(3)))
    until(lambda: claiming.copies() == {"a": 2, "b": 2, "c": 2})
    assert named(claiming, CLAIM) == {0, 1, 2}
    assert named(claiming, DROPPED) == set()


def test_r27_what_is_acknowledged_between_plan_and_claim_is_not_copied(claiming, monkeypatch):
    execute = CopyTransaction.execute
    acknowledged = []

    def acknowledge_first(transaction, *args, **more):
        if not acknowledged:
            acknowledged.append(claiming.mark(Marker(0, 1, Op.END)))
        execute(transaction, *args, **more)

    monkeypatch.setattr(CopyTransaction, "execute", acknowledge_first)
    claiming.send("a", "b", "c")
    claiming.mark_all(map(take, range(3)))
    tracker = claiming.tracker()
    until(lambda: value(tracker, claiming.name, "redelivered") >= 2)
    until(lambda: claiming.copies() == {"a": 2, "b": 1, "c": 2})
    assert named(claiming, CLAIM) == {0, 1, 2}
    assert named(claiming, DROPPED) == {1}


def test_r24_a_markers_topic_made_anew_between_plan_and_claim(claiming, monkeypatch):
    """The new topic has an end marker where the plan would go on to read; only its own markers count."""
    execute = CopyTransaction.execute
    recreated = []

    def recreate_first(transaction, *args, **more):
        if not recreated:
            recreated.append(True)
            delete_topic(claiming.topics, claiming.settings.markers_topic)
            claiming.topics.create(claiming.settings, 1)
            claiming.mark_all([take(0), take(1), take(2), Marker(0, 1, Op.END), Marker(0, 7, Op.END)])
        execute(transaction, *args, **more)

    monkeypatch.setattr(CopyTransaction, "execute", recreate_first)
    claiming.send("a", "b", "c")
    claiming.mark_all(map(take, range(3)))
    claiming.tracker(wait=False)
    until(lambda: recreated)
    until(lambda: claiming.copies(at_once=True) == {"a": 2, "b": 1, "c": 2}, what=claiming.copies)
