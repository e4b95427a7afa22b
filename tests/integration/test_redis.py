"""Redis and Valkey, where the contract does not look: what is in the keys, who else writes there, faults."""

import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest
from redis import Redis
from redis.connection import Connection
from redis.exceptions import ConnectionError as Cut

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Databases
from kmqpy.dev.ports import free_ports
from kmqpy.errors import AccessDenied, ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages.engine import Counts, NewRow, TakeRef
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.redis import arrivals, engine
from kmqpy.storages.redis.engine import RedisEngine
from kmqpy.storages.redis.server import Server, ServerSettings
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.testing import ManualClock

LONG_MS = 3_600_000
PATIENCE_S = 60


@pytest.fixture(params=["redis", "valkey"])
def url(request, database_url):
    return database_url(request.param)


@pytest.fixture
def redis_url(database_url):
    """Of one of them, for what does not depend on the server."""
    return database_url("redis")


@pytest.fixture
def admin(redis_url):
    with Redis.from_url(redis_url, client_name="admin") as client:
        yield client


@contextmanager
def engine_at(url, prefix="kmq", **settings):
    host, _, port = url.partition("://")[2].partition("/")[0].partition(":")
    with closing(
        RedisEngine(Server(ServerSettings(host=host, port=int(port), **settings)), prefix=prefix)
    ) as made:
        yield made


def queue_of(engine, name="q", **settings):
    assert engine.create_queue(StoredQueueSettings(name=name, **settings))
    return engine.find_queue(name)


def refs(rows):
    return [TakeRef(row.id, row.take) for row in rows]


def until(check):
    deadline = SYSTEM_CLOCK.monotonic() + PATIENCE_S
    while not check():
        assert SYSTEM_CLOCK.monotonic() < deadline
        SYSTEM_CLOCK.sleep(0.01)


# --- the keys -------------------------------------------------------------------------------------


