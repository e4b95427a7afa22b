"""Damaged files of database servers: the damage is named, nothing hangs, nobody gets what was not sent.

What the servers can't tell, for example a bit that has flipped in a body, docs/reliability.md says.
"""

import os
import struct
import subprocess
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pymysql
import pytest

from kmqpy.cli.app import run
from kmqpy.dev import Cluster, Databases
from kmqpy.dev.postgresql import KIND as POSTGRESQL
from kmqpy.dev.programs import process_owner
from kmqpy.errors import ClusterError, Unavailable
from kmqpy.queue import Queue, queue_for
from kmqpy.storages.sql import statements

SENT = [f"{number:04d}".encode() * 300 for number in range(200)]
PAGE, INNODB_PAGE = 8192, 16384


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest) -> Iterator[Databases]:
    """Of the kind that the test says by `@of(kind)`."""
    with Databases(request.param) as servers:
        yield servers


def of(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("servers", [kind], indirect=True)


def taken(queue: Queue) -> list[bytes]:
    """All that can be taken, to the end or the first error."""
    found = []
    while messages := queue.receive(20, wait=0):
        found += [one.body for one in messages]
        queue.ack(*messages)
    return found


def doctor_says(url: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code, and what is printed, of a doctor who reads everything."""
    capsys.readouterr()
    code = run(["--queue-url", url, "doctor", "--logs"])
    return code, " ".join(capsys.readouterr().out.split())


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x10]) + data[1:]


def change(file: Path, at: int, what: Callable[[bytes], bytes]) -> None:
    with file.open("r+b") as there:
        there.seek(at)
        data = there.read(16)
        there.seek(at)
        there.write(what(data))


@of("postgresql")
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


@pytest.mark.breadth
@of("postgresql")
def test_a_bit_in_postgresql_is_named_with_checksums_and_else_the_doctor_says_that_nobody_looks(
    servers: Databases, capsys: pytest.CaptureFixture[str]
) -> None:
    url, server = servers.urls["postgresql"], servers.server("postgresql")
    assert servers.folder is not None
    data = servers.folder / "postgresql" / "data"
    at = {name: f"{url}?prefix={name}_" for name in ("unchecked", "checked")}
    for one in at.values():
        with queue_for(f"{one}&queue=q&create=true") as queue:
            queue.send_many(SENT)
    with psycopg.connect(url) as admin:
        ((unchecked, checked),) = admin.execute(
            "SELECT pg_relation_filepath('unchecked_messages'), pg_relation_filepath('checked_messages')"
        ).fetchall()
    server.stop()
    change(data / unchecked, 5 * PAGE + 5_000, flipped)
    server.start()
    code, said = doctor_says(at["unchecked"], capsys)
    assert code == 0
    assert "data_checksums=off: what the disk has changed is handed out as if it were whole" in said
    with queue_for(f"{at['unchecked']}&queue=q") as queue:
        assert len({*taken(queue)} - {*SENT}) == 1

    program = POSTGRESQL.find()[1].resolve().with_name("pg_checksums")
    if not program.exists():
        pytest.skip("no pg_checksums")
    server.stop()
    owner = process_owner() or {}
    subprocess.run([program, "--enable", "-D", data], check=True, stdout=subprocess.DEVNULL, **owner)
    change(data / checked, 5 * PAGE + 5_000, flipped)
    server.start()
    named = f"invalid page in block 5 of relation {checked}"
    code, said = doctor_says(at["checked"], capsys)
    assert code == 1
    assert named in said
    assert "data_checksums" not in said
    with queue_for(f"{at['checked']}&queue=q") as queue, pytest.raises(Unavailable, match=named):
        taken(queue)
    assert doctor_says(at["unchecked"], capsys)[0] == 0


def innodb_leaves(file: Path) -> list[list[int]]:
    """The pages with the entries of each index of a table, first those of the messages themselves."""
    data, found = file.read_bytes(), defaultdict(list)
    for page in range(len(data) // INNODB_PAGE):
        (kind,) = struct.unpack_from(">H", data, page * INNODB_PAGE + 24)
        level, index = struct.unpack_from(">HQ", data, page * INNODB_PAGE + 64)
        if kind == 0x45BF and level == 0:
            found[index].append(page)
    return [found[index] for index in sorted(found)]


@pytest.mark.breadth
@of("mariadb")
def test_damaged_files_of_mariadb_are_named_other_tables_serve_and_indexes_are_made_anew(
    servers: Databases, capsys: pytest.CaptureFixture[str]
) -> None:
    url, server = servers.urls["mariadb"], servers.server("mariadb")
    assert servers.folder is not None
    harmed = {
        "row": "1034, .*row_messages",
        "first": "1877, .*first_messages",
        "cut": "1034, .*cut_messages",
    }
    for name in (*harmed, "index", "other"):
        with queue_for(f"{url}?prefix={name}_&queue=q&create=true") as queue:
            queue.send_many(SENT)
    server.stop()
    files = {
        name: servers.folder / "mariadb" / "data" / "kmq" / f"{name}_messages.ibd"
        for name in (*harmed, "index")
    }
    rows, *indexes = innodb_leaves(files["row"])
    change(files["row"], rows[9] * INNODB_PAGE + 5_000, flipped)
    change(files["first"], 100, flipped)
    os.truncate(files["cut"], files["cut"].stat().st_size // 2)
    for (page,) in indexes:
        change(files["index"], page * INNODB_PAGE + 5_000, flipped)
    server.start()
    for name, why in harmed.items():
        with (
            pytest.raises(Unavailable, match=why),
            queue_for(f"{url}?prefix={name}_&queue=q&timeout_ms=2s") as queue,
        ):
            taken(queue)
    code, said = doctor_says(f"{url}?prefix=row_", capsys)
    assert code == 1
    assert "row_messages" in said
    with pymysql.connect(
        host="127.0.0.1", port=int(url.rpartition(":")[2].partition("/")[0]), user="kmq", database="kmq"
    ) as admin:
        cursor = admin.cursor()
        cursor.execute("CHECK TABLE index_messages")  # a taker would end the server
        assert "index_messages_ready is corrupted" in str(cursor.fetchall()).replace("'", "").replace("`", "")
        cursor.execute("ALTER TABLE index_messages FORCE")
    for name in ("index", "other"):
        with queue_for(f"{url}?prefix={name}_&queue=q") as queue:
            assert sorted(taken(queue)) == SENT
    assert doctor_says(f"{url}?prefix=other_", capsys)[0] == 0


@pytest.mark.breadth
def test_mysql_ends_itself_at_a_damaged_page_and_serves_other_tables_when_started_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Databases("mysql") as servers:
        url, server = servers.urls["mysql"], servers.server("mysql")
        for name in ("row", "other"):
            with queue_for(f"{url}?prefix={name}_&queue=q&create=true") as queue:
                queue.send_many(SENT)
        assert doctor_says(f"{url}?prefix=row_", capsys)[0] == 0
        server.stop()
        assert servers.folder is not None
        file = servers.folder / "mysql" / "data" / "kmq" / "row_messages.ibd"
        rows, *_ = innodb_leaves(file)
        change(file, rows[9] * INNODB_PAGE + 5_000, flipped)
        server.start()
        assert run(["--queue-url", f"{url}?prefix=row_&timeout_ms=2s", "doctor", "--logs"]) == 2
        assert "Lost connection" in capsys.readouterr().err
        assert f"page number={rows[9]}] into the buffer pool" in server.log_since_start()
        server.kill()
        server.start()
        with queue_for(f"{url}?prefix=other_&queue=q") as queue:
            assert sorted(taken(queue)) == SENT
        assert doctor_says(f"{url}?prefix=other_", capsys)[0] == 0


@pytest.mark.breadth
def test_zookeeper_refuses_a_damaged_log_reads_a_cut_one_up_to_there_and_needs_no_whole_snapshot() -> None:
    with Cluster(brokers=0) as cluster:
        url, server = f"zookeeper://{cluster.zookeeper}/r?queue=q", cluster.zookeeper_server()
        with queue_for(f"{url}&create=true") as queue:
            for body in SENT[:100]:
                queue.send(body)
        server.kill()
        server.start()  # writes a snapshot of what its log has
        with queue_for(url) as queue:
            for body in SENT[100:]:
                queue.send(body)
        server.kill()
        assert cluster.folder is not None
        data = cluster.folder / server.name / "data" / "version-2"
        log = max(data.glob("log.*"), key=lambda file: int(file.suffix[1:], 16))
        snapshot = max(data.glob("snapshot.*"), key=lambda file: int(file.suffix[1:], 16))
        whole = log.read_bytes()
        change(log, whole.index(SENT[150]) + 50, flipped)
        with pytest.raises(ClusterError, match="ended with exit code 1"):
            server.start()
        assert "CRC check failed" in server.log_since_start()
        log.write_bytes(whole[: whole.index(SENT[150]) + 50])
        change(snapshot, snapshot.read_bytes().index(SENT[50]) + 50, flipped)
        server.start()
        assert f"problem reading snap file {snapshot}" in server.log_since_start()
        with queue_for(url) as queue:
            assert taken(queue) == SENT[:150]


def test_the_doctor_reads_all_of_sqlite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "queues.db"
    with queue_for(f"sqlite:///{file}?queue=q&create=true") as queue:
        queue.send_many(SENT)
    assert doctor_says(f"sqlite:///{file}", capsys)[0] == 0
    page = file.stat().st_size // 4096 // 2
    change(file, page * 4096, lambda _: b"\xff" * 16)
    code, said = doctor_says(f"sqlite:///{file}", capsys)
    assert code == 1
    assert f"age {page + 1}: btreeInitPage() returns error" in said


def test_the_doctor_calls_no_damage_what_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(statements._SQLITE, "check_all", "SELECT missing")
    with queue_for(f"sqlite:///{tmp_path}/queues.db?queue=q&create=true"):
        pass
    assert run(["--queue-url", f"sqlite:///{tmp_path}/queues.db", "doctor", "--logs"]) == 2
    assert "refuses: no such column: missing" in capsys.readouterr().err


@of("redis")
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
