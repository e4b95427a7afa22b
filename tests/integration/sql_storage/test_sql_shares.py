"""Fair queues and caps in SQL within transactions of the application: nothing is forgotten."""

from collections.abc import Iterator

import pytest
from sql_support import Place, taken

from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, Storage, storage_for


@pytest.fixture
def storage(place: Place) -> Iterator[Storage]:
    with storage_for(place.url) as made:
        yield made


def queue_with(storage: Storage, *names: str, **settings: object) -> Queue:
    storage.create("s", **settings)
    queue = storage.open("s")
    queue.send_many([OutgoingMessage(name, group=name[0]) for name in names])
    return queue


def test_a_share_goes_on_when_the_transaction_commits(place: Place, storage: Storage) -> None:
    queue = queue_with(storage, "a1", "a2", "b1", "a3", max_in_flight_per_group=1)
    (a1,) = queue.receive(1, lease=60)
    with place.application.connect() as connection:
        queue.ack(a1, transaction=connection)
        if place.name != "sqlite":  # there the transaction is the only writer
            assert taken(queue, 9) == ["b1"]
        connection.rollback()
        assert "a2" not in taken(queue, 9)
        queue.ack(a1, transaction=connection)
        connection.commit()
    (a2,) = queue.receive(9, wait=0, lease=60)
    assert a2.body == b"a2"
    queue.ack(a2)
    assert taken(queue, 9) == ["a3"]


def test_what_is_sent_while_its_predecessor_ends_is_not_forgotten(place: Place, storage: Storage) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    queue = queue_with(storage, "a1", max_in_flight_per_group=1)
    (a1,) = queue.receive(1, lease=60)
    with place.application.connect() as connection:
        queue.ack(a1, transaction=connection)
        queue.send("a2", group="a")
        assert taken(queue, 9) == []
        connection.commit()
    assert taken(queue, 9) == ["a2"]


def test_those_who_end_all_of_a_lowered_cap_forget_nobody(place: Place, storage: Storage) -> None:
    queue = queue_with(storage, "a1", "a2", "a3", "a4", max_in_flight_per_group=2)
    a1, a2 = queue.receive(9, lease=60)
    storage.alter("s", max_in_flight_per_group=1)
    queue = storage.open("s")
    assert taken(queue, 9) == []
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    with place.application.connect() as one, place.application.connect() as other:
        queue.ack(a1, transaction=one)
        queue.ack(a2, transaction=other)
        one.commit()
        assert taken(queue, 9) == []
        other.commit()
    assert taken(queue, 9) == ["a3"]


def test_sends_into_a_share_wait_for_no_transaction(place: Place, storage: Storage) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    queue = queue_with(storage, "a1", "b1", fair=True)
    with place.application.connect() as connection:
        queue.send_many([OutgoingMessage(name, group="c") for name in ("c1", "c2")], transaction=connection)
        queue.send("c3", group="c")
        assert taken(queue, 2) == ["a1", "b1"]
        assert taken(queue, 9) == ["c3"]
        connection.commit()
    assert taken(queue, 9) == ["c1", "c2"]


def test_a_transaction_of_one_group_holds_up_no_other(place: Place, storage: Storage) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    queue = queue_with(storage, "a0", max_in_flight_per_group=1)
    (a0,) = queue.receive(1, lease=60)
    for number in range(70):  # more than a take looks at first
        queue.send(f"a{number}", group="a")
    queue.send("b1", group="b")
    application = place.application.execution_options(isolation_level="READ COMMITTED")
    with application.connect() as connection:
        queue.ack(a0, transaction=connection)
        assert taken(queue) == ["b1"]
        connection.commit()
