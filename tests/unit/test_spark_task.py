"""What a task makes of what the user's function returns. No Spark session, no servers."""

import logging
import pickle
import sys
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.types import ArrayType, DecimalType, LongType, StructType

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.codec import AT_ONCE_MS, Marker, Op
from kmqpy.kafka.markers.offset_runs import OffsetRuns
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import task as task_module
from kmqpy.spark.failures import DEFAULT_BACKOFF
from kmqpy.spark.report import BatchReport, merged
from kmqpy.spark.taker import TakenBefore
from kmqpy.spark.task import ProcessTask
from kmqpy.worker.outcome import Reject, Retry

QUEUE = QueueSettings(name="q", max_redeliveries=3)


class Takes:
    """In place of a Taker: everything is taken; notes what is done."""

    def __init__(self, before=()):
        self.before = before
        self.log = []
        self.nacks = []
        self.extended = []

    def taken_before(self, partition, first):
        found = TakenBefore(first)
        for at, marker in enumerate(self.before):
            if marker.partition == partition:
                found.note(marker, at, 0)
        return found

    def take(self, offsets, delays, lease_ms):
        self.log.append(({p: list(ones) for p, ones in offsets.items()}, dict(delays)))
        return dict.fromkeys([*offsets, *(p for p, _ in delays)], 7)

    def remember(self, places):
        self.places = places

    def write(self, operations):
        self.nacks += [marker for marker in operations if marker.op is not Op.EXTEND]
        self.extended += [
            offset for marker in operations if marker.op is Op.EXTEND for offset in marker.offsets()
        ]


@pytest.fixture
def takes(monkeypatch):
    found = Takes()
    monkeypatch.setattr(task_module, "taker_of", lambda *_: found)
    return found


def batch(count, *, first=10, partition=0, attempts=1, topic="q", **columns):
    rows = {
        "value": [f"m{number}".encode() for number in range(count)],
        "partition": pa.array([partition if topic == "q" else None] * count, pa.int32()),
        "offset": pa.array(range(first, first + count), pa.int64()),
        "attempts": pa.array(attempts if isinstance(attempts, list) else [attempts] * count, pa.int32()),
        "deliver_at_ms": pa.array([None] * count, pa.int64()),
        **columns,
    }
    return pa.RecordBatch.from_pydict(rows)


def task(
    function,
    *,
    by_row=False,
    queue=QUEUE,
    schema="value binary",
    backoff=Backoff(first=1, jitter=0),  # noqa: B008
):
    name, kind = schema if isinstance(schema, tuple) else schema.split()
    struct = StructType().add(name, kind)
    return ProcessTask(
        queue=queue,
        connection=KafkaConnection(),
        lease_ms=1_000,
        backoff=backoff,
        schema=struct,
        function=function,
        by_row=by_row,
    )


def run(work, *batches):
    """Output values, and the reports as one."""
    output, reports = [], []
    for found in work(iter(batches)):
        rows = found.to_pylist()
        reports += [row["kmq_report"] for row in rows if row["kmq_report"] is not None]
        output += [row["value"] for row in rows if row["kmq_report"] is None]
    return output, merged(reports)


def listed(found):
    return {partition: list(offsets) for partition, offsets in found.items()}


def only_value(frame):
    return frame[["value"]]


def test_what_is_returned_is_handed_on_and_reported_as_done(takes):
    output, report = run(task(only_value), batch(3))
    assert output == [b"m0", b"m1", b"m2"]
    assert report == BatchReport(done={0: OffsetRuns([(10, 3)])}, next={0: (13, 7)})
    assert takes.log == [({0: [10, 11, 12]}, {})]


def test_a_row_that_is_left_out_has_failed(takes):
    output, report = run(task(lambda frame: frame[frame["value"] != b"m1"]), batch(3))
    assert output == [b"m0", b"m2"]
    assert (listed(report.done), listed(report.left)) == ({0: [10, 12]}, {0: [11]})
    assert takes.nacks == [Marker(0, 11, Op.NACK, 1_000, reason="the function returned no row for it")]


def test_a_row_may_become_several(takes):
    output, report = run(task(lambda frame: pd.concat([frame, frame])), batch(2))
    assert sorted(output) == [b"m0", b"m0", b"m1", b"m1"]
    assert listed(report.done) == {0: [10, 11]}


def test_the_function_says_what_failed_and_how(takes):
    def function(frame):
        return frame.assign(
            kmq_error=[None, "odd", "odd", "bad"],
            kmq_delay=[None, 2.5, None, None],
            kmq_reject=[False, False, False, True],
        )

    output, report = run(task(function, queue=replace(QUEUE, markers="jvm")), batch(4))
    assert output == [b"m0"]
    assert listed(report.left) == {0: [11, 12, 13]}
    assert takes.nacks == [
        Marker(0, 11, Op.NACK, 2_500, reason="odd"),
        Marker(0, 12, Op.NACK, 1_000, reason="odd"),
        Marker(0, 13, Op.DEAD_LETTER, reason="bad"),
    ]


