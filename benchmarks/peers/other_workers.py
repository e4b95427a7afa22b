"""Workers of other libraries in their usual form, run with the Python of a venv that has the library.

`other_workers.py LIBRARY OPTIONS`; OPTIONS as JSON: `url, handlers, ms, messages, rate`, on Kafka also
`topic, group, is_filled`. Acknowledgements are as late as the library has them, results are not kept.

Prints JSON, as benchmarks.handlers makes it.
"""

import asyncio
import json
import logging
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.handlers import Handlers, send_first

Options = dict[str, Any]
Send = Callable[[Sequence[str]], object]
Work = Callable[[], object]
"""Works in the main thread until the process ends."""

_handlers: Handlers


def handle(body: str) -> None:
    """The handler of libraries with threads; most of them want a function."""
    _handlers.handle(body)


async def handle_in_task(body: str | bytes) -> None:
    """The handler of libraries with asyncio."""
    await _handlers.handle_in_task(body)


def dramatiq(options: Options) -> tuple[Send, Work]:
    """Threads; acknowledges after the handler."""
    from dramatiq import Worker, actor, set_broker
    from dramatiq.brokers.redis import RedisBroker

    broker = RedisBroker(url=options["url"])
    set_broker(broker)
    task = actor(handle, actor_name="task")

    def work() -> None:
        Worker(broker, worker_threads=options["handlers"]).start()
        threading.Event().wait()

    return _each(task.send), work


def celery(options: Options) -> tuple[Send, Work]:
    """The pool of threads, or `solo` for one handler: these are in one process, as all others here."""
    from celery import Celery

    app = Celery(broker=options["url"])
    app.conf.update(task_acks_late=True, task_ignore_result=True, worker_hijack_root_logger=False)
    task = app.task(handle, name="task")
    pool = "threads" if options["handlers"] > 1 else "solo"

    def work() -> None:
        app.Worker(pool=pool, concurrency=options["handlers"], quiet=True).start()

    return _each(task.delay), work


def taskiq(options: Options) -> tuple[Send, Work]:
    """Tasks; acknowledges after the handler."""
    from taskiq.acks import AcknowledgeType
    from taskiq.api import run_receiver_task
    from taskiq_redis import RedisStreamBroker

    broker = RedisStreamBroker(options["url"], consumer_id="0")
    task = broker.register_task(handle_in_task, task_name="task")

    def work() -> Awaitable[None]:
        broker.is_worker_process = True
        return run_receiver_task(
            broker, max_async_tasks=options["handlers"], ack_time=AcknowledgeType.WHEN_EXECUTED
        )

    return _looped(broker.startup, _gathered(task.kiq), work)


def huey(options: Options) -> tuple[Send, Work]:
    """Threads; a message is deleted when it is taken. On SQLite, `synchronous = FULL` as ours."""
    from huey import RedisHuey, SqliteHuey

    url = options["url"]
    if url.startswith("redis:"):
        app = filler = RedisHuey(url=url, results=False)
    else:
        app = SqliteHuey(filename=url, fsync=True, results=False)
        filler = SqliteHuey(filename=url, fsync=False)  # fills the same queue
    task = app.task(name="task")(handle)

    def send(body: str) -> None:
        filler.storage.enqueue(app.serialize_task(task.s(body)))

    def work() -> None:
        app.create_consumer(workers=options["handlers"], periodic=False).start()
        threading.Event().wait()

    return _each(send), work


def rq(options: Options) -> tuple[Send, Work]:
    """One handler at a time, without the fork for each job that its usual worker makes."""
    from redis import Redis
    from rq import Queue, SimpleWorker

    redis = Redis.from_url(options["url"])
    queue = Queue(connection=redis)
    sys.modules["other_workers"] = sys.modules["__main__"]  # jobs name their function by its module

    def send(body: str) -> None:
        queue.enqueue("other_workers.handle", body, result_ttl=0)

    return _each(send), lambda: SimpleWorker([queue], connection=redis).work(logging_level="CRITICAL")


