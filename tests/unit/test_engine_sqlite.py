"""The engine of SQL beside the memory engine: both do the same, also by ids and in queues that collapse."""

import random
from contextlib import ExitStack, closing

import pytest
import sqlalchemy

from kmqpy.queue.canonical import body_digest
from kmqpy.storages import settings as stored_settings
from kmqpy.storages.dedup import key_of_body
from kmqpy.storages.engine import ANY_TAKE, MessageRow, NewRow, TakeRef
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.storages.sql import shares as sql_shares
from kmqpy.storages.sql.engine import SqlEngine
from kmqpy.storages.sql.sqlite import Sqlite
from kmqpy.storages.sql.statements import Names
from kmqpy.testing import ManualClock


def shown(rows, known=None):
    """Rows as they can be compared: with the memory engine's ids, and without places, which differ."""
    return [row._replace(id=known[row.id] if known else row.id, place=0) for row in rows]


def named(chance, takes, known):
    """Pairs of takes, ours and the model's; some name a message whoever has it, perhaps one that is gone.

    None names a message twice: SQL decides about all in one statement.
    """
    some = chance.sample(takes, min(len(takes), chance.randint(0, 6)))
    pairs = [(TakeRef(one.id, one.take), TakeRef(other.id, other.take)) for one, other in some]
    pairs = [
        tuple(one._replace(take=ANY_TAKE) for one in pair) if chance.random() < 0.3 else pair
        for pair in pairs
    ]
    for row_id in chance.sample([*known], min(len(known), chance.choice([0, 0, 3]))):
        pairs.append((TakeRef(row_id, ANY_TAKE), TakeRef(known[row_id], ANY_TAKE)))
    return [*{one.id: (one, other) for one, other in pairs}.values()]


def counted(counts, settings):
    """Counts as they can be compared: a delayed message behind another one may count as ready."""
    return (
        counts._replace(ready=counts.ready + counts.delayed, delayed=0)
        if settings["order"] == "group"
        else counts
    )