def test_r44_the_queue_knows_how_long_what_failed_waits(takes):
    queue = replace(QUEUE, markers="jvm", retry_delays=("1h",))
    failing = task(
        lambda frame: frame.assign(kmq_error="odd", kmq_delay=[None, 0, 2, "?"]),
        queue=queue,
        backoff=DEFAULT_BACKOFF,
    )
    run(failing, batch(4))
    assert sorted((one.offset, one.redeliver_after_ms) for one in takes.nacks) == [
        *[(10, 0), (11, AT_ONCE_MS), (12, 2_000), (13, 0)]
    ]


def test_what_failed_alike_is_one_range_marker(takes):
    run(task(lambda frame: frame.assign(kmq_error="odd")), batch(4))
    assert [(marker.op, marker.runs) for marker in takes.nacks] == [(Op.NACK, ((10, 4),))]


def test_rows_that_make_the_function_raise_fail_alone(takes):
    def function(frame):
        if frame["value"].isin([b"m3", b"m70"]).any():
            raise ValueError("poison")
        return frame

    output, report = run(task(function), batch(100))
    assert len(output) == 98
    assert listed(report.left) == {0: [13, 80]}
    assert {marker.reason for marker in takes.nacks} == {"ValueError: poison"}


def test_a_function_that_always_raises_is_not_called_for_each_row(takes):
    calls = []

    def function(frame):
        calls.append(len(frame))
        raise ConnectionError("down")

    output, report = run(task(function), batch(5_000))
    assert output == []
    assert len(report.left[0]) == 5_000
    assert len(calls) < 200


def test_a_value_that_is_not_of_the_schema_fails_alone(takes, caplog):
    def function(frame):
        return frame.assign(value=["secret" if value == b"m2" else 1 for value in frame["value"]])

    with caplog.at_level(logging.WARNING):
        output, report = run(task(function, schema="value long"), batch(4))
    assert output == [1, 1, 1]
    assert listed(report.left) == {0: [12]}
    assert takes.nacks[0].reason.startswith("NotOfSchema: value: 'secret' is not of type bigint")
    assert caplog.records  # of any formatter: one that pytest attaches may be another library's
    assert not any("secret" in str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize("kind", ["integer", "long", "date", "timestamp"])
def test_a_number_too_large_for_any_column_fails_alone(takes, kind):
    def function(frame):
        values = [2**70 if value == b"m2" else None for value in frame["value"]]
        return frame.assign(value=pd.Series(values, index=frame.index, dtype=object))

    output, report = run(task(function, schema=f"value {kind}"), batch(4))
    assert len(output) == 3
    assert listed(report.left) == {0: [12]}
    assert takes.nacks[0].reason.startswith("NotOfSchema: value: ")


def test_a_function_may_change_the_frame_that_it_is_given(takes):
    def function(frame):
        frame["attempts"] *= 100
        frame["value"] = frame["value"] + b"!"
        if (frame["value"] == b"m3!").any():
            raise ValueError("poison")
        return frame

    output, _ = run(task(function), batch(4))
    assert output == [b"m0!", b"m1!", b"m2!"]
    assert takes.nacks == [Marker(0, 13, Op.NACK, 1_000, reason="ValueError: poison")]  # after 1 attempt


@pytest.mark.parametrize("kind", ["string", "timestamp", "binary", ArrayType(LongType()), DecimalType(5, 2)])
def test_what_no_row_has_is_null(takes, kind):
    """To pandas, a column of nothing is one of floats."""
    work = task(lambda frame: pd.DataFrame({}, columns=["value"], index=frame.index), schema=("value", kind))
    output, report = run(work, batch(2))
    assert (output, listed(report.done)) == ([None, None], {0: [10, 11]})


def test_when_all_have_failed_what_the_function_says_of_them_holds(takes):
    def function(frame):
        return pd.DataFrame({"value": [None], "kmq_error": ["bad"], "kmq_reject": [True]}, index=frame.index)

    assert run(task(function, schema="value string"), batch(1))[0] == []
    assert takes.nacks == [Marker(0, 10, Op.DEAD_LETTER, reason="bad")]


def test_named_rows_go_by_their_names(takes):
    class Named(NamedTuple):
        other: int
        value: bytes

    returned = [Row(other=1, value=b"a"), Named(other=1, value=b"b"), Row(b"c")]
    output, _ = run(task(lambda _: returned, by_row=True), batch(1))
    assert output == [b"a", b"b", b"c"]


def test_labels_and_flags_in_other_types_of_pandas_are_understood(takes):
    def function(frame):
        return frame.set_axis(pd.Index([0.0, 1.0, 2.0], name="kmq_row")).assign(
            kmq_error=pd.array([None, "later", None], dtype="string"),
            kmq_delay=pd.to_timedelta([None, "2s", None]),
            kmq_reject=pd.array([True, None, False], dtype="boolean"),
        )

    output, report = run(task(function), batch(3))
    assert output == [b"m2"]
    assert listed(report.left) == {0: [10, 11]}
    assert takes.nacks == [
        Marker(0, 10, Op.DEAD_LETTER, reason="rejected by the handler"),
        Marker(0, 11, Op.NACK, 2_000, reason="later"),
    ]


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (lambda _: None, "returned NoneType"),
        (lambda frame: frame.drop(columns="value"), "no column 'value'"),
        (lambda frame: frame.reset_index(drop=True), "without the index 'kmq_row'"),
        (lambda frame: pd.DataFrame({"value": [b"x"]}), "without the index 'kmq_row'"),
        (lambda frame: frame.set_axis(pd.Index([7, 8, 9], name="kmq_row")), "was not given: [7, 8, 9]"),
        (lambda frame: frame.assign(kmq_reject="true"), "kmq_reject: 'true' is neither True nor False"),
        (lambda frame: pd.concat([frame, frame], axis=1), "the column 'value' more than once"),
    ],
)
def test_results_that_say_nothing_of_the_messages_stop_the_query(takes, function, complaint):
    with pytest.raises(ConfigError) as raised:
        run(task(function), batch(3))
    assert complaint in str(raised.value)


