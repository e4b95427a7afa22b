"""Redis and Valkey, where the contract does not look: what is in the keys, and in which order."""

import json
import random

import pytest
from redis import Redis
from redis_support import LONG_MS, engine_at, queue_of, refs, until

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Databases
from kmqpy.dev.ports import free_ports
from kmqpy.errors import MessageError
from kmqpy.queue.canonical import body_digest
from kmqpy.storages import settings as stored_settings
from kmqpy.storages.engine import ANY_TAKE, NewRow, TakeRef
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.redis import engine, server
from kmqpy.testing import ManualClock


class Both:
    """The same calls on Redis and on memory, whose results must be the same but for ids and times."""

    def __init__(self, redis, memory, seed, **settings):
        self.random = random.Random(seed)
        self.sides = []
        for one in (redis, memory):
            self.sides.append((one, queue_of(one, f"q{seed}", **settings)))
        self.ids = []  # pairs of ids, in the order they were put
        self.takes = [TakeRef(0, 1)]  # the id is an index in self.ids
        self.is_forgetful = settings.get("delivery") == "at-most-once"
        self.collapses = settings.get("collapse", False)
        self.has_groups = "fair" in settings or settings.get("order") == "group"
        self.gone = {}  # by take: the rows of both

    def call(self, name, *arguments, **keywords):
        first, second = (
            self.shown(side, getattr(engine, name)(queue, *self.local(side, arguments), **keywords, **more))
            for side, (engine, queue) in enumerate(self.sides)
            for more in [self.with_gone(side, name, arguments)]
        )
        assert first == second, (name, arguments, keywords)
        return first

    def with_gone(self, side, name, arguments):
        if not self.is_forgetful or name not in ("give_back", "bury"):
            return {}
        return {"gone": [self.gone[take][side] for take in arguments[0] if take in self.gone]}

    def local(self, side, arguments):
        """Arguments with the ids of one of the two."""
        for one in arguments:
            if isinstance(one, list) and one and isinstance(one[0], TakeRef):
                yield [TakeRef(self.ids[take.id][side] if self.ids else 10**6, take.take) for take in one]
            else:
                yield one

    def shown(self, side, result):
        rows = getattr(result, "rows", result)
        if not isinstance(rows, list) or (rows and isinstance(rows[0], int)):
            return result
        numbers = {pair[side]: index for index, pair in enumerate(self.ids)}
        if rows and self.is_forgetful and result is not rows:  # a take
            for row in rows:
                self.gone.setdefault(TakeRef(numbers[row.id], row.take), {})[side] = row
        if rows and isinstance(rows[0], TakeRef):
            return [one._replace(id=numbers.get(one.id)) for one in rows]
        # Times are those of two clocks, so only whether they are there, and which is the later one.
        return [
            row._replace(
                id=numbers[row.id],
                enqueued_ms=row.enqueued_ms > row.first_enqueued_ms,
                first_enqueued_ms=0,
                since_ms=row.since_ms > 0,
                until_ms=row.until_ms > 0,
                place=0,
            )
            for row in rows
        ]

    def put(self):
        some = self.random
        bodies = [b"%d" % some.randrange(4 if self.collapses else 1000) for _ in range(some.randint(1, 8))]
        rows = [
            NewRow(
                body,
                some.choice([None, b"", b"key"]),
                some.choice([(), (("a\0", b"\xff"), ("a\0", None), ("", b""))]),
                some.choice([0, 0, 0, 0, LONG_MS]),
                0 if self.has_groups else some.choice([0, 0, 0, 1, 9]),
                body_digest(body) if self.collapses else None,
                some.choice([None, "a", "b", "c"]) if self.has_groups else None,
            )
            for body in bodies
        ]
        self.ids += zip(*(engine.put(queue, rows) for engine, queue in self.sides), strict=True)

    def take(self):
        # A lease of nothing ends before the next call.
        taken = self.call("take", self.random.randint(1, 6), self.random.choice([LONG_MS, LONG_MS, 0]))
        self.takes += [TakeRef(row[0], row[1]) for row in taken]

    def step(self):
        some = self.random
        # Recent takes most often; also those that are not current any more, and some that never were.
        takes = [*{some.choice(self.takes[-20:]) for _ in range(some.randint(1, 4))}]
        if self.ids and not self.is_forgetful and some.random() < 0.4:  # whoever has them, or nobody yet
            named = {some.choice([one.id, some.randrange(len(self.ids))]) for one in takes}
            takes = [one for one in takes if one.id not in named] + [TakeRef(one, ANY_TAKE) for one in named]
        choice = some.randrange(13)
        if choice <= 2:
            self.put()
        elif choice <= 5:
            self.take()
        elif choice == 6:
            self.call("finish", takes)
        elif choice == 7:
            delay, reason = some.choice([0, 0, LONG_MS]), some.choice([None, "", "é: why"])
            self.call("give_back", takes, delay_ms=delay, count=some.random() < 0.7, reason=reason)
        elif choice == 8:
            self.call("extend", takes, some.choice([LONG_MS, 0]))
        elif choice == 9:
            self.call("bury", takes, "rejected: ü")
        elif choice == 10:
            self.call("redrive", ids=None, limit=some.choice([None, 1, 3]))
        elif choice == 11 and some.random() < 0.3:
            self.call(some.choice(["purge", "purge_dead", "release_all"]))
        else:
            self.look()

    def look(self):
        self.call("counts")
        self.call("peek", 5)
        self.call("peek", 10_000)
        self.call("taken_rows", limit=1000)
        self.call("dead_rows", 1000, with_bodies=True)
        self.call("dead_rows", 2, with_bodies=False)