_CHOSEN = {0, 2, 6, 8, 12, 20, 28, 32, 38, 40, 48, 50, 52, 54}
"""These have all kinds of settings among them."""


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in _CHOSEN else pytest.mark.breadth) for seed in range(55)]
)
def test_sqlite_does_what_memory_does(seed, tmp_path, monkeypatch):
    """`known` gives the memory engine's id for each of ours."""
    chance = random.Random(seed)
    clock = ManualClock()
    settings = {
        "max_redeliveries": chance.choice([None, 0, 2]),
        "requeue_to": chance.choice(["back", "front"]),
        "redelivery": chance.choice(["automatic", "automatic", "manual"]),
        "delivery": "at-least-once" if chance.random() < 0.8 else "at-most-once",
        "collapse": chance.random() < 0.6,
    }
    settings["order"] = "fifo"
    if 20 <= seed < 40:
        settings |= {"order": "group", "delivery": "at-least-once", "collapse": False}
        settings["on_dead_letter"] = chance.choice(["continue", "hold"])
        settings["dedup_until"] = chance.choice(["window", "acknowledged"])
        settings["dedup_window_ms"] = 1_000
        settings["retry_delays"] = chance.choice([(), ("0s", "600ms")])
    if seed >= 40:
        settings |= {"order": "any", "delivery": "at-least-once", "collapse": False, "fair": True}
        settings["max_in_flight_per_group"] = chance.choice([None, 1, 2, 3])
        settings["fair"] = settings["max_in_flight_per_group"] is None or chance.random() < 0.6
        # With seed 55, or release_all(), what SQL counts is of later than what memory does (rule 13).
        settings["fair_by"] = "noise" if settings["fair"] and seed >= 48 else "in_flight"
    for module in (stored_settings, sql_shares):  # few messages make noise
        monkeypatch.setattr(module, "NOISY_FROM", 3)
        monkeypatch.setattr(module, "NOISY_PART", 2)
    shares = seed >= 40
    releases = [] if settings.get("fair_by") == "noise" else ["release_all"]
    in_groups = settings["order"] == "group"
    is_forgetful = settings["delivery"] == "at-most-once"
    url = sqlalchemy.URL.create("sqlite", database=str(tmp_path / "queues.db"))
    with ExitStack() as stack:
        engines = [
            stack.enter_context(closing(SqlEngine(Sqlite(url, Names(), clock, pool_size=2), Names())))
            for _ in range(2)
        ]
        model = MemoryEngine(clock)
        for engine in (engines[0], model):
            engine.create_queue(StoredQueueSettings(name="q", **settings))
        queue, expected = engines[0].find_queue("q"), model.find_queue("q")
        known: dict[int, int] = {}
        takes: list[tuple[MessageRow, MessageRow]] = []
        for _ in range(100):
            engine = chance.choice(engines)
            pairs = named(chance, takes, known)
            gone, model_gone = [], []
            if is_forgetful:
                some = chance.sample(takes, min(len(takes), 3))
                gone, model_gone = [one for one, _ in some], [one for _, one in some]
                pairs = [(TakeRef(one.id, one.take), TakeRef(other.id, other.take)) for one, other in some]
            ours, theirs = [one for one, _ in pairs], [one for _, one in pairs]
            match chance.randint(0, 10):
                case 0 | 1 | 2:
                    bodies = [b"%d" % chance.randint(0, 5) for _ in range(chance.randint(1, 12))]
                    new = [
                        NewRow(
                            body,
                            chance.choice([None, b"key"]),
                            chance.choice([(), (("a", b"\xff"), ("b", None))]),
                            chance.choice([0, 0, 500]),
                            0 if in_groups or shares else chance.choice([0, 0, 9]),
                            body_digest(body) if settings["collapse"] else None,
                            chance.choice([None, "a", "b", "c"]),
                            key_of_body(body) if in_groups and chance.random() < 0.2 else None,
                        )
                        for body in bodies
                    ]
                    known.update(zip(engine.put(queue, new), model.put(expected, new), strict=True))
                case 3 | 4:
                    limit = chance.randint(1, 8)
                    how = {"one_per_group": chance.random() < 0.5} if in_groups else {}
                    found = engine.take(queue, limit, 1_000, **how)
                    rows = model.take(expected, limit, 1_000, **how).rows
                    if in_groups:  # SQL sorts by place
                        rows = sorted(rows, key=lambda one: one.place)
                    assert shown(found.rows, known) == shown(rows)
                    takes += zip(found.rows, rows, strict=True)
                case 5:
                    assert engine.finish(queue, ours) == model.finish(expected, theirs)
                case 6:
                    how = {
                        "delay_ms": chance.choice([0, 700, None]),
                        "count": chance.random() < 0.5,
                        "reason": "no",
                    }
                    assert engine.give_back(queue, ours, **how, gone=gone) == model.give_back(
                        expected, theirs, **how, gone=model_gone
                    )
                case 7:
                    lease_ms = chance.choice([300, 3_000])
                    lost = engine.extend(queue, ours, lease_ms)
                    model_lost = model.extend(expected, theirs, lease_ms)
                    assert [ours.index(one) for one in lost] == [theirs.index(one) for one in model_lost]
                case 8:
                    assert engine.bury(queue, ours, "bad", gone=gone) == model.bury(
                        expected, theirs, "bad", gone=model_gone
                    )
                case 9:
                    clock.advance(chance.choice([0.001, 0.4, 1.0, 5.0]))
                case 10:
                    name = chance.choice(["purge", "purge_dead", "redrive", *releases])
                    how = {"ids": None, "limit": chance.choice([None, 3])} if name == "redrive" else {}
                    assert getattr(engine, name)(queue, **how) == getattr(model, name)(expected, **how)
            assert counted(engine.counts(queue), settings) == counted(model.counts(expected), settings)
            if not shares:  # each shows others of those that wait behind the first of their group
                assert shown(engine.peek(queue, 5), known) == shown(model.peek(expected, 5))
            assert shown(engine.taken_rows(queue, limit=4), known) == shown(
                model.taken_rows(expected, limit=4)
            )
            assert shown(engine.dead_rows(queue, 3, with_bodies=True), known) == shown(
                model.dead_rows(expected, 3, with_bodies=True)
            )