@pytest.mark.parametrize(
    ("error", "delay", "reason"),
    [
        ("x", -1.0, "kmq_delay: -1.0 must not be negative"),
        ("x", "soon", "kmq_delay: 'soon' is neither"),
        (b"odd", None, "kmq_error: must be text, or None for what has not failed: bytes"),
        (False, None, "kmq_error: must be text, or None for what has not failed: bool"),
    ],
)
def test_an_unusable_error_or_delay_fails_its_message_alone(takes, error, delay, reason):
    def function(frame):
        return frame[["value"]].assign(
            kmq_error=pd.Series([None, error, None], frame.index, dtype=object),
            kmq_delay=pd.Series([None, delay, None], frame.index, dtype=object),
        )

    output, report = run(task(function), batch(3))
    assert output == [b"m0", b"m2"]
    assert (listed(report.done), listed(report.left)) == ({0: [10, 12]}, {0: [11]})
    (nack,) = takes.nacks
    assert (nack.offset, nack.op, nack.redeliver_after_ms) == (11, Op.NACK, 1_000)
    assert nack.reason.startswith(reason)


@pytest.mark.parametrize("by_row", [True, False])
def test_a_function_that_exits_fails_the_message_it_exits_for(takes, by_row):
    def rows(row):
        return sys.exit("enough") if row.value == b"m1" else (row.value,)

    def frames(frame):
        return sys.exit("enough") if b"m1" in list(frame["value"]) else frame[["value"]]

    output, report = run(task(rows if by_row else frames, by_row=by_row), batch(3))
    assert output == [b"m0", b"m2"]
    assert listed(report.left) == {0: [11]}
    assert [(nack.offset, nack.reason) for nack in takes.nacks] == [(11, "SystemExit: enough")]


def test_frames_that_are_not_of_the_queue_are_refused(takes):
    with pytest.raises(ConfigError, match="rows that are not of queue 'q'"):
        run(task(only_value), batch(1, topic="other"))
    with pytest.raises(ConfigError, match="more than once"):
        run(task(only_value), batch(2, offset=pa.array([4, 4], pa.int64())))
    assert takes.log == []