class Both:
    """The same calls on Redis and on memory, whose results must be the same but for ids and times."""

    def __init__(self, redis, memory, seed, **settings):
        self.random = random.Random(seed)
        self.sides = []
        for one in (redis, memory):
            self.sides.append((one, queue_of(one, f"q{seed}", **settings)))
        self.ids = []  # pairs of ids, in the order they were put
        self.takes = [TakeRef(0, 1)]  # the id is an index in self.ids

    def call(self, name, *arguments, **keywords):
        first, second = (
            self.shown(side, getattr(engine, name)(queue, *self.local(side, arguments), **keywords))
            for side, (engine, queue) in enumerate(self.sides)
        )
        assert first == second, (name, arguments, keywords)
        return first

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
            )
            for row in rows
        ]

    def put(self):
        some = self.random
        rows = [
            NewRow(
                b"%d" % some.randrange(1000),
                some.choice([None, b"", b"key"]),
                some.choice([(), (("a\0", b"\xff"), ("a\0", None), ("", b""))]),
                some.choice([0, 0, 0, 0, LONG_MS]),
                some.choice([0, 0, 0, 1, 9]),
            )
            for _ in range(some.randint(1, 8))
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
    for part in ("fresh", "ordered", "delayed", "taken", "dead"):
        name = f"{key}:{part}"
        for one in admin.lrange(name, 0, -1) if part == "fresh" else admin.zrange(name, 0, -1):
            found.setdefault(one, []).append(part)
    return found


@pytest.mark.parametrize("seed", range(12))
def test_it_does_what_memory_does_and_each_id_is_in_one_place(url, queue_name, seed):
    some = random.Random(seed)
    settings = {
        "max_redeliveries": some.choice([None, 0, 2]),
        "requeue_to": some.choice(["back", "front"]),
        "redelivery": some.choice(["automatic", "automatic", "manual"]),
        "ephemeral": some.random() < 0.9,
    }
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
    monkeypatch.setattr(engine, "_NUMBERS", 3000)  # so that queues need new ones often
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
    monkeypatch.setattr(engine, "_NUMBERS", 3000)
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
        assert redis.counts(queue) == (0, 0, 0, 2500)
        assert [one.id for one in redis.dead_rows(queue, 5000, with_bodies=False)] == [
            one.id for one in taken[2500:]
        ]
        assert redis.redrive(queue, ids=[one.id for one in taken], limit=None) == 2500
        assert redis.purge(queue) == 2500
        assert redis.counts(queue) == (0, 0, 0, 0)


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


# --- who else writes here -------------------------------------------------------------------------


def test_an_emptied_server_has_no_queues_and_can_have_new_ones(redis_url, queue_name):
    other = redis_url.replace("/0", "/7")
    with storage_for(other) as storage, Redis.from_url(other) as admin:
        storage.create("q")
        with storage.open("q") as queue:
            queue.send("x")
            receipt = queue.receive()[0].receipt
            admin.flushdb()
            admin.function_flush()
            for call in (lambda: queue.send("x"), lambda: queue.ack(receipt), queue.size, queue.receive):
                with pytest.raises(QueueNotFound):
                    call()
        assert storage.list() == []
        storage.create("q")
        with storage.open("q") as queue:
            queue.send("y")
            assert queue.receive()[0].body == b"y"
        admin.flushdb()


@pytest.mark.parametrize("value", ["text", "hash"])
def test_keys_of_another_program_are_left_alone(redis_url, admin, queue_name, value):
    keys = (f"{queue_name}:{{queues}}", f"{queue_name}:{{queues}}:names")
    for key in keys if value == "text" else keys[:1]:
        if value == "text":
            admin.set(key, "theirs")
        else:
            admin.hset(key, "their", "own")
        with (
            pytest.raises(ConfigError, match="choose another prefix"),
            storage_for(f"{redis_url}?prefix={queue_name}") as storage,
        ):
            storage.create("q")
        assert admin.type(key) != b"string" or admin.get(key) == b"theirs"
        admin.delete(key)


def test_a_part_of_a_queue_that_is_somebody_elses_is_told(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        admin.set(f"{queue_name}:{{{queue.generation}}}:rows", "theirs")
        with pytest.raises(ConfigError, match="not kmqpy's"):
            redis.put(queue, [NewRow(b"x")])


@pytest.mark.parametrize("part", ["rows", "states", "taken", "leases"])
def test_a_part_that_is_somebody_elses_loses_no_message(redis_url, admin, queue_name, part):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 2)
        key = f"{queue_name}:{{{queue.generation}}}:{part}"
        if part == "rows":
            admin.rename(key, f"{key}:kept")
        admin.set(key, "theirs")
        with pytest.raises(ConfigError, match="not kmqpy's"):
            redis.take(queue, 2, LONG_MS)
        admin.delete(key)
        if part == "rows":
            admin.rename(f"{key}:kept", key)
        assert [row.id for row in redis.take(queue, 2, LONG_MS).rows] == ids


@pytest.mark.parametrize("field", ["number", "last_number", "arrivals", "largest"])
def test_a_queue_whose_numbers_are_none_is_told(redis_url, admin, queue_name, field):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")])
        key = f"{queue_name}:{{{queue.generation}}}"
        before = admin.hget(key, field)
        admin.hset(key, field, "text")
        with pytest.raises(ConfigError, match="lacks numbers"):
            redis.take(queue, 1, LONG_MS)
        admin.hset(key, field, before)
        assert [row.id for row in redis.take(queue, 1, LONG_MS).rows] == ids


def test_a_queue_whose_key_others_deleted_is_told_and_keeps_its_messages(redis_url, admin, queue_name):
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        with storage.open("q") as queue:
            queue.send("x")
            generation = storage.describe("q").generation
            key = f"{queue_name}:{{{generation}}}"
            admin.rename(key, f"{key}:backup")
            for call in (storage.describe, storage.delete, storage.open):
                with pytest.raises(ConfigError, match=r"restore the key .* or delete all keys"):
                    call("q")
            admin.rename(f"{key}:backup", key)
            assert queue.size() == 1


def test_a_queue_has_the_name_of_its_registry_entry(redis_url, admin, queue_name):
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        names = f"{queue_name}:{{queues}}:names"
        admin.hset(names, "renamed", admin.hget(names, "q"))
        admin.hdel(names, "q")
        assert storage.describe("renamed").name == "renamed"
        storage.delete("renamed")
        assert storage.list() == []


@pytest.mark.parametrize("part", ["rows", "states"])
def test_a_damaged_value_costs_no_other_message(redis_url, admin, queue_name, part):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis, redeliver_after_ms=200)
        ids = redis.put(queue, [NewRow(b"x", priority=1)] * 3)
        admin.hset(f"{queue_name}:{{{queue.generation}}}:{part}", ids[0], "short")
        rows = redis.take(queue, 3, LONG_MS).rows
        assert {row.id for row in rows} >= set(ids[1:])
        admin.hset(f"{queue_name}:{{{queue.generation}}}:states", ids[1], "short")
        assert redis.give_back(queue, refs(rows), delay_ms=0, count=True, reason=None) >= 1
        assert ids[2] in {row.id for row in redis.take(queue, 3, LONG_MS).rows}


