"""The state of messages as Spark works it out, against that of the tracker and that of `kmq stats`."""

import random
from dataclasses import replace
from typing import NamedTuple

import pytest
from frames import frame_of, naive
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.codec import ACKNOWLEDGED, TAKEN_LATE, Marker, Op, encode_count
from kmqpy.kafka.markers.entry import EntryState
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.spark.decode import decode_markers
from kmqpy.spark.state import OUTCOME, dead_letters_of, depth, described, finished, latency, outcomes

MESSAGES = 40
START_MS = 1_795_262_400_000


def some_log(rng, size, partition):
    """Markers of a partition in log order: (ms, key, value, headers)."""
    log, ms = [], START_MS
    for _ in range(size):
        ms += rng.choice([0, 1, 50, 300])
        written = ms - rng.choice([0, 0, 0, 70, 1_000])  # clocks that disagree
        if rng.random() < 0.03:
            garbage = rng.choice([(b"?", b"\x00", None), (codec.encode_key(partition, 1), b"\x09", None)])
            log.append((written + 5_000 * (rng.random() < 0.2), *garbage))
            continue
        op = rng.choice([*Op, Op.TAKE, Op.TAKE, Op.END, Op.END])
        after = rng.choice([0, 100, 400, 5_000, -1, INT64_MAX])
        fields = {"redeliver_after_ms": 0 if op is Op.END else after}
        fields["by_tracker"] = op is Op.END and rng.random() < 0.4
        reasons = [TAKEN_LATE, ACKNOWLEDGED, None, None]
        fields["reason"] = rng.choice(reasons) if op is Op.END else None
        offset = rng.choice([rng.randrange(MESSAGES), -1 if op is Op.END else 0])
        if rng.random() < 0.3:
            runs = codec.runs_of(sorted(rng.sample(range(MESSAGES), rng.choice([1, 2, 5]))))
            marker = Marker(partition, runs[0][0], op, runs=runs, **fields)
        else:
            marker = Marker(partition, offset, op, **fields)
        log.append((written, *codec.encode(marker)))
    return log


def truth(log):
    """What the tracker's state says of each message, and by whom it was ended first since it was taken."""
    state = InFlight()
    ended = {}
    for at, (ms, key, value, headers) in enumerate(log):
        try:
            marker = codec.decode(key, value, headers)
        except codec.DecodeError:
            state.observe(at, ms)
            continue
        was_in_flight = {offset for offset in marker.offsets() if offset in state}
        state.apply(marker, at, ms)
        for offset in marker.offsets() if marker.op is Op.END else ():
            late = marker.by_tracker and marker.reason == TAKEN_LATE
            is_told = offset in ended and ended[offset][0] != "taken late"
            if (offset in was_in_flight or offset not in ended) and not (late and is_told):
                moved = marker.by_tracker and marker.reason != ACKNOWLEDGED
                what = "taken late" if late else "redelivered" if moved else "processed"
                ended[offset] = (what, state.now_ms)
    return state, ended


def expected_row(offset, state, ended, now_ms, moved):
    entry = state.get(offset)
    if entry is None:
        what, ended_ms = ended.get(offset, ("pending", None))
        if what in ("redelivered", "taken late") and offset in moved:
            what = "dead"
        elif what == "taken late":
            what = "processed"
        return what, None, None, naive(ended_ms)
    due_at = None if entry.due_ms >= INT64_MAX - 1 else naive(entry.due_ms)
    what = (
        "overdue"
        if entry.due_ms <= now_ms
        else "pending"
        if entry.state is EntryState.DELAYED
        else "in_flight"
    )
    return what, str(entry.state), due_at, None


def dead_letter_record(at, partition, offset):
    headers = [("kmq-dead-letter-partition", b"%d" % partition), ("kmq-dead-letter-offset", b"%d" % offset)]
    return (partition, at, START_MS, None, None, headers)