def test_row_by_row(takes):
    def function(row):
        assert isinstance(row, Row)
        assert row["value"] == row.value == row.asDict()["value"] == pickle.loads(pickle.dumps(row)).value
        match row.value:
            case b"m0":
                return None
            case b"m1":
                return [{"value": b"a"}, (b"b",), Row(value=b"c")]
            case b"m2":
                raise Reject("never")
            case b"m3":
                raise Retry(5, count=False, reason="later")
            case b"m4":
                return {"value": 4}
        return (row.value,)

    output, report = run(task(function, by_row=True, schema="value binary"), batch(6))
    assert output[-1] == b"m5"
    assert listed(report.done) == {0: [10, 11, 15]}
    assert sorted(takes.nacks, key=lambda marker: marker.offset)[:2] == [
        Marker(0, 12, Op.DEAD_LETTER, reason="never"),
        Marker(0, 13, Op.NACK, 5_000, counts=False, reason="later"),
    ]


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        ("text", "str, not a dict, tuple, Row or list of these"),
        (b"", "bytes, not a dict, tuple, Row or list of these"),
        (5, "int, not a dict, tuple, Row or list of these"),
        (["a"], "a list with a str, not a dict, tuple, Row or list of these"),
        ([None], "a list with a NoneType, not a dict, tuple, Row or list of these"),
        ({"valeu": "a"}, "a row without its schema's 'value'"),
        (Row(valeu="a"), "a row without its schema's 'value'"),
        ([{"value": "a"}, {}], "a row without its schema's 'value'"),
    ],
)
def test_what_is_no_row_has_failed(takes, returned, what):
    output, report = run(task(lambda _: returned, by_row=True, schema="value string"), batch(2))
    assert output == []
    assert listed(report.left) == {0: [10, 11]}
    assert takes.nacks[0].reason == f"NotOfSchema: the function returned {what}"


def test_a_place_in_the_markers_is_told_only_if_nobody_had_later_messages(takes):
    assert run(task(only_value), batch(3))[1].next == {0: (13, 7)}
    takes.before = [Marker(0, 13, Op.TAKE, 1), Marker(0, 13, Op.END)]
    assert run(task(only_value), batch(3))[1].next == {0: (13, 0)} == takes.places
    # The place is that of the last messages, wherever the others' were.
    reports = [BatchReport(next={0: (13, 0)}), BatchReport(next={0: (12, 7)})]
    assert merged(map(str, reports)).next == {0: (13, 0)}


def test_delayed_messages_are_left_to_the_tracker(takes):
    due = pa.array([None, 2**62, -(2**63)], pa.int64())
    output, report = run(task(only_value), batch(3, deliver_at_ms=due))
    assert output == [b"m0", b"m2"]
    assert (listed(report.done), listed(report.left)) == ({0: [10, 12]}, {0: [11]})
    ((taken, delays),) = takes.log
    assert taken == {0: [10, 12]}
    assert list(delays) == [(0, 11)]


def test_a_message_on_its_last_attempt_that_did_not_survive_is_taken_alone(takes):
    takes.before = [
        Marker(0, 10, Op.TAKE, 3_600_000, runs=((10, 5),)),
        Marker(0, 14, Op.EXTEND, 3_600_000),  # it survived
    ]
    run(task(only_value), batch(6, attempts=[1, 4, 2, 5, 4, 4]))
    assert [list(taken[0]) for taken, _ in takes.log] == [[10, 12, 14, 15], [11], [13]]
    assert takes.extended == [10, 12, 14, 11, 13]  # what follows one of them may kill the worker


def test_finished_messages_are_not_handed_out_again_and_taken_ones_are(takes):
    hour = 3_600_000
    takes.before = [
        Marker(0, 10, Op.TAKE, hour, runs=((10, 6),)),
        Marker(0, 10, Op.END),  # acknowledged
        Marker(0, 11, Op.END, by_tracker=True),  # redelivered
        Marker(0, 12, Op.NACK, hour),
        Marker(0, 13, Op.TAKE, hour),
        Marker(0, 13, Op.TAKE, hour),  # for the third time
        Marker(0, 14, Op.TAKE, hour),
        Marker(0, 14, Op.EXTEND, hour),  # it survived
        Marker(0, 14, Op.TAKE, hour),
        Marker(0, 15, Op.TAKE, 0),  # its lease is over
    ]
    output, report = run(task(only_value), batch(7))
    assert output == [b"m4", b"m6"]
    assert (listed(report.done), listed(report.left)) == ({0: [14, 16]}, {0: [12, 13, 15]})
    assert takes.extended == [14]
    assert [(marker.offset, "died 3 times" in marker.reason) for marker in takes.nacks] == [(13, True)]


def test_what_one_evaluation_left_is_not_done_though_another_handed_it_on():
    reports = [
        BatchReport(done={0: OffsetRuns([(0, 5)]), 1: OffsetRuns([(3, 1)])}),
        BatchReport(done={0: OffsetRuns([(1, 2)])}, left={0: OffsetRuns([(3, 1)])}),
    ]
    assert listed(merged(map(str, reports)).done) == {0: [0, 1, 2, 4], 1: [3]}


def test_tasks_go_to_executors_without_secrets_in_their_names():
    work = task(only_value)
    assert pickle.loads(pickle.dumps(work)).queue == QUEUE
    assert "secret" not in repr(
        ProcessTask(**{**work.__dict__, "connection": KafkaConnection(kafka={"sasl.password": "secret"})})
    )
