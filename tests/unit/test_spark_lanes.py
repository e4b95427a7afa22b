"""Equal partitions and offsets of two lanes stay apart. No Spark session, no servers."""

from types import SimpleNamespace

import pytest

from kmqpy.errors import ConfigError
from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.message_headers import ORIGINAL_OFFSET, ORIGINAL_PARTITION, ORIGINAL_TOPIC
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import lanes, source, taker
from kmqpy.spark.failed_query import LeftoverMessages
from kmqpy.spark.lanes import Lanes, LaneWriter, base_of

QUEUE = QueueSettings(name="q", retry_lane=True, priorities=3)
RETRY, URGENT = 1_000_000_000, 200_000_000


def test_what_is_kept_without_a_lane_is_of_the_main_lane():
    assert [(base, lane.name) for base, lane in Lanes(QUEUE).bases()] == [
        (0, "q"),
        (100_000_000, "q__priority1"),
        (URGENT, "q__priority2"),
        (RETRY, "q__retry"),
    ]
    lane, partition = Lanes(QUEUE).place(RETRY + 7)
    assert (lane.name, lane.markers_topic, partition) == ("q__retry", "q__retry__markers", 7)
    assert Lanes(QUEUE).place(7)[0] == QUEUE
    assert not Lanes(QUEUE).has(300_000_000)
    assert [(base, lane.name) for base, lane in Lanes(QueueSettings(name="q")).bases()] == [(0, "q")]


def test_a_query_is_given_the_queue_and_no_lane_alone():
    for lane in QUEUE.lanes_apart():
        with pytest.raises(ConfigError, match=f"'{lane.name}' is a lane of 'q': give the queue itself"):
            Lanes(lane)


@pytest.mark.parametrize(
    ("topic", "base"),
    [("q", 0), ("q__retry", RETRY), ("q__priority9", 900_000_000), ("x__retry", None), ("q__", None)],
)
def test_the_number_of_a_topic(topic, base):
    assert base_of(topic, QUEUE) == base
    assert base_of(topic, QUEUE.lanes_apart()[0]) == base


class Writers(dict):
    """In place of MarkerWriter, and of Taker: what each lane's is given."""

    def make(self, one, other):
        queue = one if isinstance(one, QueueSettings) else other
        self[queue.name] = found = []

        class Writer:
            def put(self, items):
                found.extend(items)

            write = put

            def flush(self, _):
                return len(found)

            def take(self, offsets, delays, _):
                found.append((dict(offsets), dict(delays)))
                return dict.fromkeys([*offsets, *(p for p, _ in delays)], 7)

            def taken_before(self, partition, first):
                return (queue.name, partition, first)

            def remember(self, places):
                found.append(places)

        return Writer()


def test_a_marker_goes_to_the_lane_of_its_message(monkeypatch):
    writers = Writers()
    monkeypatch.setattr(lanes, "MarkerWriter", writers.make)
    writer = LaneWriter(KafkaConnection(), QUEUE)
    writer.put([Marker(2, 5, Op.END), Marker(RETRY + 2, 5, Op.NACK), (URGENT + 2, range(5, 6))])
    assert writers == {
        "q": [Marker(2, 5, Op.END)],
        "q__priority1": [],
        "q__priority2": [(2, range(5, 6))],
        "q__retry": [Marker(2, 5, Op.NACK)],
    }
    assert writer.flush(1) == 3


def test_a_task_takes_from_the_lane_of_each_message(monkeypatch):
    writers = Writers()
    monkeypatch.setattr(taker, "Taker", writers.make)
    takers = taker.LaneTakers(QUEUE, KafkaConnection())
    assert takers.taken_before(URGENT + 1, 9) == ("q__priority2", 1, 9)
    after = takers.take({1: [3], RETRY + 1: [3]}, {(URGENT + 1, 3): 500}, 1_000)
    assert after == {1: 7, RETRY + 1: 7, URGENT + 1: 7}
    takers.remember({RETRY + 1: (4, 7)})
    takers.write([Marker(URGENT + 1, 3, Op.EXTEND)])
    assert writers == {
        "q": [({1: [3]}, {})],
        "q__priority2": [({}, {(1, 3): 500}), Marker(1, 3, Op.EXTEND)],
        "q__retry": [({1: [3]}, {}), {1: (4, 7)}],
    }


ORIGINALS = [
    ("5", None, None),
    ("5", "q__priority2", URGENT),
    ("99", None, "own"),  # behind the message itself
    ("99", "q__priority2", URGENT),
    (None, None, "own"),
    ("-1", None, "own"),
    ("5", "q__priorities", "own"),
    ("5", "other__priority1", "own"),  # forwarded from another queue
]
"""The headers of a message at partition 0, offset 77 of the main lane: offset and topic; then which partition
its first record has."""


@pytest.mark.parametrize(("offset", "topic", "base"), ORIGINALS)
def test_a_message_is_named_by_its_first_record_if_its_headers_can_be_true(offset, topic, base):
    given = {ORIGINAL_PARTITION: "0", ORIGINAL_OFFSET: offset, ORIGINAL_TOPIC: topic}
    headers = tuple((name, value.encode()) for name, value in given.items() if value is not None)
    place = (0, 77) if base == "own" else (base or 0, int(offset))
    found = {"headers": [None], "attempts": [1], "deliver_at_ms": [None]}
    found |= {"partition": [0], "offset": [77], "original_partition": [0], "original_offset": [77]}
    source._add_headers(QUEUE, headers, found, 0)
    assert (found["original_partition"], found["original_offset"]) == ([place[0]], [place[1]])
    assert LeftoverMessages(QUEUE, KafkaConnection(), None)._first_record((0, 77), headers) == place


@pytest.mark.parametrize(
    ("there", "ends"),
    [
        ({0: 1_000, RETRY: 10}, {0: 90, RETRY: 10}),
        ({0: 1_000, 1: 1_000, RETRY: 1_000}, {0: 25, 1: 25, RETRY: 50}),
        ({0: 10, URGENT: 20, RETRY: 1_000}, {0: 10, URGENT: 20, RETRY: 70}),
        ({0: 30, RETRY: 70}, {0: 30, RETRY: 70}),
        ({0: 300, 1: 100}, {0: 75, 1: 25}),
    ],
)
def test_a_backlog_leaves_the_other_lanes_their_part_of_a_micro_batch(there, ends):
    found = source._limited({number: (0, end) for number, end in there.items()}, 100)
    assert {number: end for number, (_, end) in found.items()} == ends


def test_a_position_of_the_source_is_of_lanes_that_are_still_the_same():
    def topics(**ids):
        return {
            base_of(name, QUEUE): SimpleNamespace(queue=SimpleNamespace(name=name, topic_id=topic_id))
            for name, topic_id in ids.items()
        }

    options = source._Options(queue=QUEUE, connection=KafkaConnection(), start="earliest", max_rows=None)
    reader = source._StreamReader(options)
    now = topics(q="A", q__retry="B")
    position = reader._position(now, {0: 5, RETRY: 7})
    assert position["lanes"] == {"q__retry": "B"}
    assert reader._offsets(position, now) == {0: 5, RETRY: 7}
    removed = {**position, "offsets": {"0": 5, "900000000": 7}, "lanes": {"q__priority9": "C"}}
    assert reader._offsets(removed, now) == {0: 5}
    assert reader._offsets({"queue": "q", "topic_id": "A", "offsets": {"0": 5}}, now) == {0: 5}
    with pytest.raises(ConfigError, match="another topic named 'q__retry', which was deleted since"):
        reader._offsets(position, topics(q="A", q__retry="D"))