def message_states(records, markers, dead_letters, *, now_ms, committed=(), **arguments):
    decoded = decode_markers(markers, with_cuts="cuts" in arguments)
    return described(outcomes(records, decoded, dead_letters, **arguments), now_ms, committed)


def test_any_log_of_markers(spark):
    rng = random.Random(11)
    logs = [some_log(rng, size, partition) for partition, size in enumerate((3, 30, 100, 300, 300, 600))]
    moved = {offset for offset in range(MESSAGES) if offset % 3 == 0}
    queue = [(p, offset, START_MS, None, b"", None) for p in range(len(logs)) for offset in range(MESSAGES)]
    dead = [dead_letter_record(offset, p, offset) for p in range(len(logs)) for offset in moved]
    now_ms = START_MS + 30_000
    states = message_states(
        frame_of(spark, queue),
        frame_of(spark, [(p, at, *record) for p, log in enumerate(logs) for at, record in enumerate(log)]),
        frame_of(spark, dead),
        now_ms=now_ms,
        count_header="count",
    )
    found = {(row["partition"], row["offset"]): row for row in states.collect()}
    assert len(found) == len(queue)
    seen = set()
    for partition, log in enumerate(logs):
        state, ended = truth(log)
        for offset in range(MESSAGES):
            row = found[partition, offset]
            expected = expected_row(offset, state, ended, now_ms, moved)
            assert (row["state"], row["in_flight_state"], row["due_at"], row["ended_at"]) == expected, (
                partition,
                offset,
            )
            seen.add((row["state"], row["in_flight_state"]))
    assert {what for what, _ in seen} == {
        "pending",
        "in_flight",
        "overdue",
        "processed",
        "redelivered",
        "dead",
    }
    assert {state for _, state in seen} == {None, *map(str, {*EntryState} - {EntryState.FAILED})}


def take(partition, at, offset, ms, after=300):
    return (partition, at, ms, *codec.encode(Marker(partition, offset, Op.TAKE, after)))


def end(partition, at, offset, ms):
    return (partition, at, ms, *codec.encode(Marker(partition, offset, Op.END)))


class Scene(NamedTuple):
    """A partition with its messages (ms, headers) and its markers (ms, marker), and what is to be shown.

    All are read by one query: making its plan costs more than what it reads.
    """

    shows: tuple[str, ...]
    expected: list[tuple]
    messages: list[tuple]
    markers: tuple | list = ()
    committed: int = 0
    end: int = MESSAGES


