"""Groups in SQL within transactions of the application, and whom their locks hold up."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import psycopg
import pytest
from sql_support import Place, taken
from sqlalchemy import text

from kmqpy.errors import ConfigError, Unavailable
from kmqpy.message import OutgoingMessage
from kmqpy.queue import Queue, storage_for
from kmqpy.storages.sql import engine, groups, shares
from kmqpy.storages.sql.dialect import Picked, situation
from kmqpy.storages.sql.engine import SqlEngine
from kmqpy.storages.sql.pipeline import Pipeline


@pytest.fixture
def grouped(place: Place) -> Iterator[Queue]:
    with place.queue(order="group") as queue:
        queue.send_many(
            [OutgoingMessage(name, group=name[0]) for name in ("a1", "a2", "a3", "a4", "b1", "b2")]
        )
        yield queue


def test_a_group_goes_on_when_the_transaction_commits(place: Place, grouped: Queue) -> None:
    (a1,) = grouped.receive(1, lease=60)
    if place.name == "sqlite":
        assert taken(grouped) == ["b1"]
    with place.application.connect() as connection:
        grouped.ack(a1, transaction=connection)
        if place.name != "sqlite":  # there the transaction is the only writer
            assert taken(grouped) == ["b1"]
            assert taken(grouped) == []
        connection.rollback()
        assert taken(grouped, 9) == []
        grouped.ack(a1, transaction=connection)
        connection.commit()
    assert taken(grouped, 9) == ["a2", "a3", "a4"]


def test_two_transactions_that_end_a_batch_forget_nobody_behind_it(place: Place, grouped: Queue) -> None:
    a1, a2 = grouped.receive(2, lease=60)
    assert taken(grouped, 9) == ["b1", "b2"]
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    with place.application.connect() as one, place.application.connect() as other:
        grouped.ack(a1, transaction=one)
        grouped.ack(a2, transaction=other)
        assert taken(grouped) == []
        one.commit()
        assert taken(grouped) == []
        other.commit()
    assert taken(grouped, 9) == ["a3", "a4"]


def test_sends_into_a_group_wait_for_no_transaction(place: Place, grouped: Queue) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    (a1,) = grouped.receive(1, lease=60)
    with place.application.connect() as connection:
        grouped.send("a5", group="a", transaction=connection)
        grouped.send("a6", group="a")
        grouped.ack(a1)
        assert taken(grouped, 2) == ["a2", "a3"]
        connection.commit()
    assert "a5" not in taken(grouped, 9)


def test_a_batch_ends_before_what_a_transaction_has(place: Place, grouped: Queue) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    ids = place.execute(f"SELECT id FROM {place.names.tables['messages']} ORDER BY id")
    application = place.application.execution_options(isolation_level="READ COMMITTED")
    with application.connect() as connection:
        grouped.ack(grouped.receipt(str(ids[1][0])), transaction=connection)
        assert taken(grouped, 9) == ["a1", "b1", "b2"]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"max_in_flight_per_group": 1}])
def test_what_a_transaction_ends_out_of_turn_comes_if_it_is_rolled_back(
    place: Place, settings: dict[str, Any]
) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    with place.queue(**settings) as queue:
        queue.send("a1", group="a")
        (a1,) = queue.receive(1, lease=60)
        a2 = queue.send("a2", group="a")
        assert taken(queue) == []  # now a2 waits for a1
        with place.application.connect() as connection:
            queue.ack(queue.receipt(a2), transaction=connection)
            assert taken(queue) == []
            queue.ack(a1)
            assert taken(queue) == []
            connection.rollback()
        assert taken(queue) == ["a2"]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"max_in_flight_per_group": 1}])
def test_what_a_transaction_had_locked_when_its_turn_came_comes_later(
    place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    monkeypatch.setattr(SqlEngine, "_show_waiting", lambda *_: None)  # a taker was faster
    monkeypatch.setattr(engine, "_LOOKS_EACH_S", 0)
    with place.queue(**settings) as queue:
        queue.send("a1", group="a")
        (a1,) = queue.receive(1, lease=60)
        a2 = queue.send("a2", group="a")
        assert taken(queue) == []
        with place.application.connect() as connection:
            queue.ack(queue.receipt(a2), transaction=connection)
            queue.ack(a1)
            connection.rollback()
        assert taken(queue) == ["a2"]


def test_of_many_groups_of_the_highest_rank_the_one_comes_of_which_least_is_taken(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_MAX_RANK", 2), ("_FEWEST_LOOKED", 4)):
        monkeypatch.setattr(shares, name, value)
    with place.queue(fair=True) as queue:
        many = [f"{number}" for number in range(6)]
        queue.send_many([OutgoingMessage("x", group=name) for name in (*many * 5, "z", "z")])
        in_flight = 0
        while in_flight < 32:
            in_flight += len(taken(queue, 32))
        queue.send_many([OutgoingMessage(name, group=name) for name in (*many, "z", "z")])
        assert [taken(queue), taken(queue)] == [["z"], ["z"]]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"fair": True}])
def test_a_take_finds_what_another_taker_has_just_made_ready(
    place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    with storage_for(place.url) as storage, storage_for(place.url) as other_storage:
        storage.create("q", **settings)
        queue, other = storage.open("q"), other_storage.open("q")
        queue.send("late", group="a", delay=60)
        place.execute(f"UPDATE {place.names.tables['messages']} SET until_ms = 1")

        def later(*arguments: Any) -> Picked:
            assert other.size() == 1  # it carries out delays that have ended
            return situation(*arguments)

        for module in (groups, shares):
            monkeypatch.setattr(module, "situation", later)
        assert taken(queue) == ["late"]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"max_in_flight_per_group": 1}])
def test_what_waits_when_the_others_have_ended_unseen_comes(
    place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if place.name not in ("mariadb", "mysql"):
        pytest.skip("who ends a message sees all that waits for it")
    with place.queue(**settings) as queue:
        queue.send("1", group="a")
        (first,) = queue.receive(1, lease=60)
        queue.send("2", group="a")
        if "order" not in settings:  # then nobody waits for it
            queue.send("delayed", group="a", delay=60)
        show = SqlEngine._show_stranded

        def later(*arguments: Any) -> None:  # a lock of a commit was not released yet, and was skipped
            place.execute(f"DELETE FROM {place.names.tables['messages']} WHERE id = {first.id}")
            show(*arguments)

        monkeypatch.setattr(SqlEngine, "_show_stranded", later)
        assert queue.receive(1, wait=0) == []
        assert [one.body for one in queue.receive(1, wait=0)] == [b"2"]


@pytest.mark.parametrize("settings", [{"order": "group"}, {"max_in_flight_per_group": 1}])
def test_a_taker_that_can_not_look_keeps_what_it_took_and_the_next_one_looks(
    place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    if place.name not in ("mariadb", "mysql"):
        pytest.skip("who ends a message sees all that waits for it")
    with place.queue(**settings) as queue:
        queue.send("1", group="a")
        (first,) = queue.receive(1, lease=60)
        queue.send_many([OutgoingMessage(name, group=name[0]) for name in ("a2", "a3", "b1")])

        def fail(*_: Any) -> None:
            place.execute(f"DELETE FROM {place.names.tables['messages']} WHERE id = {first.id}")
            raise Unavailable("the server is away")

        with monkeypatch.context() as patched:
            patched.setattr(SqlEngine, "_show_stranded", fail)
            assert taken(queue, 9) == ["b1"]
        assert taken(queue, 9) == []
        with storage_for(place.url) as other:
            assert taken(other.open("q"))[:1] == ["a2"]


@pytest.mark.parametrize(
    "place", ["postgresql", "mariadb", pytest.param("mysql", marks=pytest.mark.breadth)], indirect=True
)
def test_an_engine_looks_at_all_that_wait_a_part_at_a_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "_MOST_PICKED", 2)
    monkeypatch.setattr(engine, "_LOOKS_EACH_S", 0)
    with place.queue(order="group") as queue:
        names = [f"{number}" for number in range(7)]
        queue.send_many([OutgoingMessage(name, group=name) for name in names])
        place.execute(f"UPDATE {place.names.tables['messages']} SET state = 4")
        found = [one for _ in range(9) for one in taken(queue, 9)]
    assert sorted(found) == names


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
@pytest.mark.parametrize("settings", [{"order": "group"}, {"fair": True}])
def test_what_a_server_may_have_lost_before_the_sync_is_handed_to_nobody(
    place: Place, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    sync, run, ended = SqlEngine._sync, Pipeline.run, list[Any]()
    end = "SELECT pg_terminate_backend(pg_backend_pid())"

    def lost(self: SqlEngine, parameters: Any, cursor: Any, picked: Any) -> None:
        ended.append(picked)
        if len(ended) == 1:
            cursor.execute(end)
        sync(self, parameters, cursor, picked)

    def lost_at_once(self: Pipeline, take: Any, then: Any) -> Any:
        ended.append(take)
        return run(self, take, [(end, {})] if len(ended) == 1 else then)

    with place.queue(**settings) as queue:
        queue.send("1", group="a")
        queue.send("2", group="b")
        monkeypatch.setattr(SqlEngine, "_sync", lost)
        monkeypatch.setattr(Pipeline, "run", lost_at_once)
        (first,) = queue.receive(1, wait=0, lease=3)  # 1 must not come again meanwhile
        (again,) = queue.receive(1, wait=30, lease=60)
    assert (first.body, again.body) == (b"2", b"1")


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
@pytest.mark.parametrize("pipelines", [False, True])
def test_what_a_take_has_found_is_returned_if_it_can_not_look_for_more(
    place: Place, monkeypatch: pytest.MonkeyPatch, pipelines: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise Unavailable("the server has just ended")

    monkeypatch.setattr(psycopg.Pipeline, "is_supported", lambda: pipelines)
    with place.queue(order="group") as queue:
        queue.send_many([OutgoingMessage(f"{group}{at}", group=group) for at in range(2) for group in "ab"])
        monkeypatch.setattr(engine, "take_grouped", fail)
        found = queue.receive(9, wait=0)
        assert [one.body for one in found] == [b"a0", b"b0", b"a1", b"b1"]
        with pytest.raises(Unavailable):
            queue.receive(9, wait=0)


@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_what_somebody_has_locked_keeps_no_other_from_being_handed_out(place: Place, grouped: Queue) -> None:
    with place.application.connect() as connection:
        messages = place.names.tables["messages"]
        connection.execute(text(f"SELECT id FROM {messages} WHERE group_name = 'b' FOR UPDATE"))
        assert taken(grouped, 9) == ["a1", "a2", "a3", "a4"]
    assert taken(grouped, 9) == ["b1", "b2"]


def test_a_transaction_that_would_not_see_who_waits_is_refused(place: Place, grouped: Queue) -> None:
    if place.name != "postgresql":
        pytest.skip("its snapshots hide nothing from a statement that locks")
    (a1,) = grouped.receive(1, lease=60)
    strict = place.application.execution_options(isolation_level="REPEATABLE READ")
    with strict.connect() as connection, pytest.raises(ConfigError, match="read committed"):
        grouped.ack(a1, transaction=connection)


@pytest.mark.parametrize("place", ["sqlite"], indirect=True)
def test_a_dead_letter_may_hold_its_group(place: Place) -> None:
    with place.queue(order="group", on_dead_letter="hold") as queue:
        queue.send_many([OutgoingMessage(name, group="a") for name in ("a1", "a2")])
        queue.dead_letter(queue.receive(1, lease=60), confirmed=True)
        assert taken(queue) == []
        queue.dead_letters.purge()
        assert taken(queue) == ["a2"]


def test_a_purge_of_dead_letters_lets_only_those_go_on_that_they_held(place: Place) -> None:
    with place.queue(order="group", on_dead_letter="hold") as queue:
        queue.send_many(
            [OutgoingMessage(name, group=name[0]) for name in ("a1", "a2", "b1", "b2", "c1", "c2")]
        )
        a1, *_ = queue.receive(9, wait=0, lease=60, one_per_group=True)
        queue.dead_letter(a1, confirmed=True)
        assert taken(queue) == []
        queue.dead_letters.purge()
        ready = f"SELECT body FROM {place.names.tables['messages']} WHERE state = 0"
        assert [bytes(body) for (body,) in place.execute(ready)] == [b"a2"]


@pytest.mark.parametrize("is_dead", [False, True])
@pytest.mark.parametrize("place", ["postgresql"], indirect=True)
def test_a_purge_forgets_nobody_who_was_let_wait_for_what_it_removes(place: Place, is_dead: bool) -> None:
    """On the others it can't happen, or takers look for what was forgotten."""
    messages = place.names.tables["messages"]
    with place.queue(order="group", on_dead_letter="hold") as queue, ThreadPoolExecutor(1) as thread:
        queue.send("a1", group="a")
        (a1,) = queue.receive(1, lease=60)
        if is_dead:
            queue.dead_letter(a1, confirmed=True)
        with place.application.connect() as taker:
            taker.execute(text(f"SELECT id FROM {messages} WHERE id = {a1.id} FOR UPDATE"))
            purging = thread.submit(queue.dead_letters.purge if is_dead else queue.purge)
            waiting = "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE"
            while not place.execute(f"{waiting} 'DELETE FROM {messages}%%'"):
                assert not purging.done()
            a2 = queue.send("a2", group="a")
            taker.execute(text(f"UPDATE {messages} SET state = 4 WHERE id = {a2}"))
            taker.commit()
        assert purging.result() == 1
        assert taken(queue) == ["a2"]


def test_a_take_does_not_look_again_and_again_at_what_a_transaction_holds_up(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    if place.name == "sqlite":
        pytest.skip("one transaction at a time")
    monkeypatch.setattr(groups, "CHUNK", 4)
    with place.queue(order="group") as queue:
        queue.send("a0", group="a")
        (a0,) = queue.receive(1, lease=60)
        for number in range(1, 9):
            queue.send(f"a{number}", group="a")
        application = place.application.execution_options(isolation_level="READ COMMITTED")
        with ThreadPoolExecutor(1) as thread, application.connect() as connection:
            queue.ack(a0, transaction=connection)
            looking = thread.submit(taken, queue)
            wait([looking], timeout=10)
            connection.commit()
            assert looking.result() == []
        assert taken(queue, 9)[0] == "a1"
