"""Markers decoded by Spark's expressions, against the codec itself."""

import json
import random
from itertools import product
from pathlib import Path

import pytest
from frames import frame_of as frame_of_records
from frames import naive
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError, DecodeError, UnsupportedMarker
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, MAX_SPAN, TAKEN_LATE, Marker, Op
from kmqpy.kafka.markers.lineage import COPY
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark
from kmqpy.spark.decode import decode_markers, each_message, number
from kmqpy.spark.lanes import base_of, first_record

GOLDEN = json.loads((Path(__file__).parents[1] / "unit" / "golden_markers.json").read_text())
WHEN_MS = 1_795_262_400_123


def of_codec(records):
    """What kmqpy.kafka.markers.codec makes of the records, in the columns of decode_markers."""
    expected = []
    for at, (key, value, headers) in enumerate(records):
        try:
            if any("\ufffd" in name for name, _ in headers or ()):
                raise DecodeError(
                    "as kmqpy.kafka.markers.records.read_marker does for a name that is not UTF-8", key
                )
            marker = codec.decode(key, value, headers, partition=0)
        except DecodeError as error:
            problem = "newer" if isinstance(error, UnsupportedMarker) else "undecodable"
            expected.append((at, None, None, None, None, False, False, False, problem))
        else:
            is_end = marker.op is Op.END
            names_copy = COPY in dict(headers or ())
            expected.append(
                (
                    at,
                    marker.op.value,
                    marker.offset,
                    list(marker.offsets()) if marker.runs else None,
                    None if is_end else marker.redeliver_after_ms,
                    is_end and marker.by_tracker,
                    is_end and marker.by_tracker and marker.reason == TAKEN_LATE and not names_copy,
                    is_end and marker.by_tracker and marker.reason == ACKNOWLEDGED and not names_copy,
                    None,
                )
            )
    return expected


def frame_of(spark, records):
    return frame_of_records(spark, [(0, at, WHEN_MS, *record) for at, record in enumerate(records)])


def of_spark(spark, records):
    columns = [
        "at",
        "op",
        "offset",
        "offsets",
        "redeliver_after_ms",
        "by_tracker",
        "taken_late",
        "acknowledged",
        "problem",
    ]
    found = decode_markers(frame_of(spark, records)).select(*columns)
    return sorted((tuple(row) for row in found.collect()), key=lambda row: row[0])


def agree(spark, records):
    for found, expected, record in zip(of_spark(spark, records), of_codec(records), records, strict=True):
        assert found == expected, record


def some_runs(rng):
    offsets, at = [], rng.choice([0, 1, 1000, INT64_MAX - 200])
    for _ in range(rng.choice([1, 1, 2, 3, 40])):
        count = rng.choice([1, 2, 5])
        offsets += range(at, at + count)
        at += count + rng.choice([1, 1, 3])
    return [offset for offset in offsets if offset <= INT64_MAX]


def some_markers(rng):
    texts = [None, None, "", "broken", "ünï"]
    while True:
        op = rng.choice(list(Op))
        after = 0 if op is Op.END else rng.choice([0, 1, 300, 30_000, -1, INT64_MAX, -(2**63)])
        fields = {"redeliver_after_ms": after, "by_tracker": rng.random() < 0.3}
        if op is Op.END:
            fields["reason"] = rng.choice([*texts, TAKEN_LATE, ACKNOWLEDGED])
        else:
            fields |= {"counts": rng.random() < 0.8, "reason": rng.choice(texts), "holder": rng.choice(texts)}
        if rng.random() < 0.5:
            yield Marker(0, rng.choice([0, 1, 127, 128, 2**31, 2**32, INT64_MAX]), op, **fields)
        else:
            yield from codec.ranges(0, op, some_runs(rng), **fields)


def damaged(rng, data):
    data = bytearray(data or b"")
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(4):
            case 0:
                data.insert(at, rng.choice([0, 1, 0x7F, 0x80, 0xFF]))
            case 1 if data:
                del data[at - 1]
            case 2 if data:
                data[at - 1] = rng.randrange(256)
            case _:
                data = data[:at]
    return bytes(data)


def test_golden_markers_of_the_jvm(spark):
    odd = [(one["kind"], bytes.fromhex(one["hex"])) for one in GOLDEN["decode_only"]]
    keys = [bytes.fromhex(one["hex"]) for one in GOLDEN["keys"]] + [key for kind, key in odd if kind == "key"]
    values = [bytes.fromhex(one["hex"]) for one in GOLDEN["values"]]
    values += [value for kind, value in odd if kind == "value"]
    records = [(key, b"\x00", None) for key in keys] + [(bytes(12), value, None) for value in values]
    agree(spark, records)


def test_any_marker(spark):
    rng = random.Random(6)
    agree(spark, [codec.encode(marker) for marker, _ in zip(some_markers(rng), range(600), strict=False)])