COUNTS = [None, encode_count(3), encode_count(-1), encode_count(1000), b"abc", encode_count(3), b""]
FIRST_SENT = [b"1795262400000", b"-5", b"99999999999999999999", b"9000000000000000000", b"1 ", None]
LIMITS = {"max_lease_ms": 400, "max_delay_ms": 300}
LATE = Marker(0, 0, Op.END, by_tracker=True, reason=TAKEN_LATE)
PLAIN = (START_MS, None)
FIRST_SENT_BEFORE = [("kmq-original-timestamp", b"%d" % (START_MS - 1_000))]
GONE = "markers of messages that are gone make no rows"
DEPTH = "depth"
LATENCY = "latency is in total since a message was first sent: these are copies, redelivered a second later"
UNKNOWN = "latency where retention has deleted start markers, so that nobody knows when messages were taken"
SCENES = {
    "attempts are deliveries so far": Scene(
        ("attempts",),
        [(0,), (3,), (0,), (1000,), (0,), (4,), (0,)],
        [(START_MS, None if count is None else [("n", count)]) for count in COUNTS],
        [(START_MS, Marker(0, 5, Op.TAKE, 300))],
    ),
    "when a message was first sent": Scene(
        ("first_enqueued",),
        [(naive(ms),) for ms in (START_MS, -5, *[START_MS + 7] * 4)],
        [(START_MS + 7, [("kmq-original-timestamp", value)]) for value in FIRST_SENT],
    ),
    "a take of what does not exist is none, and leases have a limit": Scene(
        ("state", "due_at"),
        [
            ("in_flight", naive(START_MS + LIMITS["max_lease_ms"])),
            ("pending", naive(START_MS + LIMITS["max_delay_ms"])),
            ("pending", None),
            ("processed", None),
        ],
        [PLAIN] * 4,
        [
            (START_MS, Marker(0, 0, Op.TAKE, 5_000)),
            (START_MS, Marker(0, 0, Op.TAKE, 0, runs=((0, 2), (3, 2)))),
            (START_MS, Marker(0, 1, Op.DELAY, 5_000)),
            (START_MS, Marker(0, 4, Op.TAKE, 300)),
            (START_MS, Marker(0, 3, Op.END, runs=((3, 9),))),
        ],
        end=4,
    ),
    "a delay is no delivery": Scene(
        ("state", "attempts", "taken_at"),
        [("pending", 0, None), ("redelivered", 0, None)],
        [PLAIN] * 2,
        [
            (START_MS, Marker(0, 0, Op.DELAY, 5)),
            (START_MS, Marker(0, 1, Op.DELAY, 5)),
            (START_MS + 9, Marker(0, 1, Op.END, by_tracker=True)),
        ],
    ),
    # Of the second message, retention took the markers that said what became of it.
    "what was taken late was not redelivered": Scene(
        ("state", "taken_at", "ended_at"),
        [("processed", None, naive(START_MS + 5)), ("processed", None, naive(START_MS + 400))],
        [PLAIN] * 2,
        [
            (START_MS + 1, Marker(0, 0, Op.TAKE, 300)),
            (START_MS + 5, Marker(0, 0, Op.END)),
            (START_MS + 20, Marker(0, 0, Op.TAKE, 300)),
            (START_MS + 400, LATE),
            (START_MS + 400, replace(LATE, offset=1)),
        ],
    ),
    "what a tracker found acknowledged is processed": Scene(
        ("state", "ended_at"),
        [("processed", naive(START_MS + 400)), ("redelivered", naive(START_MS + 400))],
        [PLAIN] * 2,
        [
            (START_MS + 1, Marker(0, 0, Op.TAKE, 300, runs=((0, 2),))),
            (START_MS + 400, Marker(0, 0, Op.END, by_tracker=True, reason=ACKNOWLEDGED)),
            (START_MS + 400, Marker(0, 1, Op.END, by_tracker=True)),
        ],
    ),
    "below the committed offset all were taken once": Scene(
        ("state",),
        [("processed",), ("in_flight",), ("pending",), ("pending",)],
        [PLAIN] * 4,
        [(START_MS, Marker(0, 1, Op.TAKE, 300))],
        committed=2,
    ),
    GONE: Scene(("state",), [], [], [(START_MS, Marker(0, 3, Op.TAKE, 300))]),
    DEPTH: Scene(("state",), [("pending",)] * 2, [(START_MS + 5, None), (START_MS + 2, None)]),
    f"{DEPTH}, a partition without messages": Scene(("state",), [], []),
    f"{DEPTH}, the last partition": Scene(
        ("state",), [("in_flight",)], [PLAIN], [(START_MS, Marker(0, 0, Op.TAKE, 300))]
    ),
    LATENCY: Scene(
        ("state",),
        [("processed",)] * 101,
        [(START_MS, FIRST_SENT_BEFORE)] * 101,
        [
            *((START_MS + n, Marker(0, n, Op.TAKE, 300)) for n in range(101)),
            *((START_MS + 100 + 3 * n, Marker(0, n, Op.END)) for n in range(101)),
        ],
        end=101,
    ),
    UNKNOWN: Scene(
        ("state",),
        [("processed",)] * 3,
        [PLAIN] * 3,
        [(START_MS + 100 * n, Marker(0, n, Op.END)) for n in range(3)],
    ),
    f"{UNKNOWN}, nor when they were ended": Scene(("state",), [("processed",)] * 3, [PLAIN] * 3, committed=3),
}