def test_a_dead_letter_without_its_row_costs_no_other(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 3)
        redis.bury(queue, refs(redis.take(queue, 3, LONG_MS).rows), "bad")
        admin.hdel(f"{queue_name}:{{{queue.generation}}}:dead_rows", ids[1])
        assert redis.redrive(queue, ids=None, limit=None) == 2
        assert redis.counts(queue) == Counts(ready=2, delayed=0, in_flight=0, dead=1)
        assert [row.id for row in redis.take(queue, 3, LONG_MS).rows] == [ids[0], ids[2]]


def test_a_number_too_large_for_lua_is_told_and_reaches_no_other_queue(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue, other = queue_of(redis), queue_of(redis, "other")
        admin.hset(f"{queue_name}:{{{queue.generation}}}", "number", 2**60)
        with pytest.raises(ConfigError, match="has not counted to"):
            redis.put(queue, [NewRow(b"x")])
        ids = [redis.put(other, [NewRow(b"x")] * 40_000)[-1] for _ in range(3)]
        assert len(set(ids)) == 3
        assert ids[-1] < 2**32
        admin.hset(f"{queue_name}:{{queues}}", "number", 2**60)
        with pytest.raises(ConfigError, match="has not counted to"):
            redis.create_queue(StoredQueueSettings(name="third"))


def test_what_is_sent_at_once_is_limited_with_its_headers(redis_url, queue_name, monkeypatch):
    monkeypatch.setattr(engine, "_MAX_PUT_BYTES", 1000)
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        with pytest.raises(MessageError, match="send fewer"):
            redis.put(queue, [NewRow(b"", headers=(("large", b"h" * 400),))] * 3)
        assert redis.counts(queue).ready == 0


def test_names_and_settings_that_are_no_text_are_told(redis_url, admin, queue_name):
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        names = f"{queue_name}:{{queues}}:names"
        admin.hset(names, b"\xff", "x")
        assert storage.list() == ["q", "\N{REPLACEMENT CHARACTER}"]
        admin.hset(names, "q", admin.hget(names, "q").partition(b" ")[0] + b" \xff")
        with pytest.raises(ConfigError, match="not JSON"):
            storage.open("q")


def test_a_storage_of_a_newer_kmqpy_is_refused(redis_url, admin, queue_name):
    url = f"{redis_url}?prefix={queue_name}"
    storage_for(url).close()
    admin.hset(f"{queue_name}:{{queues}}", "format", engine._FORMAT + 1)
    with pytest.raises(ConfigError, match="newer kmqpy"):
        storage_for(url)


def test_a_server_that_evicts_messages_is_refused(redis_url, admin):
    admin.config_set("maxmemory", "100mb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with pytest.raises(ConfigError, match=r"evicts keys.*noeviction"):
            storage_for(redis_url)
        admin.config_set("maxmemory-policy", "volatile-lru")  # our keys do not expire
        storage_for(redis_url).close()
    finally:
        admin.config_set("maxmemory", "0")
        admin.config_set("maxmemory-policy", "noeviction")


def test_a_full_server_takes_nothing_and_still_lets_go(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        redis.put(queue, [NewRow(b"x")] * 10)
        admin.config_set("maxmemory", "1mb")
        try:
            with pytest.raises(Unavailable, match="memory is full"):
                redis.put(queue, [NewRow(b"y")])
            rows = redis.take(queue, 10, LONG_MS).rows
            assert redis.give_back(queue, refs(rows[:5]), delay_ms=0, count=True, reason=None) == 5
            assert redis.finish(queue, refs(rows)) == 10
        finally:
            admin.config_set("maxmemory", "0")
        redis.put(queue, [NewRow(b"z")])
        assert redis.counts(queue).ready == 1


def test_functions_that_were_deleted_are_loaded_again(url, queue_name):
    with engine_at(url, queue_name) as redis, Redis.from_url(url) as admin:
        queue = queue_of(redis)
        admin.function_flush()
        assert len(redis.put(queue, [NewRow(b"x")])) == 1
        admin.function_flush()
        assert len(redis.take(queue, 1, LONG_MS).rows) == 1


def test_what_is_left_of_a_queue_half_made_or_half_deleted_is_removed(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        key = f"{queue_name}:{{{queue.generation}}}"
        assert admin.ttl(key) == -1
        redis._server.function("delete", (key,))  # a deletion that died after its first step
        assert redis.queue_names() == ["q"]
        assert redis.find_queue("q") is None
        assert redis.queue_names() == []
        queue = queue_of(redis)
        key = f"{queue_name}:{{{queue.generation}}}"
        admin.expire(key, 100)  # a creation that died before its last step
        assert redis.find_queue("q") == queue
        assert admin.ttl(key) == -1
        assert not redis.create_queue(StoredQueueSettings(name="q"))
        assert len(admin.keys(f"{queue_name}:*")) == 3
        redis.delete_queue(queue)
        with pytest.raises(QueueNotFound):
            redis.delete_queue(queue)


def test_a_url_has_a_user_and_a_password(redis_url, admin, queue_name):
    rights = [
        "~kmq:*",
        "&kmq:*",
        "+@read",
        "+@write",
        "+@scripting",
        "+@pubsub",
        "+@connection",
        "+time",
        "+info",
    ]  # as in the docs
    admin.execute_command("ACL", "SETUSER", "me@home", "on", ">p@ss/w", *rights)
    try:
        address = redis_url.partition("://")[2]
        url = f"redis://me%40home:p%40ss%2Fw@{address}?queue={queue_name}&create=true"
        with queue_for(url) as queue:
            queue.send("x")
            assert queue.receive(wait=1)[0].body == b"x"
            assert queue.receive(wait=0.3) == []
        with pytest.raises(AccessDenied) as caught:
            queue_for(url.replace("p%40ss", "hunter2"))
        assert "hunter2" not in str(caught.value)
        with pytest.raises(AccessDenied):
            queue_for(f"{url}&prefix=other")
    finally:
        admin.acl_deluser("me@home")


# --- faults ---------------------------------------------------------------------------------------


@pytest.fixture
def lost_answer(monkeypatch):
    """Lets the server carry out one call of this name, and its answer get lost."""
    lost = []
    send, read = Connection.send_command, Connection.read_response

    def sending(self, *command, **arguments):
        self.last_command = command
        return send(self, *command, **arguments)

    def reading(self, *arguments, **keywords):
        answer = read(self, *arguments, **keywords)
        command = self.last_command
        if lost and command[0] == "FCALL" and command[1].endswith(f"_{lost[0]}"):
            lost.clear()
            raise Cut("lost")
        return answer

    monkeypatch.setattr(Connection, "send_command", sending)
    monkeypatch.setattr(Connection, "read_response", reading)
    return lost.append


def test_a_call_whose_answer_is_lost_is_repeated_but_for_put(redis_url, queue_name, lost_answer):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        lost_answer("put")
        with pytest.raises(Unavailable, match="not known"):
            redis.put(queue, [NewRow(b"x")])
        assert redis.counts(queue).ready == 1  # sent once
        redis.put(queue, [NewRow(b"y")])
        lost_answer("take")
        assert [row.body for row in redis.take(queue, 1, LONG_MS).rows] == [b"y"]
        lost_answer("finish")
        redis.finish(queue, refs(redis.taken_rows(queue, limit=10)))
        assert redis.counts(queue) == (0, 0, 0, 0)
        for name in ("allot", "make", "register", "settle"):
            lost_answer(name)
            assert redis.create_queue(StoredQueueSettings(name=name))
        for name in ("delete", "forget"):
            lost_answer(name)
            redis.delete_queue(redis.find_queue("make" if name == "delete" else "settle"))
        assert sorted(redis.queue_names()) == ["allot", "q", "register"]


def test_a_server_that_becomes_a_replica_is_waited_for(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        admin.replicaof("127.0.0.1", 1)
        try:
            back = threading.Timer(0.3, admin.replicaof, ("NO", "ONE"))
            back.start()
            redis.put(queue, [NewRow(b"x")])
            back.join()
            assert len(redis.take(queue, 10, LONG_MS).rows) == 1
            with engine_at(redis_url, queue_name, timeout_s=0.3) as hasty:
                admin.replicaof("127.0.0.1", 1)
                with pytest.raises(Unavailable, match="replica"):
                    hasty.put(queue, [NewRow(b"x")])
        finally:
            admin.replicaof("NO", "ONE")


def test_a_server_that_is_away_is_waited_for_and_then_unavailable(queue_name):
    with Databases("redis", settings={"redis": {"appendfsync": "always"}}) as databases:
        server = databases.server("redis")
        with engine_at(databases.urls["redis"], timeout_s=30) as redis:
            assert redis.capabilities.durable
            queue = queue_of(redis)
            server.kill()
            with ThreadPoolExecutor(1) as thread:
                sent = thread.submit(redis.put, queue, [NewRow(b"x")])
                SYSTEM_CLOCK.sleep(0.2)
                server.start()
                assert len(sent.result(PATIENCE_S)) == 1
            assert redis.counts(queue).ready == 1
        with engine_at(databases.urls["redis"], timeout_s=0.5) as redis:
            server.kill()
            for call in (lambda: redis.take(queue, 1, LONG_MS), lambda: redis.put(queue, [NewRow(b"x")])):
                with pytest.raises(Unavailable, match="Redis at 127"):
                    call()
            server.start()
            redis.counts(queue)
            server.pause()
            with pytest.raises(Unavailable, match="not known"):
                redis.put(queue, [NewRow(b"y")])
            server.resume()
            until(lambda: redis.counts(queue).ready == 2)
        with pytest.raises(Unavailable):
            storage_for("redis://127.0.0.1:1?timeout=100ms")


def test_a_server_that_may_lose_a_second_is_not_called_durable(redis_url):
    with storage_for(redis_url) as storage:
        assert not storage.capabilities.durable


# --- waiting --------------------------------------------------------------------------------------


def test_all_who_wait_share_one_connection_and_one_thread(url, queue_name):
    with storage_for(f"{url}?prefix={queue_name}") as storage, Redis.from_url(url) as admin:
        queues = []
        for number in range(40):
            storage.create(f"q{number}")
            queues.append(storage.open(f"q{number}"))
        threads = threading.active_count()
        others = len(admin.client_list())
        with ThreadPoolExecutor(80) as takers:
            found = [takers.submit(queue.receive, 1, wait=PATIENCE_S) for queue in queues for _ in range(2)]
            until(lambda: sum(one["sub"] == "40" for one in admin.client_list()) == 1)
            assert threading.active_count() <= threads + 80 + 1
            for queue in queues:
                queue.send("first")
                queue.send("second")
            assert len({message.id for one in found for message in one.result(PATIENCE_S)}) == 80
            assert len(admin.client_list()) - others <= 10 + 1


def test_a_waiter_hears_of_a_message_after_its_connection_was_cut(redis_url, admin, queue_name):
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        queue = storage.open("q")
        with ThreadPoolExecutor(1) as thread:
            for _ in range(3):
                found = thread.submit(queue.receive, wait=2 * PATIENCE_S)
                until(lambda: admin.client_kill_filter(_type="pubsub") > 0)
                queue.send("x")
                queue.ack(found.result(PATIENCE_S))


def test_a_channel_is_left_when_nobody_has_waited_for_a_while(redis_url, admin, queue_name, monkeypatch):
    monkeypatch.setattr(arrivals, "_LINGER_S", 0.0)
    monkeypatch.setattr(arrivals, "_SILENCE_S", 0.05)
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        with storage.open("q") as queue:
            channel = f"{queue_name}:{{{storage.describe('q').generation}}}"
            queue.receive(wait=0.01)
            until(lambda: admin.pubsub_numsub(channel)[0][1] == 0)
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(queue.receive, wait=2 * PATIENCE_S)
                until(lambda: admin.pubsub_numsub(channel)[0][1] == 1)
                queue.send("x")
                assert len(found.result(PATIENCE_S)) == 1


def test_settings_of_a_queue_are_kept_as_json(redis_url, admin, queue_name):
    """Those who look at the keys by hand, and other versions, can read them."""
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis, "é", max_redeliveries=None)
        value = admin.hget(f"{queue_name}:{{queues}}:names", "é").decode()
        generation, _, settings = value.partition(" ")
        assert (generation, json.loads(settings)["max_redeliveries"]) == (queue.generation, None)