def ids_by_place(admin, key):
    """Every id that is in an order or an index, and the keys that name it."""
    found = {}
    for part in ("fresh", "ordered", "delayed", "taken", "dead", "behind"):
        name = f"{key}:{part}"
        for one in admin.lrange(name, 0, -1) if part == "fresh" else admin.zrange(name, 0, -1):
            found.setdefault(one[one.find(b"\0") + 17 :] if part == "behind" else one, []).append(part)
    return found


@pytest.fixture
def few_are_noise(monkeypatch):
    """A group is noisy with three messages in flight that are more than half of all."""
    name, code = server._library()
    changed = code.replace("NOISY_FROM, NOISY_PART = 30, 10", "NOISY_FROM, NOISY_PART = 3, 2")
    assert changed != code
    found = (f"{name}_few", changed.replace(name, f"{name}_few"))
    monkeypatch.setattr(server, "_library", lambda: found)
    monkeypatch.setattr(stored_settings, "NOISY_FROM", 3)
    monkeypatch.setattr(stored_settings, "NOISY_PART", 2)


@pytest.mark.usefixtures("few_are_noise")
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.breadth] if seed % 4 else []) for seed in range(34)]
)
def test_it_does_what_memory_does_and_each_id_is_in_one_place(url, queue_name, seed):
    some = random.Random(seed)
    settings = {
        "max_redeliveries": some.choice([None, 0, 2]),
        "requeue_to": some.choice(["back", "front"]),
        "redelivery": some.choice(["automatic", "automatic", "manual"]),
        "delivery": "at-least-once" if some.random() < 0.7 else "at-most-once",
        "collapse": some.random() < 0.5,
    }
    if seed >= 28:
        settings |= {"delivery": "at-least-once", "collapse": False, "fair": True, "fair_by": "noise"}
        settings["max_in_flight_per_group"] = some.choice([None, 5])
    elif seed >= 24:
        settings |= {"delivery": "at-least-once", "collapse": False, "order": "group"}
    elif seed >= 16:
        settings |= {"delivery": "at-least-once", "collapse": False, "fair": some.random() < 0.6}
        settings["max_in_flight_per_group"] = some.choice([1, 2, 5])
    clock = ManualClock()
    with engine_at(url, queue_name) as redis, Redis.from_url(url) as admin:
        both = Both(redis, MemoryEngine(clock), seed, **settings)
        key = f"{queue_name}:{{{both.sides[0][1].generation}}}"
        for _ in range(150):
            clock.advance(0.001)
            SYSTEM_CLOCK.sleep(0.001)
            both.step()
            places = ids_by_place(admin, key)
            assert all(len(parts) == 1 for parts in places.values()), places
            alive = {one for one, parts in places.items() if parts != ["dead"]}
            assert alive == set(admin.hkeys(f"{key}:rows"))
            assert (
                set(places) - alive
                == set(admin.hkeys(f"{key}:dead_rows"))
                == set(admin.hkeys(f"{key}:dead_cards"))
            )
            assert set(admin.hkeys(f"{key}:states")) <= alive
            digests = admin.hgetall(f"{key}:digests")
            assert digests.keys() <= alive - set(admin.zrange(f"{key}:taken", 0, -1))
            assert set(admin.zrange(f"{key}:twins", 0, -1)) == {
                digest + one for one, digest in digests.items()
            }
            leased = set(admin.zrange(f"{key}:leases", 0, -1))
            assert leased == (
                set() if settings["redelivery"] == "manual" else set(admin.zrange(f"{key}:taken", 0, -1))
            )
        both.look()


