"""Keys of Redis and Valkey that others write or delete, and servers that others set up."""

import struct

import pytest
from redis import Redis
from redis_support import LONG_MS, engine_at, queue_of, refs

from kmqpy.errors import AccessDenied, ConfigError, MessageError, QueueNotFound, Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages import stored_queue
from kmqpy.storages.engine import Counts, NewRow
from kmqpy.storages.redis import engine
from kmqpy.storages.settings import StoredQueueSettings


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


@pytest.mark.parametrize(
    ("field", "value"),
    [*((field, "text") for field in ("number", "last_number", "arrivals", "largest")), ("arrivals", "1e300")],
)
def test_a_queue_whose_numbers_are_none_is_told(redis_url, admin, queue_name, field, value):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")])
        key = f"{queue_name}:{{{queue.generation}}}"
        before = admin.hget(key, field)
        admin.hset(key, field, value)
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
        queue = queue_of(redis, lease_ms=200)
        ids = redis.put(queue, [NewRow(b"x", priority=1)] * 3)
        admin.hset(f"{queue_name}:{{{queue.generation}}}:{part}", ids[0], "short")
        rows = redis.take(queue, 3, LONG_MS).rows
        assert {row.id for row in rows} >= set(ids[1:])
        admin.hset(f"{queue_name}:{{{queue.generation}}}:states", ids[1], "short")
        assert redis.give_back(queue, refs(rows), delay_ms=0, count=True, reason=None) >= 1
        assert ids[2] in {row.id for row in redis.take(queue, 3, LONG_MS).rows}


def headers_that_end_too_late(row):
    return row[:12] + struct.pack(">I", 8) + b"\xff" * 8 + row[16:]


@pytest.mark.parametrize(
    ("part", "damaged"),
    [
        ("states", lambda state: b"?" + state[1:]),  # a status that there is not
        ("states", lambda state: state[:42] + b"\1\xff"),  # a reason that is no text
        ("rows", headers_that_end_too_late),
        ("rows", lambda row: row[:8] + b"\xff" * 8 + row[16:]),
    ],
)
def test_values_that_others_wrote_raise_nothing_and_cost_no_other_message(
    redis_url, admin, queue_name, part, damaged
):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x", headers=(("h", b"v"),))] * 3)
        redis.take(queue, 3, LONG_MS)
        key = f"{queue_name}:{{{queue.generation}}}:{part}"
        admin.hset(key, ids[0], damaged(admin.hget(key, ids[0])))
        assert {row.id for row in redis.taken_rows(queue, limit=10)} >= set(ids[1:])
        assert redis.release_all(queue) >= 2
        rows = redis.take(queue, 3, LONG_MS).rows
        assert {row.id for row in rows} >= set(ids[1:])
        assert {row.headers for row in rows if row.id != ids[0]} == {(("h", b"v"),)}
        assert redis.finish(queue, refs(rows)) == len(rows)


def test_an_id_that_others_wrote_costs_no_message(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 3)
        key = f"{queue_name}:{{{queue.generation}}}"
        admin.lpush(f"{key}:fresh", "")
        admin.hset(f"{key}:rows", "", bytes(20))
        assert [row.id for row in redis.peek(queue, 10)] == ids
        assert [row.id for row in redis.take(queue, 4, LONG_MS).rows] == ids


def test_an_id_that_others_wrote_among_the_taken_costs_no_message(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 3)
        redis.take(queue, 3, LONG_MS)
        key = f"{queue_name}:{{{queue.generation}}}"
        admin.zadd(f"{key}:taken", {"text": ids[0] + 0.5, "": ids[2] + 1})
        assert [row.id for row in redis.taken_rows(queue, limit=9)] == ids
        assert redis.release_all(queue) == 3
        assert [row.id for row in redis.take(queue, 3, LONG_MS).rows] == ids


def test_places_of_taken_messages_that_others_wrote_are_corrected(redis_url, admin, queue_name, monkeypatch):
    monkeypatch.setattr(stored_queue, "_ORPHANS_PER_READ", 2)
    with storage_for(f"{redis_url}?prefix={queue_name}") as storage:
        storage.create("q")
        key = f"{queue_name}:{{{storage.describe('q').generation}}}:taken"
        with storage.open("q") as queue:
            queue.send_many([b"0", b"1", b"2", b"3"])
            queue.receive(4, lease=3600)
            first, second, third, last = (int(one) for one in admin.zrange(key, 0, -1))
            # Each page would end with the first one again.
            admin.zadd(key, {str(first): second + 0.5, str(third): -1})
            queue.orphans()
            assert [one.message.body for one in queue.orphans()] == [b"0", b"1", b"2", b"3"]
            admin.zadd(key, {str(first): 0, str(last): -7.5})
            assert queue.release_all() == 4


@pytest.mark.parametrize("card", [b"", b"card", bytes(60), b"\xff" * 80])
def test_a_damaged_card_of_a_dead_letter_shows_its_id_and_costs_no_other(redis_url, admin, queue_name, card):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 3)
        redis.bury(queue, refs(redis.take(queue, 3, LONG_MS).rows), "bad")
        admin.hset(f"{queue_name}:{{{queue.generation}}}:dead_cards", ids[1], card)
        for with_bodies in (True, False):
            assert [row.id for row in redis.dead_rows(queue, 10, with_bodies=with_bodies)] == ids
        assert [row.body for row in redis.dead_rows(queue, 10, with_bodies=True)] == [b"x"] * 3
        assert redis.redrive(queue, ids=None, limit=None) == 2


def test_a_dead_letter_without_its_row_costs_no_other(redis_url, admin, queue_name):
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        ids = redis.put(queue, [NewRow(b"x")] * 3)
        redis.bury(queue, refs(redis.take(queue, 3, LONG_MS).rows), "bad")
        admin.hdel(f"{queue_name}:{{{queue.generation}}}:dead_rows", ids[1])
        assert redis.redrive(queue, ids=None, limit=None) == 2
        assert redis.counts(queue) == Counts(ready=2, delayed=0, in_flight=0, dead=1)
        assert [row.id for row in redis.take(queue, 3, LONG_MS).rows] == [ids[0], ids[2]]


@pytest.mark.parametrize("number", [2**60, "nan"])
def test_a_number_too_large_for_lua_is_told_and_reaches_no_other_queue(redis_url, admin, queue_name, number):
    with engine_at(redis_url, queue_name) as redis:
        queue, other = queue_of(redis), queue_of(redis, "other")
        admin.hset(f"{queue_name}:{{{queue.generation}}}", "number", number)
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
