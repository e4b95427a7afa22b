"""The claims of redeliveries (rules R27, R28), on a real Kafka."""

from support import delete_topic, until, value

from kmqpy.kafka.copies.copy_transaction import CopyTransaction
from kmqpy.kafka.markers.claim_headers import CLAIM, DROPPED, named_offsets
from kmqpy.kafka.markers.codec import Marker, Op


def named(queue, name):
    """What the headers `name` of the markers topic hold, all together."""
    records = queue.records(queue.settings.markers_topic)
    return set().union(*(named_offsets(record.headers(), name, 0) for record in records))


def take(offset):
    return Marker(0, offset, Op.TAKE, 300)


def test_r28_each_redelivery_begins_with_a_claim(queue):
    queue.tracker()
    queue.send("a", "b", "c")
    queue.mark_all(map(take, range(3)))
    until(lambda: queue.copies() == {"a": 2, "b": 2, "c": 2})
    assert named(queue, CLAIM) == {0, 1, 2}
    assert named(queue, DROPPED) == set()


def test_r27_what_is_acknowledged_between_plan_and_claim_is_not_copied(queue, monkeypatch):
    execute = CopyTransaction.execute
    acknowledged = []

    def acknowledge_first(transaction, *args, **more):
        if not acknowledged:
            acknowledged.append(queue.mark(Marker(0, 1, Op.END)))
        execute(transaction, *args, **more)

    monkeypatch.setattr(CopyTransaction, "execute", acknowledge_first)
    queue.send("a", "b", "c")
    queue.mark_all(map(take, range(3)))
    tracker = queue.tracker()
    until(lambda: value(tracker, queue.name, "redelivered") >= 2)
    until(lambda: queue.copies() == {"a": 2, "b": 1, "c": 2})
    assert named(queue, CLAIM) == {0, 1, 2}
    assert named(queue, DROPPED) == {1}


def test_r24_a_markers_topic_made_anew_between_plan_and_claim(queue, monkeypatch):
    """The new topic has an end marker where the plan would go on to read; only its own markers count."""
    execute = CopyTransaction.execute
    recreated = []

    def recreate_first(transaction, *args, **more):
        if not recreated:
            recreated.append(True)
            delete_topic(queue.topics, queue.settings.markers_topic)
            queue.topics.create(queue.settings, 1)
            queue.mark_all([take(0), take(1), take(2), Marker(0, 1, Op.END), Marker(0, 7, Op.END)])
        execute(transaction, *args, **more)

    monkeypatch.setattr(CopyTransaction, "execute", recreate_first)
    queue.send("a", "b", "c")
    queue.mark_all(map(take, range(3)))
    queue.tracker(wait=False)
    until(lambda: recreated)
    until(lambda: queue.copies(at_once=True) == {"a": 2, "b": 1, "c": 2}, what=queue.copies)
