"""Redis and Valkey: lost answers, servers that are away, connections that are cut, and who waits."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from redis import Redis
from redis.connection import Connection
from redis.exceptions import ConnectionError as Cut
from redis_support import LONG_MS, PATIENCE_S, engine_at, queue_of, refs, until

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.dev import Databases
from kmqpy.errors import Unavailable
from kmqpy.queue import queue_for, storage_for
from kmqpy.storages.engine import NewRow
from kmqpy.storages.redis import arrival_subscriber
from kmqpy.storages.settings import StoredQueueSettings


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
        assert redis.counts(queue)[:4] == (0, 0, 0, 0)
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


def test_a_replica_without_its_primary_is_left_for_a_new_connection(redis_url, admin, queue_name):
    """A load balancer may lead a new one to the server that took over."""

    def clients():
        return {one["id"] for one in admin.client_list() if one["name"] != "admin"}

    before = clients()
    with engine_at(redis_url, queue_name) as redis:
        queue = queue_of(redis)
        first = clients() - before
        try:
            admin.config_set("replica-serve-stale-data", "no")
            admin.replicaof("127.0.0.1", 1)
            back = threading.Timer(0.3, admin.replicaof, ("NO", "ONE"))
            back.start()
            assert redis.queue_names() == ["q"]
            back.join()
            redis.put(queue, [NewRow(b"x")])
        finally:
            admin.replicaof("NO", "ONE")
            admin.config_set("replica-serve-stale-data", "yes")
        assert first.isdisjoint(clients())


def test_a_server_that_is_away_is_waited_for_and_then_unavailable(queue_name):
    with Databases("redis", settings={"redis": {"appendfsync": "always"}}) as databases:
        server = databases.server("redis")
        with engine_at(databases.urls["redis"], timeout_s=30) as redis:
            assert redis.capabilities.durable
            queue = queue_of(redis)
            redis._server.call("CONFIG", "SET", "no-appendfsync-on-rewrite", "yes")
            with engine_at(databases.urls["redis"], prefix="other") as other:
                assert other.capabilities.lossy_setting == "no-appendfsync-on-rewrite=yes"
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
            storage_for("redis://127.0.0.1:1?timeout_ms=100ms")


def test_an_append_only_file_that_is_not_there_yet_makes_no_server_durable():
    settings = {"redis": {"appendonly": "no", "appendfsync": "always"}}
    with Databases("redis", settings=settings) as databases:
        url = databases.urls["redis"]
        with queue_for(f"{url}?queue=q&create=true") as queue, Redis.from_url(url) as admin:
            queue.send("x")
            for name, value in {"rdb-key-save-delay": 60_000_000, "appendonly": "yes"}.items():
                admin.config_set(name, value)
            with storage_for(url) as storage:
                assert storage.capabilities.lossy_setting == "aof_rewrite_in_progress=1"
            admin.config_set("rdb-key-save-delay", 0)
            databases.server("redis").kill()


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
    monkeypatch.setattr(arrival_subscriber, "_UNUSED_CHANNEL_S", 0.0)
    monkeypatch.setattr(arrival_subscriber, "_PING_AFTER_S", 0.05)
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