def test_nothing_is_left_of_what_was_finished(url, queue_name):
    with engine_at(url, queue_name) as redis, Redis.from_url(url) as admin:
        queue = queue_of(redis, max_redeliveries=0)
        before = {key: admin.memory_usage(key) for key in admin.keys(f"{queue_name}:*")}
        assert len(before) == 3
        for _ in range(3):
            redis.put(queue, [NewRow(bytes(1000), priority=index % 3) for index in range(3000)])
            redis.put(queue, [NewRow(b"later", delay_ms=LONG_MS)] * 100)
            redis.finish(queue, refs(redis.take(queue, 2000, LONG_MS).rows))
            taken = redis.take(queue, 500, LONG_MS).rows
            redis.give_back(queue, refs(taken), delay_ms=0, count=False, reason="x")
            redis.finish(queue, refs(taken))
            redis.bury(queue, refs(redis.take(queue, 200, LONG_MS).rows), "x")
            redis.redrive(queue, ids=None, limit=100)
            redis.finish(queue, refs(redis.take(queue, 200, LONG_MS).rows))
            assert redis.purge_dead(queue) == 100
            assert redis.purge(queue) == 300
        after = {key: admin.memory_usage(key) for key in admin.keys(f"{queue_name}:*")}
        assert set(after) == set(before)
        assert sum(after.values()) <= sum(before.values()) + 100
        redis.delete_queue(queue)
        assert len(admin.keys(f"{queue_name}:*")) == 1


def test_a_large_batch_is_kept_where_redis_need_not_search_for_each_value(url, queue_name):
    with engine_at(url, queue_name) as redis, Redis.from_url(url) as admin:
        queue = queue_of(redis)
        before = {*admin.keys(f"{queue_name}:*")}
        key = f"{queue_name}:{{{queue.generation}}}"

        def kept_as():
            parts = ("rows", "states", "taken", "leases")
            return {part: admin.object("ENCODING", f"{key}:{part}").decode() for part in parts}

        redis.put(queue, [NewRow(b"")] * 5)
        few = redis.take(queue, 5, LONG_MS).rows
        assert {*kept_as().values()} == {"listpack"}  # which takes the least memory
        redis.put(queue, [NewRow(b"")] * 50)
        many = redis.take(queue, 50, LONG_MS).rows
        assert [row.id for row in many] == [*range(few[-1].id + 1, few[-1].id + 51)]
        assert kept_as() == {
            "rows": "hashtable",
            "states": "hashtable",
            "taken": "skiplist",
            "leases": "skiplist",
        }
        assert [admin.hlen(f"{key}:{part}") for part in ("rows", "states")] == [55, 55]
        assert [admin.zcard(f"{key}:{part}") for part in ("taken", "leases")] == [55, 55]
        redis.finish(queue, refs([*few, *many]))
        assert {*admin.keys(f"{queue_name}:*")} == before


def test_no_id_is_used_twice_in_a_storage(redis_url, queue_name, monkeypatch):
    monkeypatch.setattr(engine, "_NUMBERS_PER_BLOCK", 3000)  # so that queues need new ones often
    with engine_at(redis_url, queue_name) as redis:
        queues = [queue_of(redis, name) for name in "ab"]
        ids = {name: [] for name in "abc"}
        for _ in range(20):
            for queue in queues:
                ids[queue.name] += redis.put(queue, [NewRow(b"")] * 300)
        ids["a"] += redis.put(queues[0], [NewRow(b"")] * 5000)
        redis.delete_queue(queues[1])
        ids["c"] += redis.put(queue_of(redis, "b"), [NewRow(b"")] * 300)
        every = [one for some in ids.values() for one in some]
        assert len(set(every)) == len(every) == 17_300
        assert [row.id for row in redis.peek(queues[0], 20_000)] == ids["a"] == sorted(ids["a"])