@pytest.fixture(scope="module")
def states(spark):
    """The states of all scenes, a partition each."""
    numbered = list(enumerate(SCENES.values()))
    queue = [
        (p, offset, ms, None, b"", headers)
        for p, scene in numbered
        for offset, (ms, headers) in enumerate(scene.messages)
    ]
    log = [
        (p, at, ms, *codec.encode(replace(marker, partition=p)))
        for p, scene in numbered
        for at, (ms, marker) in enumerate(scene.markers)
    ]
    found = message_states(
        frame_of(spark, queue),
        frame_of(spark, log),
        None,
        now_ms=START_MS,
        count_header="n",
        committed=[(p, scene.committed) for p, scene in numbered if scene.committed],
        ends=[(p, scene.end) for p, scene in numbered],
        **LIMITS,
    )
    yield found.persist()
    found.unpersist()


@pytest.fixture
def states_of(states):
    """The states of one scene."""
    return lambda name: states.filter(F.col("partition") == list(SCENES).index(name))


@pytest.mark.parametrize("name", SCENES)
def test_each_scene_shows_its_states(states_of, name):
    scene = SCENES[name]
    rows = states_of(name).orderBy("offset").collect()
    assert [tuple(row[column] for column in scene.shows) for row in rows] == scene.expected


def test_depth_has_a_row_for_each_partition(spark, states):
    first, last = (list(SCENES).index(name) for name in (DEPTH, f"{DEPTH}, the last partition"))
    assert last == first + 2
    partitions = spark.range(first, last + 1).selectExpr("cast(id as int) partition")
    found = depth(states, partitions).orderBy("partition")
    assert found.columns == [
        *("partition", "pending", "in_flight", "overdue", "processed", "redelivered", "dead"),
        "oldest_pending",
    ]
    assert [tuple(row) for row in found.collect()] == [
        (first, 2, 0, 0, 0, 0, 0, naive(START_MS + 2)),
        (first + 1, 0, 0, 0, 0, 0, 0, None),
        (last, 0, 1, 0, 0, 0, 0, None),
    ]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (LATENCY, [(0.5, 50, 200, 1_250), (0.95, 95, 290, 1_385), (1.0, 100, 300, 1_400)]),
        (UNKNOWN, [(0.5, None, None, 100), (0.95, None, None, 200), (1.0, None, None, 200)]),
        (f"{UNKNOWN}, nor when they were ended", []),
        (GONE, []),
    ],
)
def test_latency_has_the_quantiles_asked_for(states_of, name, expected):
    assert [tuple(row) for row in latency(states_of(name), [0.5, 0.95, 1]).collect()] == expected


@pytest.mark.parametrize("wrong", [[], [0.5, 50], [-0.1]])
def test_wrong_quantiles_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"quantiles: .* must be numbers from 0 to 1"):
        latency(None, wrong)


@pytest.mark.parametrize("partition", [b"x", b"3000000000"])
def test_dead_letters_with_headers_that_cant_be_read(spark, partition):
    headers = [
        ("kmq-dead-letter-partition", partition),
        ("kmq-dead-letter-reason", b"expired"),
        ("kmq-original-timestamp", b"9000000000000000000"),
    ]
    (row,) = dead_letters_of(frame_of(spark, [(0, 3, START_MS, b"k", b"v", headers)])).collect()
    assert (row["offset"], row["origin_partition"], row["attempts"], row["reason"]) == (
        3,
        None,
        None,
        "expired",
    )


def test_end_markers_below_the_end_finish_messages(spark):
    log = [take(0, 0, 1, START_MS), end(0, 1, 2, START_MS), end(0, 2, 2, START_MS)]
    log += [end(0, 3, 3, START_MS), end(1, 4, 3, START_MS)]
    found = finished(frame_of(spark, log), [(0, 3), (1, 4)]).collect()
    assert sorted(map(tuple, found)) == [(0, 2), (1, 3)]