def procrastinate(options: Options) -> tuple[Send, Work]:
    """Tasks; deletes a job after the handler, as kmqpy does."""
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=options["url"]))
    task = app.task(name="task")(handle_in_task)

    async def open_app() -> None:
        await app.open_async()
        if not await app.job_manager.check_connection_async():
            await app.schema_manager.apply_schema_async()

    return _looped(
        open_app,
        lambda bodies: task.batch_defer_async(*({"body": body} for body in bodies)),
        lambda: app.run_worker_async(concurrency=options["handlers"], delete_jobs="successful"),
    )


def pgqueuer(options: Options) -> tuple[Send, Work]:
    """Tasks, ten more at a time: with a limit it waited for seconds."""
    import psycopg
    from pgqueuer import PgQueuer
    from pgqueuer.queries import Queries

    opened: list[Any] = []

    async def open_queue() -> None:
        opened.append(await psycopg.AsyncConnection.connect(options["url"], autocommit=True))
        queries = Queries.from_psycopg_connection(opened[0])
        if not await queries.schema_is_installed():
            await queries.install()
        opened.append(queries)

    def send(bodies: Sequence[str]) -> Any:
        count = len(bodies)
        return opened[1].enqueue(["task"] * count, [body.encode() for body in bodies], [0] * count)

    def work() -> Awaitable[object]:
        app = PgQueuer.from_psycopg_connection(opened[0])

        @app.entrypoint("task")
        async def task(job: Any) -> None:
            await handle_in_task(job.payload)

        return app.run()

    return _looped(open_queue, send, work)


def faststream(options: Options) -> tuple[Send, Work]:
    """Tasks; one handler acknowledges after each message, several before: it has no other way."""
    from faststream import AckPolicy
    from faststream.confluent import KafkaBroker

    broker = KafkaBroker(options["url"], logger=None)
    several = (
        {"max_workers": options["handlers"]} if options["handlers"] > 1 else {"ack_policy": AckPolicy.ACK}
    )

    async def work() -> None:
        @broker.subscriber(
            options["topic"], group_id=options["group"], auto_offset_reset="earliest", **several
        )
        async def task(body: bytes) -> None:
            await handle_in_task(body)

        await broker.start()
        await asyncio.Event().wait()

    async def start() -> None:
        if options.get("is_sender") or options["rate"]:
            await broker.connect()

    return _looped(start, _gathered(lambda body: broker.publish(body.encode(), topic=options["topic"])), work)


def _each(send: Callable[[str], object]) -> Send:
    return lambda bodies: [send(body) for body in bodies]


def _gathered(send: Callable[[str], Awaitable[object]]) -> Callable[[Sequence[str]], Awaitable[object]]:
    async def send_all(bodies: Sequence[str]) -> None:
        await asyncio.gather(*(send(body) for body in bodies))

    return send_all


def _looped(
    start: Callable[[], Awaitable[object]],
    send: Callable[[Sequence[str]], Awaitable[object]],
    work: Callable[[], Awaitable[object]],
) -> tuple[Send, Work]:
    """One event loop for all three."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(start())
    return (lambda bodies: loop.run_until_complete(send(bodies))), (lambda: loop.run_until_complete(work()))


LIBRARIES = {
    one.__name__: one for one in (dramatiq, celery, taskiq, huey, rq, procrastinate, pgqueuer, faststream)
}


def main(library: str, given: str) -> None:
    global _handlers  # noqa: PLW0603  # the handlers are functions of this module
    options = json.loads(given)
    _handlers = handlers = Handlers(options)
    logging.disable(logging.CRITICAL)
    send, work = LIBRARIES[library](options)
    send_first(options, send)
    if options.get("is_sender"):
        os._exit(0)  # all is confirmed, and faststream's producer would never end

    def report() -> None:
        try:
            sys.stdout.write(json.dumps(handlers.figures()) + "\n")
            sys.stdout.flush()
        finally:
            os._exit(not handlers.done.is_set())  # some workers end only by a signal, and slowly

    threading.Thread(target=report, daemon=True).start()
    work()


if __name__ == "__main__":
    main(*sys.argv[1:])