@pytest.mark.breadth
def test_whatever_the_bytes(spark):
    rng = random.Random(7)
    good = [codec.encode(marker) for marker, _ in zip(some_markers(rng), range(400), strict=False)]
    records = [
        (damaged(rng, key) if rng.random() < 0.2 else key, damaged(rng, value), h) for key, value, h in good
    ]
    key = codec.encode_key(0, 5)
    records += [(None, b"\x00", None), (key, None, None), (key, b"", None), (b"", b"", None)]
    records += [(key, bytes((kind,)) + rest, None) for kind in range(18) for rest in (b"", b"\x01", bytes(8))]
    records += [
        (codec.encode_key(0, offset), value, None)
        for offset in (-1, -(2**63), INT64_MAX, INT64_MAX - 7)
        for value in (
            b"\x00",
            codec.encode_start(5),
            b"\x03\x08",
            b"\x03\x09",
            b"\x04\x81",
            b"\x04\x81\x01",
        )
    ]
    start = codec.encode_start(5)
    for value in (b"", b"take", b"end", b"neck", b"nack", b"\xff\xfe", None):
        records += [(key, start, [("kmq-op", value)]), (key, b"\x00", [("kmq-op", value)])]
        records.append((key, start, [("kmq-op", b"nack"), ("other", b"1"), ("kmq-op", value)]))
        records.append((key, b"\x00", [("kmq-by", value)]))
    for reason in (TAKEN_LATE, ACKNOWLEDGED):  # a copy that is named says more than the reason
        told = [("kmq-by", b"tracker"), ("kmq-reason", reason.encode())]
        records += [(key, b"\x00", told), (key, b"\x00", [*told, (COPY, b"0:9")]), (key, b"\x00", told[1:])]
    for partition in (1, -1, -3, 2**31 - 1):
        records.append((codec.encode_key(partition, 5), start, None))
        records.append((codec.encode_key(partition, 5), b"\x00", [("kmq-by", b"tracker")]))
    # What Java makes of a header whose name is not UTF-8.
    records += [(key, value, [("kmq-\ufffd", b"1"), ("kmq-by", b"tracker")]) for value in (start, b"\x00")]
    agree(spark, records)


def test_a_marker_counts_in_the_partition_that_its_key_names(spark):
    partitions = [0, 1, 127, 128, 129, 255, 256, 65_536, 2**31 - 1]
    named = [(own, key) for own in partitions for key in {*partitions, own + 256 & 2**31 - 1, -1}]
    records = [
        (own, at, WHEN_MS, codec.encode_key(key, 5), b"\x00", None) for at, (own, key) in enumerate(named)
    ]
    found = decode_markers(frame_of_records(spark, records)).select("at", "problem").collect()
    wrong = {at: problem for at, problem in found if problem}
    assert wrong == {at: "undecodable" for at, (own, key) in enumerate(named) if own != key}


@pytest.mark.breadth
def test_large_ranges(spark):
    every_other = range(0, MAX_SPAN, 2)
    large = [
        Marker(0, 9, Op.END, runs=((9, MAX_SPAN),)),
        Marker(0, 9, Op.TAKE, 5, runs=((9, MAX_SPAN),)),
        *codec.ranges(0, Op.END, every_other),
        *codec.ranges(0, Op.TAKE, every_other, redeliver_after_ms=5),
        *codec.ranges(0, Op.END, range(0, MAX_SPAN, 500)),
    ]
    key = codec.encode_key(0, 0)
    too_large = [
        (key, b"\x03" + b"\x81\x80\x04", None),
        (key, b"\x03" + b"\xff\xff\xff\x7f", None),
        (key, b"\x03" + b"\xff\xff\xff\xff\x7f", None),
        (key, b"\x04" + b"\x01" * (MAX_SPAN // 8 + 1), None),
    ]
    agree(spark, [codec.encode(marker) for marker in large] + too_large)


def test_a_row_for_each_message(spark):
    records = [
        codec.encode(Marker(0, 7, Op.TAKE, 300)),
        codec.encode(Marker(0, 7, Op.END, runs=((7, 2), (12, 1)))),
        (b"?", b"?", None),
    ]
    found = each_message(decode_markers(frame_of(spark, records))).select("at", "op", "offset", "timestamp")
    assert sorted(map(tuple, found.collect())) == [
        (0, "take", 7, naive(WHEN_MS)),
        *((1, "end", offset, naive(WHEN_MS)) for offset in (7, 8, 12)),
    ]


def test_a_column_is_missing(spark):
    frame = frame_of(spark, []).drop("partition", "headers")
    with pytest.raises(ConfigError, match=r"column 'partition' is missing, it has key, value.*needs key"):
        decode_markers(frame)


def test_numbers_in_headers(spark):
    texts = ["12", "-3", "12\n", "\n12", "1 2", "9" * 19, "9" * 20, "", None]
    frame = spark.createDataFrame([(text,) for text in texts], "text string")
    found = [row[0] for row in frame.select(number(frame["text"])).collect()]
    assert found == [12, -3, None, None, None, None, None, None, None]


@pytest.mark.breadth
def test_both_sources_believe_the_same_headers_about_first_records(spark):
    queue = QueueSettings.stored({"name": "q", "retry_lane": True, "priorities": 3, "markers": "range"})
    partitions = (None, b"0", b"1", b"-1", b"100000000", b"9999999999", b"x")
    topics = (None, b"", b"q", b"q__retry", b"q__priority9", b"q__priority10", b"other__priority1", b"\xff")
    given = list(product(partitions, (None, b"5", b"77", b"-1"), topics))
    names = ORIGINAL_PARTITION, ORIGINAL_OFFSET, ORIGINAL_TOPIC
    told = [[one for one in zip(names, values, strict=True) if one[1] is not None] for values in given]
    frame = frame_of_records(spark, [(0, 77, at, None, None, headers) for at, headers in enumerate(told)])
    for lane in queue.lanes_apart():
        own = base_of(lane.name, queue), 77
        expected = [first_record(tuple(headers), lane, (0, 77)) or own for headers in told]
        for settings in (queue, lane):
            kmq = KmqSpark(spark, KafkaConnection(bootstrap="127.0.0.1:1"), settings)
            rows = kmq._with_columns(frame.withColumn("topic", F.lit(lane.name))).orderBy("timestamp")
            found = rows.select("original_partition", "original_offset").collect()
            assert [tuple(row) for row in found] == expected, lane.name
        assert len(set(expected)) > 10