def test_outcomes_go_on_from_those_before(spark):
    """However a log is cut into two parts: as if it had been read at once."""
    rng = random.Random(12)
    logs = [some_log(rng, size, partition) for partition, size in enumerate((2, 30, 100, 300, 600))]
    logs += [some_log(rng, 40, partition) for partition in range(len(logs), 12)]
    cuts = [rng.randrange(len(log) + 1) for log in logs]
    queue = [(p, offset, START_MS, None, b"", None) for p in range(len(logs)) for offset in range(MESSAGES)]
    marked = [(p, at, *record) for p, log in enumerate(logs) for at, record in enumerate(log)]
    first = [record for record in marked if record[1] < cuts[record[0]]]
    second = [record for record in marked if record[1] >= cuts[record[0]]]
    nows = [
        (p, max((ms for ms, *_ in log[:cut]), default=None))
        for p, (log, cut) in enumerate(zip(logs, cuts, strict=True))
    ]

    def outcome(messages, markers, **arguments):
        decoded = decode_markers(frame_of(spark, markers))
        return outcomes(frame_of(spark, messages), decoded, None, count_header="n", **arguments)

    half = len(queue) // 2
    before = spark.createDataFrame(outcome(queue[:half], first).collect(), OUTCOME)
    now_before = [(p, ms) for p, ms in nows if ms is not None]
    found = outcome(queue[half:], second, before=before, now_before=now_before)
    expected = outcome(queue, marked)
    assert sorted(found.select(*expected.columns).collect(), key=str) == sorted(expected.collect(), key=str)


@pytest.mark.breadth
def test_r39_messages_behind_a_cut_are_told_from_those_that_stood_there(spark):
    """Of partition 0, offsets 3 to 7 are given once more; partition 1 was not cut.

    3 and 4 of the former log were acknowledged. Of the new log, a client has acknowledged 3, taken 5 and
    lost 6, and a client that knows no cuts has acknowledged 7 by its offset. 8 is beyond the end.
    """
    cuts = LogCuts.parse("3<4@3")

    def marked(at, marker, partition=0):
        key, value, headers = codec.encode(replace(marker, partition=partition))
        return (partition, at, START_MS, key, value, headers)

    def took(*numbers):
        runs = tuple(codec.runs_of(numbers))
        return Marker(0, numbers[0], Op.TAKE, 600_000, runs=runs if len(numbers) > 1 else ())

    def ended(number, **fields):
        return Marker(0, number, Op.END, **fields)

    three, five, six, eight = (cuts.number_of(offset) for offset in (3, 5, 6, 8))
    log = [took(0, 1, 2, 3, 4), ended(1), ended(3), ended(4), codec.tick(0, cuts)]
    log += [took(three, five, six), ended(three), ended(six, by_tracker=True), took(7), ended(7)]
    log += [codec.assignment_tick(0, five, cuts=cuts), took(eight)]
    other = [took(3), ended(3)]
    markers = [marked(at, one) for at, one in enumerate(log)]
    markers += [marked(at, one, partition=1) for at, one in enumerate(other)]
    dead = [dead_letter_record(0, 0, six), dead_letter_record(1, 0, 4)]
    found = message_states(
        frame_of(spark, [(p, offset, START_MS, None, b"", None) for p in range(2) for offset in range(8)]),
        frame_of(spark, markers),
        frame_of(spark, dead),
        now_ms=START_MS,
        count_header="count",
        ends=[(0, 8), (1, 8)],
        cuts={0: cuts},
    )
    states = {(row["partition"], row["offset"]): row["state"] for row in found.collect()}
    assert [states[0, offset] for offset in range(8)] == [
        *("in_flight", "processed", "in_flight", "processed"),
        *("pending", "in_flight", "dead", "processed"),
    ]
    assert [states[1, offset] for offset in range(3, 5)] == ["processed", "pending"]
    assert len(states) == 16
