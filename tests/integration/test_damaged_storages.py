"""Damaged files of database servers: the damage is named, nothing hangs, nobody gets what was not sent.

What the servers can't tell, for example a bit that has flipped in a body, docs/reliability.md says.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest

from kmqpy.dev import Databases
from kmqpy.errors import ClusterError, Unavailable
from kmqpy.queue import Queue, queue_for

SENT = [f"{number:04d}".encode() * 300 for number in range(200)]
PAGE = 8192


@pytest.fixture(scope="module")
def servers() -> Iterator[Databases]:
    with Databases("postgresql", "redis") as servers:
        yield servers


def taken(queue: Queue) -> list[bytes]:
    """All that can be taken, to the end or the first error."""
    found = []
    while messages := queue.receive(20, wait=0):
        found += [one.body for one in messages]
        queue.ack(*messages)
    return found


def change(file: Path, at: int, what: Callable[[bytes], bytes]) -> None:
    with file.open("r+b") as there:
        there.seek(at)
        data = there.read(16)
        there.seek(at)
        there.write(what(data))


def test_a_damaged_page_of_postgresql_is_named_and_other_tables_serve(servers: Databases) -> None:
    url, server = servers.urls["postgresql"], servers.server("postgresql")
    assert servers.folder is not None
    with queue_for(f"{url}?queue=q&create=true&timeout_ms=2s") as queue, psycopg.connect(url) as admin:
        queue.send_many(SENT)
        ((file,),) = admin.execute("SELECT pg_relation_filepath('kmq_messages')").fetchall()
    server.stop()
    change(servers.folder / "postgresql" / "data" / file, 5 * PAGE, lambda _: b"\xff" * 16)
    server.start()
    with (
        queue_for(f"{url}?queue=q&timeout_ms=2s") as queue,
        pytest.raises(Unavailable, match=f"invalid page in block 5 of relation {file}"),
    ):
        taken(queue)
    with queue_for(f"{url}?queue=q&create=true&prefix=other_") as queue:
        queue.send("x")
        assert taken(queue) == [b"x"]


def test_a_log_of_redis_that_is_cut_off_is_read_up_to_there_and_a_damaged_one_is_refused(
    servers: Databases,
) -> None:
    url, server = servers.urls["redis"], servers.server("redis")
    assert servers.folder is not None
    with queue_for(f"{url}?queue=q&create=true") as queue:
        for body in SENT:
            queue.send(body)
    server.stop()
    (log,) = (servers.folder / "redis" / "appendonlydir").glob("*.incr.aof")
    whole = log.read_bytes()
    change(log, whole.index(b"*", whole.index(SENT[100])), lambda data: b"?" + data[1:])
    with pytest.raises(ClusterError, match=r"Bad file format reading the append only file .*redis-check-aof"):
        server.start()
    log.write_bytes(whole)
    os.truncate(log, whole.index(SENT[100]) + 600)
    server.start()
    with queue_for(f"{url}?queue=q") as queue:
        assert taken(queue) == SENT[:100]