def test_a_lost_registry_gives_no_number_twice(redis_url, admin, queue_name, monkeypatch):
    monkeypatch.setattr(engine, "_NUMBERS_PER_BLOCK", 3000)
    with engine_at(redis_url, queue_name) as redis:
        queue_of(redis, "other")
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"")] * 500)
        admin.delete(f"{queue_name}:{{queues}}")
        for _ in range(5):
            ids += redis.put(queue, [NewRow(b"")] * 500)
        assert ids == sorted({*ids})


def test_what_is_much_is_done_in_steps_and_complete(redis_url, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis, max_redeliveries=0)
        redis.put(queue, [NewRow(b"x")] * 5000)
        taken = redis.take(queue, 5000, LONG_MS).rows
        assert len(taken) == 5000
        assert redis.finish(queue, refs(taken[:2500])) == 2500
        assert redis.release_all(queue) == 2500
        redis.take(queue, 5000, 0)  # all of these leases end at once, and nothing more may be redelivered
        assert redis.counts(queue)[:4] == (0, 0, 0, 2500)
        assert [one.id for one in redis.dead_rows(queue, 5000, with_bodies=False)] == [
            one.id for one in taken[2500:]
        ]
        assert redis.redrive(queue, ids=[one.id for one in taken], limit=None) == 2500
        assert redis.purge(queue) == 2500
        assert redis.counts(queue)[:4] == (0, 0, 0, 0)


@pytest.mark.breadth
def test_large_messages_are_read_in_pieces(redis_url, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        bodies = [bytes([number]) * 2**20 for number in range(36)]
        for body in bodies:
            redis.put(queue, [NewRow(body)])
        assert [row.body for row in redis.peek(queue, 100)] == bodies
        first = redis.take(queue, 100, LONG_MS).rows
        assert 1 < len(first) < 36  # a reply is not larger than a server can make
        while rows := redis.take(queue, 100, LONG_MS).rows:
            first += rows
        assert [row.body for row in first] == bodies
        assert [row.body for row in redis.taken_rows(queue, limit=100)] == bodies
        redis.bury(queue, refs(first), "x")
        assert [row.body for row in redis.dead_rows(queue, 100, with_bodies=True)] == bodies
        assert [row.size for row in redis.dead_rows(queue, 100, with_bodies=False)] == [2**20] * 36
        with pytest.raises(MessageError, match="at most 536870912 bytes at once"):
            redis.put(queue, [NewRow(bodies[0])] * 513)
        redis.delete_queue(queue)


def test_a_cluster_has_all_keys_of_a_call_in_one_slot():
    """Redis refuses a function that uses keys of two slots, also where one node has all of them."""
    (port,) = free_ports(1)  # the default, 10,000 above the other one, may be taken
    with Databases(
        "redis", settings={"redis": {"cluster-enabled": "yes", "cluster-port": str(port)}}
    ) as databases:
        url = databases.urls["redis"]
        with Redis.from_url(url) as admin:
            admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            until(lambda: b"cluster_state:ok" in admin.execute_command("CLUSTER", "INFO"))
            with pytest.raises(Exception, match=r"(?i)slot"):
                admin.eval("#!lua\nreturn redis.call('GET', 'other')", 1, "key")
        clock = ManualClock()
        with engine_at(url) as redis:
            for seed in range(3):
                both = Both(redis, MemoryEngine(clock), seed, max_redeliveries=1)
                for _ in range(100):
                    clock.advance(0.001)
                    SYSTEM_CLOCK.sleep(0.001)
                    both.step()
                engine, queue = both.sides[0]
                engine.delete_queue(queue)
            assert redis.queue_names() == []


def test_settings_of_a_queue_are_kept_as_json(redis_url, admin, queue_name):
    """Those who look at the keys by hand, and other versions, can read them."""
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis, "é", max_redeliveries=None)
        value = admin.hget(f"{queue_name}:{{queues}}:names", "é").decode()
        generation, _, settings = value.partition(" ")
        assert (generation, json.loads(settings)["max_redeliveries"]) == (queue.generation, None)
