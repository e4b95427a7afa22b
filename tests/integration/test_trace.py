"""A message is followed through its whole life, from either end."""

import json

import pytest
from click.testing import CliRunner
from support import collect, until

from kmqpy.cli.app import kmq
from kmqpy.errors import ConfigError, ReceiptError
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.lineage import ANCESTORS, COPY
from kmqpy.kafka.trace import find_by_key, trace


def told(life):
    return [event.what.value for event in life.events]


def kmq_trace(queue, *arguments):
    options = ["--bootstrap", queue.connection.bootstrap, "--root", queue.connection.root]
    result = CliRunner().invoke(kmq, ["trace", *arguments, *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_life_with_everything_in_it(either_queue):
    queue = either_queue
    dead = queue.settings.dead_letter_topic
    queue.tracker()
    queue.send("m", key="k1")
    client = queue.client(holder="w1")
    (first,) = collect(client, 1, lease=20.0)
    client.extend(first, lease=30.0)
    client.nack(first, reason="busy")
    (second,) = collect(client, 1, lease=20.0)
    client.ack(first.receipt, confirmed=True)  # late
    client.dead_letter(second, reason="bad")
    until(queue.dead_letters)
    with KafkaDeadLetters(queue.settings, queue.connection) as letters:
        letters.redrive()
    (third,) = collect(client, 1, lease=20.0)
    client.ack(third, confirmed=True)

    life = trace(queue.connection, queue.settings, first.receipt)

    place = [f"0:{message.offset}" for message in (first, second, third)]
    letter = f"{dead}:0:0"
    assert life.records == (place[0], place[1], letter, place[2])
    assert [(e.what.value, e.record, e.by, e.reason, e.copy, e.late) for e in life.events] == [
        ("sent", place[0], None, None, None, False),
        ("taken", place[0], "w1", None, None, False),
        ("extended", place[0], "w1", None, None, False),
        ("given back", place[0], "w1", "busy", None, False),
        ("redelivered", place[0], None, "nack: busy", place[1], False),
        ("taken", place[1], "w1", None, None, False),
        ("acknowledged", place[0], "w1", None, None, True),
        ("rejected", place[1], "w1", "bad", None, False),
        ("dead-lettered", place[1], None, "rejected: bad", letter, False),
        ("redriven", letter, None, None, place[2], False),
        ("taken", place[2], "w1", None, None, False),
        ("acknowledged", place[2], "w1", None, None, False),
    ]
    assert (life.state.value, life.key, life.deleted) == ("acknowledged", "k1", ())
    for named in (second.receipt, third.receipt, f"0-{first.offset}", f"0:{third.offset}", letter):
        assert trace(queue.connection, queue.settings, named) == life
    with KmqClient(queue.settings, queue.connection) as opened:
        assert opened.trace(third) == life

    assert json.loads(kmq_trace(queue, third.receipt, "-o", "json"))["records"] == list(life.records)
    table = kmq_trace(queue, queue.name, place[0]).splitlines()
    assert table[0].endswith(": acknowledged, key k1")
    assert [line.split("  ")[0][-1] for line in table[2:]] == ["Z"] * 12
    assert "late" in table[8]
    by_key = kmq_trace(queue, queue.name, "--key", "k1", "--since", "1h", "-o", "json").splitlines()
    assert [json.loads(line)["records"] for line in by_key] == [list(life.records)]
    assert kmq_trace(queue, queue.name, "--key", "k2", "--since", "1h", "-o", "json") == ""


def test_a_copy_tells_of_an_original_that_is_gone(queue):
    queue.tracker()
    queue.send("m")
    client = queue.client()
    client.nack(*collect(client, 1, lease=20.0))
    (copy,) = collect(client, 1, lease=20.0)
    queue.topics.delete_records(queue.name, {0: copy.offset})
    life = trace(queue.connection, queue.settings, copy.receipt)
    assert (life.records, life.deleted) == (("0:0", f"0:{copy.offset}"), ("0:0",))
    assert told(life) == ["taken", "given back", "redelivered", "taken"]
    assert trace(queue.connection, queue.settings, "0:0") == life


def test_messages_of_other_queues_and_none_at_all(make_queue, queue_name):
    queue, other = make_queue(), make_queue(name=f"{queue_name}-other")
    queue.send("m")
    other.send("m")
    (foreign,) = collect(other.client(), 1)
    with pytest.raises(ReceiptError, match="it belongs to queue"):
        trace(queue.connection, queue.settings, foreign.receipt)
    for named in ("0:1", "1:0", "99:0", "0:99999999999999999999", "", "x", None, 7):
        with pytest.raises(ReceiptError):
            trace(queue.connection, queue.settings, named)
    with pytest.raises(ConfigError, match="not a topic of messages"):
        trace(queue.connection, queue.settings, f"{other.name}:0:0")


@pytest.mark.breadth
@pytest.mark.parametrize(
    "named", [b"0:0", b"0:1", b"0:2", b"0:99", b"7:0", b"nothing:0:1", b"", b"\xff" * 9_000]
)
def test_forged_headers_lead_nowhere(queue, named):
    """A cycle, another message, one that there never was, other partitions and topics, bytes of any kind."""
    queue.append(None, b"m", [(ANCESTORS, named)], topic=queue.name)
    queue.append(None, b"other", topic=queue.name)
    queue.append(None, b"cycle", [(ANCESTORS, b"0:1")], topic=queue.name)
    queue.mark(Marker(0, 0, Op.TAKE, 60_000))
    queue.append(codec.encode_key(0, 0), codec.encode_end(), [("kmq-by", b"tracker"), (COPY, named)])
    life = trace(queue.connection, queue.settings, "0:0")
    assert life.records == ("0:0",)
    assert told(life) == ["sent", "taken", "ended"]
    assert trace(queue.connection, queue.settings, "0:2").records == ("0:2",)


def test_by_key_each_message_is_shown_once(queue):
    queue.tracker()
    queue.send("a", key="k")
    queue.send("b", key="other")
    queue.send("c", key="k")
    client = queue.client()
    client.nack(*collect(client, 3, lease=20.0))
    collect(client, 3, lease=20.0)
    assert find_by_key(queue.connection, queue.settings, b"k", 0) == ["0:0", "0:2"]
    assert find_by_key(queue.connection, queue.settings, b"k", 0, limit=1) == ["0:0"]
    assert find_by_key(queue.connection, queue.settings, b"k", 2**52) == []


def test_a_copy_in_the_retry_lane_is_no_dead_letter(make_queue):
    queue = make_queue(retry_lane=True)
    queue.tracker(wait=False)
    queue.send("a")
    client = queue.client()
    client.nack(collect(client, 1, lease=20.0), reason="why")
    (again,) = collect(client, 1, lease=20.0)
    life = client.trace(again)
    assert life == client.trace("0:0")
    assert life.records == ("0:0", f"{queue.name}__retry:0:0")
    assert told(life) == ["sent", "taken", "given back", "redelivered", "taken"]
    assert life.state == "in flight"


def test_messages_that_were_copied_before_copies_were_named(queue):
    queue.append(None, b"m", topic=queue.name)
    queue.mark(Marker(0, 0, Op.TAKE, 60_000))
    queue.mark(Marker(0, 0, Op.END, by_tracker=True))
    queue.append(None, b"m", [("kmq-original-offset", b"0")], topic=queue.name)
    assert told(trace(queue.connection, queue.settings, "0:0")) == ["sent", "taken", "ended"]
    assert told(trace(queue.connection, queue.settings, "0:1")) == ["sent"]
