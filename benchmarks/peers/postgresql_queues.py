"""Peers of queues in PostgreSQL, run with the Python of a venv that has them.

`postgresql_queues.py PEER URL TAKERS BATCH SECONDS DEPTH`

pgmq           its own SQL (its package installs it without the extension), by psycopg, prepared
pgqueuer       jobs that nobody runs, by the methods that its QueueManager uses
procrastinate  the same, by the methods that its worker uses; it takes and finishes jobs one by one

…-groups       each message has a group, whose messages are handed out in order: pgmq's read_grouped_head(),
               since read_grouped() takes minutes with 10,000 groups; a `lock` of procrastinate
…-unique       each job has an id of its own, which no other may have: procrastinate's `queueing_lock`, while
               it waits; a `dedupe_key` of pgqueuer, until it is finished

Each taker has a connection of its own; commits are as durable as ours (the server's synchronous_commit).
Prints JSON: messages per second, put, and taken and acknowledged.
"""

import asyncio
import json
import sys
import uuid
from collections.abc import Callable, Coroutine, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.queue_load import BODY, Worker, measure, next_groups, next_ids

_LEASE_S = 30


class Pgmq:
    def __init__(self, url: str) -> None:
        import psycopg
        from psycopg.types.json import Jsonb

        self._connection = psycopg.connect(url, autocommit=True, prepare_threshold=1)
        self._body = Jsonb(BODY.decode())

    @staticmethod
    def prepare(url: str) -> None:
        import psycopg
        from pgmq.install import install_pgmq_from_sql

        with psycopg.connect(url) as connection:
            if connection.execute("SELECT to_regnamespace('pgmq')").fetchone() == (None,):
                install_pgmq_from_sql(conn=connection)
            connection.execute("SELECT pgmq.create('speed')")

    def put(self, count: int) -> None:
        if count == 1:
            self._connection.execute("SELECT pgmq.send('speed', %s)", (self._body,))
        else:
            bodies = [self._body] * count
            self._connection.execute("SELECT pgmq.send_batch('speed', %s::jsonb[])", (bodies,))

    def take(self, count: int) -> Sequence[Any]:
        return self._connection.execute(
            "SELECT * FROM pgmq.read('speed', %s, %s)", (_LEASE_S, count)
        ).fetchall()

    def finish(self, taken: Sequence[Any]) -> None:
        self._connection.execute("SELECT pgmq.delete('speed', %s::bigint[])", ([row[0] for row in taken],))

    def close(self) -> None:
        self._connection.close()


class PgmqGroups(Pgmq):
    @staticmethod
    def prepare(url: str) -> None:
        import psycopg

        Pgmq.prepare(url)
        with psycopg.connect(url) as connection:
            connection.execute("SELECT pgmq.purge_queue('speed')")

    def put(self, count: int) -> None:
        from psycopg.types.json import Jsonb

        headers = [Jsonb({"x-pgmq-group": one}) for one in next_groups(count)]
        self._connection.execute(
            "SELECT pgmq.send_batch('speed', %s::jsonb[], %s::jsonb[])", ([self._body] * count, headers)
        )

    def take(self, count: int) -> Sequence[Any]:
        return self._connection.execute(
            "SELECT * FROM pgmq.read_grouped_head('speed', %s, %s)", (_LEASE_S, count)
        ).fetchall()


