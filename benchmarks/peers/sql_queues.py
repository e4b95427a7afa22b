"""Peers of queues in SQL, run with the Python of a venv that has them.

`sql_queues.py PEER URL TAKERS BATCH SECONDS DEPTH`

bare-postgresql  the least statements for such a queue, without any of our code: the ceiling. One table for
                 all queues, a lease that is found by index, SKIP LOCKED; a put locks the queue against its
                 deletion, a take looks for leases that have ended. A message has what every storage promises:
                 key, headers, first and last enqueue time, number of requeues. No priorities, delays, dead
                 letters, or places of redelivered messages
kmqpy-statements the statements of kmqpy on its own tables, by psycopg without any other code of ours: what
                 priorities, delays and dead letters cost the server
litequeue, huey  queues of Python in SQLite, as they are; synchronous = FULL as ours
kmqpy-at-most-once  ours in SQLite with delivery="at-most-once", which promises what huey does

Prints JSON: messages per second, put, and taken and acknowledged.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.queue_load import BODY, Worker, measure

_QUEUES = (
    "CREATE TABLE IF NOT EXISTS bare_queues (id bigint PRIMARY KEY)",
    "INSERT INTO bare_queues VALUES (1) ON CONFLICT DO NOTHING",
)
_SESSION = (
    "enable_seqscan = off",
    "enable_bitmapscan = off",
    "jit = off",
    "plan_cache_mode = force_generic_plan",
)
_TABLE = """CREATE TABLE IF NOT EXISTS bare_queue (
    id bigserial PRIMARY KEY, queue bigint NOT NULL, until_ms bigint NOT NULL DEFAULT 0,
    take integer NOT NULL DEFAULT 0, requeues integer NOT NULL DEFAULT 0, enqueued_ms bigint NOT NULL,
    first_enqueued_ms bigint NOT NULL, message_key bytea, headers bytea, body bytea NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000)"""
_INDEX = "CREATE INDEX IF NOT EXISTS bare_ready ON bare_queue (queue, id) WHERE until_ms = 0"
_INDEX_OF_LEASES = "CREATE INDEX IF NOT EXISTS bare_until ON bare_queue (queue, until_ms) WHERE until_ms > 0"
_NOW = "(SELECT CAST(extract(epoch FROM now()) * 1000 AS bigint))"
_PUT = f"""INSERT INTO bare_queue (queue, enqueued_ms, first_enqueued_ms, body)
SELECT queue.id, {_NOW}, {_NOW}, new.body
FROM (SELECT id FROM bare_queues WHERE id = 1 FOR KEY SHARE) AS queue, unnest(%s::bytea[]) AS new(body)
RETURNING id"""
_TAKE = f"""UPDATE bare_queue SET until_ms = {_NOW} + 30000, take = take + 1
WHERE id = ANY (ARRAY(
    SELECT id FROM bare_queue
    WHERE queue = 1 AND until_ms = 0 AND coalesce(
        (SELECT min(until_ms) FROM bare_queue WHERE queue = 1 AND until_ms > 0) > {_NOW}, true
    ) ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED
)) RETURNING id, take, requeues, enqueued_ms, first_enqueued_ms, until_ms, message_key, headers, body"""
_FINISH = """DELETE FROM bare_queue USING unnest(%s::bigint[], %s::integer[]) AS ref(ref_id, ref_take)
WHERE id = ref_id AND take = ref_take AND queue = 1"""


class BarePostgresql:
    def __init__(self, url: str) -> None:
        import psycopg

        self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=1)
        for setting in _SESSION:
            self._connection.execute(f"SET {setting}")
        self._cursor = self._connection.cursor(binary=True)

    @staticmethod
    def prepare(url: str, depth: int) -> None:
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("DROP TABLE IF EXISTS bare_queue")
            for statement in _QUEUES:
                connection.execute(statement)
            connection.execute(_TABLE)
            connection.execute(
                "INSERT INTO bare_queue (queue, enqueued_ms, first_enqueued_ms, body) "
                "SELECT 1, 0, 0, %s FROM generate_series(1, %s)",
                (BODY, depth),
            )
            connection.execute(_INDEX)
            connection.execute(_INDEX_OF_LEASES)
            connection.execute("VACUUM ANALYZE bare_queue")

    def put(self, count: int) -> None:
        self._cursor.execute(_PUT, ([BODY] * count,))
        self._cursor.fetchall()

    def take(self, count: int) -> Sequence[Any]:
        self._cursor.execute(_TAKE, (count,))
        return self._cursor.fetchall()

    def finish(self, taken: Sequence[Any]) -> None:
        self._cursor.execute(_FINISH, [f"{{{','.join([str(row[at]) for row in taken])}}}" for at in (0, 1)])

    def close(self) -> None:
        self._connection.close()


class KmqpyStatements:
    """Works on the queue that `storage_queues.filled` has made; `prepare` looks up its number."""

    queue: int

    def __init__(self, url: str) -> None:
        import psycopg

        from kmqpy.storages.sql.statements import Names, statements

        self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=1)
        for setting in _SESSION:
            self._connection.execute(f"SET {setting}")
        self._sql = statements("postgresql", Names())
        self._cursors = {name: self._connection.cursor(binary=True) for name in ("put", "take", "finish")}
        self._given = {"queue": self.queue, "automatic": 1, "late": 0, "most": 3, "lease_ms": 30_000}

    @classmethod
    def prepare(cls, url: str, depth: int) -> None:
        import psycopg

        with psycopg.connect(url) as connection:
            name = f"depth-{depth}"
            found = connection.execute("SELECT id FROM kmq_queues WHERE name = %s", (name,)).fetchone()
            if found is None:
                raise LookupError(f"kmqpy has no queue {name!r} here to measure")
            (cls.queue,) = found

    def put(self, count: int) -> None:
        absent = ("keys", "headers", "delays", "priorities", "digests", "group_ids", "groups", "behind")
        nothing = dict.fromkeys(absent)
        self._run("put", {"bodies": [BODY] * count, **nothing}).fetchall()

    def take(self, count: int) -> Sequence[Any]:
        return self._run("take", {"limit": count}).fetchall()  # type: ignore[no-any-return]

    def finish(self, taken: Sequence[Any]) -> None:
        ids, takes = (f"{{{','.join([str(row[at]) for row in taken])}}}" for at in (0, 1))
        self._run("finish", {"ids": ids, "takes": takes})

    def close(self) -> None:
        self._connection.close()

    def _run(self, name: str, parameters: dict[str, Any]) -> Any:
        return self._cursors[name].execute(self._sql[name], {**self._given, **parameters})


class Litequeue:
    def __init__(self, url: str) -> None:
        import litequeue

        self._queue = litequeue.LiteQueue(url)
        self._queue.conn.execute("PRAGMA synchronous = FULL")

    def put(self, count: int) -> None:
        for _ in range(count):
            self._queue.put(BODY.decode())

    def take(self, count: int) -> Sequence[Any]:
        found = (self._queue.pop() for _ in range(count))
        return [one for one in found if one is not None]

    def finish(self, taken: Sequence[Any]) -> None:
        for one in taken:
            self._queue.done(one.message_id)

    def close(self) -> None:
        self._queue.close()


class Huey:
    """Forgets a task when it is taken: there is nothing to acknowledge."""

    def __init__(self, url: str) -> None:
        from huey.storage import SqliteStorage

        self._storage = SqliteStorage(filename=url, fsync=True)

    def put(self, count: int) -> None:
        for _ in range(count):
            self._storage.enqueue(BODY)

    def take(self, count: int) -> Sequence[Any]:
        found = (self._storage.dequeue() for _ in range(count))
        return [one for one in found if one is not None]

    def finish(self, taken: Sequence[Any]) -> None:
        pass

    def close(self) -> None:
        self._storage.close()


@cache
def _at_most_once(url: str) -> Any:
    """The queue in the file `url`; all takers share the queue and its storage."""
    from kmqpy.queue import storage_for

    storage = storage_for(f"sqlite:///{url}")
    storage.create("speed", delivery="at-most-once")
    return storage.open("speed")


def _kmqpy_at_most_once(url: str) -> Worker:
    from benchmarks.peers.storage_queues import Ours

    return Ours(_at_most_once(url))


PEERS: dict[str, Callable[[str], Worker]] = {
    "kmqpy-at-most-once": _kmqpy_at_most_once,
    "bare-postgresql": BarePostgresql,
    "kmqpy-statements": KmqpyStatements,
    "litequeue": Litequeue,
    "huey": Huey,
}


def main(peer: str, url: str, takers: str, batch: str, seconds: str, depth: str = "0") -> None:
    if peer == "bare-postgresql":
        BarePostgresql.prepare(url, int(depth))
    elif peer == "kmqpy-statements":
        KmqpyStatements.prepare(url, int(depth))
    figures = measure(lambda: PEERS[peer](url), takers=int(takers), batch=int(batch), seconds=float(seconds))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
