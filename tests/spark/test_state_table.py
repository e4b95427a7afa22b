"""A state table, kept up, against the state computed from all markers."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import collect, delete_topic, stopped_after, until

from kmqpy.cli.app import kmq
from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import ConfigError, KmqError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE, Marker, Op
from kmqpy.kafka.settings import QueueSettings
from kmqpy.spark import KmqSpark, state_folder, state_table, state_version
from kmqpy.spark.state_folder import StateFolder
from kmqpy.spark.state_version import StateVersion
from kmqpy.testing import ManualClock

pytestmark = pytest.mark.timeout(600)  # a dozen queries of Spark each


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    for module in (state_table, state_version):
        monkeypatch.setattr(module, "BLOCK_BITS", 4)


@pytest.fixture
def kmq_of(spark):
    clock = ManualClock(SYSTEM_CLOCK.wall_ms() + 300_000)

    def kmq(queue, **arguments):
        return KmqSpark(spark, queue.connection, queue.settings, clock=clock, **arguments)

    return kmq


def rows(frame):
    return sorted(map(tuple, frame.collect()), key=str)


def files(path):
    return sorted(str(one.relative_to(path)) for one in Path(path).rglob("*") if one.is_file())


def some_marker(rng, partition, messages):
    op = rng.choice([*Op, Op.TAKE, Op.TAKE, Op.END, Op.END])
    drawn = rng.random() if op is Op.END else 1
    fields = {
        "redeliver_after_ms": 0 if op is Op.END else rng.choice([0, 400, 5_000, 10**15]),
        "by_tracker": drawn < 0.4,
        "reason": TAKEN_LATE if drawn < 0.15 else ACKNOWLEDGED if drawn < 0.2 else None,
    }
    if rng.random() < 0.4:
        runs = codec.runs_of(sorted(rng.sample(range(messages), rng.choice([1, 2, 9]))))
        return Marker(partition, runs[0][0], op, runs=runs, **fields)
    return Marker(partition, rng.randrange(messages), op, **fields)


@pytest.mark.breadth
def test_any_markers_in_any_number_of_updates(make_queue, kmq_of, tmp_path):
    rng = random.Random(5)
    queue = make_queue(2)
    kmq = kmq_of(queue)
    table = kmq.state_table(str(tmp_path / "table"))
    for sent in (20, 40):
        for partition in range(2):
            queue.send(*["m"] * 20, partition=partition)
            queue.mark_all(some_marker(rng, partition, sent) for _ in range(200))
            where = {"partition": partition, "topic": queue.settings.dead_letter_topic}
            names = [("kmq-dead-letter-partition", b"%d" % partition)]
            queue.append(
                None, b"", [*names, ("kmq-dead-letter-offset", b"%d" % rng.randrange(sent))], **where
            )
        table.update()
    assert rows(table.messages()) == rows(kmq.messages())
    assert {state for state, *_ in kmq.attempts(table.messages()).collect()} == {
        *("pending", "in_flight", "overdue", "processed", "redelivered", "dead"),
    }


@pytest.mark.breadth
def test_a_queue_that_is_worked_on(make_queue, kmq_of, tmp_path):
    queue = make_queue(2, max_redeliveries=1, lease_ms=600_000, markers="jvm")
    kmq = kmq_of(queue)
    table = kmq.state_table(str(tmp_path / "table"))
    assert (table.update().markers, table.messages().count()) == (0, 0)
    for number in range(20):
        queue.send(str(number), partition=number % 2)
    client = queue.client()
    took = {int(message.body): message for message in collect(client, 20)}
    client.ack(*(took[number] for number in range(5)))
    client.flush()
    table.update()
    assert rows(table.messages()) == rows(kmq.messages())
    with stopped_after(queue.tracker()):
        client.nack(took[6], took[7], reason="not now")
        client.dead_letter(took[8], reason="bad")
        again = {int(message.body): message for message in collect(client, 2)}
        client.nack(again[6], reason="never")
        until(lambda: len(queue.dead_letters()) == 2)
    client.extend(took[9], lease=1)
    client.ack(took[7], took[10])  # the first one too late
    client.flush()
    table.update()
    assert rows(table.messages()) == rows(kmq.messages())
    states = {row["state"]: row["count"] for row in table.messages().groupBy("state").count().collect()}
    assert states == {"processed": 6, "redelivered": 2, "dead": 2, "in_flight": 11, "overdue": 1}


@pytest.mark.breadth
def test_the_cost_of_an_update_is_that_of_what_is_new(make_queue, kmq_of, tmp_path):
    queue = make_queue(1)
    queue.fill(320)
    queue.mark_all(Marker(0, 0, op, runs=((0, 320),)) for op in (Op.TAKE, Op.END))
    path = tmp_path / "table"
    table = kmq_of(queue).state_table(str(path))
    first = table.update()
    assert (first.markers, first.blocks_written) == (2, 20)
    old = {name for name in files(path) if name.startswith("rows/")}
    queue.fill(20)
    queue.mark_all(Marker(0, 320 + number, Op.TAKE, 5_000) for number in range(20))
    queue.mark(Marker(0, 100, Op.TAKE, 5_000))
    second = table.update()
    assert (second.markers, second.blocks_written, second.blocks) == (21, 3, 22)
    assert old < set(files(path)), "none was written again"
    states = {row["state"]: row["count"] for row in table.messages().groupBy("state").count().collect()}
    assert states == {"processed": 319, "overdue": 21}
    third = table.update()
    assert (third.version, third.markers, third.blocks_written) == (3, 0, 0)


class Died(Exception):
    pass


def dying(*_):
    raise Died


@pytest.mark.breadth
def test_an_update_that_dies_leaves_a_version_that_is_whole(make_queue, kmq_of, tmp_path, monkeypatch):
    """With its rows written; before its version counts; after that, with old files still there."""
    monkeypatch.setattr(state_folder, "KEPT_VERSIONS", 2)
    queue = make_queue(1)
    queue.send(*["m"] * 20)
    kmq, path = kmq_of(queue), tmp_path / "table"
    table = kmq.state_table(str(path))
    table.update()
    before = rows(table.messages())
    for number, step in enumerate(("blocks_in", "commit", "_clean")):
        queue.mark(Marker(0, number, Op.TAKE, 10**12))
        with monkeypatch.context() as patch:
            patch.setattr(StateFolder, step, dying)
            with pytest.raises(Died):
                table.update()
        expected = rows(kmq.messages()) if step == "_clean" else before
        assert rows(table.messages()) == expected, step
    (path / "versions" / f"{3:020d}.json.new").write_text("{")  # the half of a version
    queue.mark(Marker(0, 0, Op.TAKE, 10**12))
    table.update()
    assert rows(table.messages()) == rows(kmq.messages())
    versions = [name for name in files(path / "versions") if name.endswith(".json")]
    assert len(versions) == 2
    blocks = [StateVersion.from_json((path / "versions" / name).read_bytes()).blocks for name in versions]
    used = {
        f"{folder}/in_partition=0/in_block={block}"
        for found in blocks
        for (_, block), folder in found.items()
    }
    there = {name.rpartition("/")[0] for name in files(path / "rows") if "SUCCESS" not in name}
    assert there == used, "what no version speaks of was deleted"


@pytest.mark.breadth
def test_deleted_markers_are_remembered(make_queue, kmq_of, tmp_path):
    queue = make_queue(1)
    queue.send(*["m"] * 40)
    queue.mark_all(Marker(0, number, Op.TAKE, 10**12) for number in range(20))
    queue.mark_all(Marker(0, number, Op.END) for number in range(10))
    kmq = kmq_of(queue)
    table = kmq.state_table(str(tmp_path / "table"))
    table.update()
    queue.topics.delete_records(queue.settings.markers_topic, {0: 30})
    queue.topics.delete_records(queue.name, {0: 18})
    known = [row for row in rows(table.messages()) if row[1] >= 18]
    table.update()
    assert rows(table.messages()) == known, "it knows of markers that Kafka has not any more"
    assert {row["state"] for row in table.messages().collect()} == {"in_flight", "pending"}
    queue.mark_all(Marker(0, number, Op.TAKE, 10**12) for number in range(20, 30))
    queue.topics.delete_records(queue.settings.markers_topic, {0: 35})
    with pytest.raises(
        ConfigError, match=r"partition 0 from offset 30 on, and Kafka has 35 to 40: .* --restart"
    ):
        table.update()
    assert rows(table.messages()) == known
    assert table.update(restart=True).markers == 5
    assert rows(table.messages()) == rows(kmq.messages())


@pytest.mark.breadth
def test_markers_that_are_deleted_while_they_are_read(make_queue, kmq_of, tmp_path, monkeypatch):
    queue = make_queue(1)
    queue.send("m")
    queue.mark(Marker(0, 0, Op.TAKE, 10**12))
    kmq = kmq_of(queue)
    table = kmq.state_table(str(tmp_path / "table"))
    store = table._store

    def deleted(*arguments):
        queue.topics.delete_records(queue.settings.markers_topic, {0: 1})
        store(*arguments)

    monkeypatch.setattr(table, "_store", deleted)
    with pytest.raises(ConfigError, match="from offset 0 on, and Kafka has 1 to 1"):
        table.update()
    with pytest.raises(ConfigError, match=r"there is none at .* yet"):
        table.messages()


@pytest.mark.breadth
def test_a_queue_that_was_recreated(make_queue, kmq_of, tmp_path):
    queue = make_queue(1)
    queue.send("m")
    queue.mark(Marker(0, 0, Op.TAKE, 10**12))
    table = kmq_of(queue).state_table(str(tmp_path / "table"))
    table.update()
    for topic in (queue.name, queue.settings.markers_topic):
        delete_topic(queue.topics, topic)
    until(lambda: recreated(queue))
    with pytest.raises(ConfigError, match=r"whose topics were deleted and recreated since; .*--restart"):
        table.update()
    assert table.messages().count() == 1
    table.update(restart=True)
    assert table.messages().count() == 0


def recreated(queue):
    try:
        queue.topics.create(queue.settings, queue.partitions)
    except KmqError:
        return False
    return True


@pytest.mark.breadth
def test_of_two_updates_at_once_one_fails(make_queue, kmq_of, tmp_path, monkeypatch):
    queue = make_queue(1)
    queue.send("m")
    kmq = kmq_of(queue)
    one, other = (kmq.state_table(str(tmp_path / "table")) for _ in range(2))
    store = one._store

    def meanwhile(*arguments):
        other.update()
        store(*arguments)

    monkeypatch.setattr(one, "_store", meanwhile)
    with pytest.raises(ConfigError, match="updated by another run meanwhile"):
        one.update()
    assert one.messages().count() == 1


@pytest.mark.breadth
def test_a_folder_that_is_none_of_this_queue(make_queue, queue_name, kmq_of, tmp_path):
    queue = make_queue(1)
    kmq = kmq_of(queue)
    for wrong in ("", "/", None):
        with pytest.raises(ConfigError, match="invalid folder"):
            kmq.state_table(wrong)
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'mine\.txt' and is not a state table"):
        kmq.state_table(str(tmp_path)).update()
    table = str(tmp_path / "table")
    kmq.state_table(table).update()
    other = kmq_of(make_queue(1, f"{queue_name}-other")).state_table(table)
    for method in (other.update, other.messages, lambda: other.update(restart=True)):
        with pytest.raises(
            ConfigError, match=f"belongs to queue '{queue_name}', not to '{queue_name}-other'"
        ):
            method()
    for data, problem in (
        ("{}", "not a version of a state table"),
        ('{"format": 0}', "of another kmqpy.*delete"),
    ):
        (tmp_path / "table" / "versions" / f"{9:020d}.json").write_text(data)
        with pytest.raises(ConfigError, match=problem):
            kmq.state_table(table).update()


def test_the_command_updates_a_table_and_prints_it(spark, make_queue, tmp_path, monkeypatch):
    monkeypatch.setattr(type(spark), "stop", lambda _: None)  # it is everybody's
    queue = make_queue(2)
    queue.send(*"abc")
    queue.mark(Marker(0, 0, Op.END))
    where = ["--bootstrap", queue.connection.bootstrap, "--zookeeper", queue.zookeeper.hosts]
    line = ["spark-state", queue.name, *where, "--root", queue.connection.root]
    line += ["--table", str(tmp_path / "table")]
    done = CliRunner().invoke(kmq, [*line, "-o", "json"], catch_exceptions=False)
    shown = json.loads(done.stdout)
    assert (shown["version"], shown["markers"]) == (1, 1)
    assert [(row["pending"], row["processed"]) for row in shown["depth"]] == [(2, 1), (0, 0)]
    done = CliRunner().invoke(kmq, line, catch_exceptions=False)
    assert "version 2: 0 markers read, 0 of 1 blocks written" in done.stdout
    done = CliRunner().invoke(kmq, [*line, "--master", "local", "--remote", "local"])
    assert "--master and --remote: give one of them" in str(done.exception) + done.output


@pytest.mark.breadth
def test_lanes_have_tables_beside_that_of_the_main_lane(make_queue, kmq_of, tmp_path):
    queue = make_queue(max_redeliveries=0, lease_ms=600_000)
    queue.send("a", "b", "c")
    kmq = kmq_of(queue)
    path = str(tmp_path / "table")
    kmq.state_table(path).update()  # before the queue had lanes
    with Admin(queue.connection, queue.zookeeper) as admin:
        queue.settings = admin.alter_queue(queue.name, retry_lane=True, priorities=2)
    kmq = kmq_of(queue)
    table = kmq.state_table(path)
    main, urgent = queue.name, f"{queue.name}__priority1"
    assert {(row["lane"], row["state"]) for row in table.messages().collect()} == {(main, "pending")}
    with queue.producer() as producer:
        producer.send_many(["ua", "ub", "uc"], partition=0, priority=1)
    client = queue.client()
    took = {bytes(message.body): message for message in collect(client, 6)}
    client.ack(took[b"a"], took[b"ub"])
    client.dead_letter(took[b"uc"])
    client.flush()
    with stopped_after(queue.tracker()):
        until(queue.dead_letters)
    first = table.update()
    assert rows(table.messages()) == rows(kmq.messages())
    states = {(row["lane"], row["offset"]): row["state"] for row in table.messages().collect()}
    assert states == {
        (main, 0): "processed",
        (main, 1): "in_flight",
        (main, 2): "in_flight",
        (urgent, 0): "in_flight",
        (urgent, 1): "processed",
        (urgent, 2): "dead",
    }
    assert first.version == 2
    assert (first.blocks_written, first.blocks) == (2, 2)
    client.ack(took[b"ua"])
    client.flush()
    assert table.update().blocks_written == 1
    assert rows(table.messages()) == rows(kmq.messages())
    with Admin(queue.connection, queue.zookeeper) as admin:
        queue.settings = admin.alter_queue(queue.name, retry_lane=False, priorities=1)
    # As remove_lanes() leaves them.
    queue.settings = QueueSettings.from_json(replace(queue.settings, draining_lanes=()).to_json())
    kmq = kmq_of(queue)
    assert rows(kmq.state_table(path).messages()) == rows(kmq.messages())