class _Looped:
    """Has an event loop of its own, which runs in the thread of the caller."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()

    def _run(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(call)


class Pgqueuer(_Looped):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._run(self._open(url))

    async def _open(self, url: str) -> None:
        import psycopg
        from pgqueuer.ports.repository import EntrypointExecutionParameter
        from pgqueuer.queries import Queries

        self._connection = await psycopg.AsyncConnection.connect(url, autocommit=True)
        self._queries = Queries.from_psycopg_connection(self._connection)
        self._entrypoints: Any = {"speed": EntrypointExecutionParameter(concurrency_limit=0)}
        self._manager: Any = uuid.uuid4()

    @staticmethod
    def prepare(url: str) -> None:
        one = Pgqueuer(url)

        async def install() -> None:
            if not await one._queries.schema_is_installed():
                await one._queries.install()

        one._run(install())
        one.close()

    def put(self, count: int) -> None:
        self._run(self._queries.enqueue(["speed"] * count, [BODY] * count, [0] * count))

    def take(self, count: int) -> Sequence[Any]:
        found: Sequence[Any] = self._run(
            self._queries.dequeue(count, self._entrypoints, self._manager, None, timedelta(seconds=_LEASE_S))
        )
        return found

    def finish(self, taken: Sequence[Any]) -> None:
        self._run(self._queries.log_jobs([(job, "successful", None) for job in taken]))

    def close(self) -> None:
        self._run(self._connection.close())
        self._loop.close()


class PgqueuerUnique(Pgqueuer):
    def put(self, count: int) -> None:
        bodies, keys = [BODY] * count, next_ids(count)
        self._run(
            self._queries.enqueue(["speed"] * count, bodies, [0] * count, dedupe_key=keys, on_conflict="skip")
        )


class Procrastinate(_Looped):
    def __init__(self, url: str) -> None:
        super().__init__()
        self._run(self._open(url))

    async def _open(self, url: str) -> None:
        from procrastinate import App, PsycopgConnector
        from procrastinate.jobs import Job, Status

        self._app = App(connector=PsycopgConnector(conninfo=url, min_size=1, max_size=1))
        await self._app.open_async()
        self._manager = self._app.job_manager
        self._worker: int | None = None
        self._done = Status.SUCCEEDED
        self._job = Job(
            queue="speed", lock=None, queueing_lock=None, task_name="t", task_kwargs={"body": BODY.decode()}
        )

    @staticmethod
    def prepare(url: str) -> None:
        one = Procrastinate(url)

        async def install() -> None:
            if not await one._manager.check_connection_async():
                await one._app.schema_manager.apply_schema_async()

        one._run(install())
        one.close()

    def put(self, count: int) -> None:
        self._run(self._manager.batch_defer_jobs_async([self._job] * count))

    def take(self, count: int) -> Sequence[Any]:
        return self._run(self._take(count))  # type: ignore[no-any-return]

    async def _take(self, count: int) -> Sequence[Any]:
        if self._worker is None:
            self._worker = await self._manager.register_worker()
        found = []
        while len(found) < count:
            job = await self._manager.fetch_job(["speed"], self._worker)
            if job is None:
                break
            found.append(job)
        return found

    def finish(self, taken: Sequence[Any]) -> None:
        self._run(self._finish(taken))

    async def _finish(self, taken: Sequence[Any]) -> None:
        for job in taken:
            await self._manager.finish_job(job, self._done, delete_job=True)

    def close(self) -> None:
        self._run(self._app.close_async())
        self._loop.close()


class ProcrastinateGroups(Procrastinate):
    def put(self, count: int) -> None:
        jobs = [self._job.evolve(lock=one) for one in next_groups(count)]
        self._run(self._manager.batch_defer_jobs_async(jobs))


class ProcrastinateUnique(Procrastinate):
    def put(self, count: int) -> None:
        jobs = [self._job.evolve(queueing_lock=one) for one in next_ids(count)]
        self._run(self._manager.batch_defer_jobs_async(jobs))


PEERS: dict[str, Any] = {
    "pgmq": Pgmq,
    "pgmq-groups": PgmqGroups,
    "pgqueuer": Pgqueuer,
    "pgqueuer-unique": PgqueuerUnique,
    "procrastinate": Procrastinate,
    "procrastinate-groups": ProcrastinateGroups,
    "procrastinate-unique": ProcrastinateUnique,
}


def main(peer: str, url: str, takers: str, batch: str, seconds: str, _depth: str = "0") -> None:
    kind = PEERS[peer]
    kind.prepare(url)
    opened: Callable[[], Worker] = lambda: kind(url)  # noqa: E731
    figures = measure(opened, takers=int(takers), batch=int(batch), seconds=float(seconds))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
