"""Copies of other lanes that a retry lane may have lost: what is read to find them, and which come again."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
from confluent_kafka import Message

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import Unavailable
from kmqpy.kafka.markers import codec
from kmqpy.kafka.markers.claim_headers import CLAIM, naming_tick
from kmqpy.kafka.markers.codec import Headers, Marker, Op
from kmqpy.kafka.markers.log_cuts import NO_CUTS, LogCuts
from kmqpy.kafka.partition_reader import ReadPosition
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery import lost_copies
from tracker.redelivery.known_log import CopySearch

LANE, MAIN = QueueSettings(name="q", retry_lane=True).lanes()
OWN, OTHER = LANE.markers_topic, MAIN.markers_topic
DAY = 86_400_000


class Logs:
    """Logs in memory, in the place of `partition_reader`; counts what is read, and by `end_of_epoch`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.logs: dict[str, list[Message | None]] = {"q__retry": [], OWN: [], OTHER: []}
        self.hidden_from: dict[str, int] = {}
        self.end = -1
        """The boundary that `end_of_epoch` finds."""
        self.read: list[tuple[str, int]] = []
        self.kept: list[Any] = []
        monkeypatch.setattr(lost_copies, "partition_reader", self)
        monkeypatch.setattr(lost_copies, "end_of_epoch", lambda *_, **__: self.end)

    def put(self, topic: str, headers: Headers | None = None, *, ms: int = 3 * DAY, **of: Any) -> None:
        log = self.logs[topic]
        log.append(
            Message(topic=topic, partition=0, offset=len(log), timestamp=(1, ms), headers=headers, **of)
        )

    def mark(self, topic: str, marker: Marker, *more: tuple[str, bytes], ms: int = 3 * DAY) -> None:
        key, value, headers = codec.encode(marker)
        self.put(topic, [*(headers or []), *more], ms=ms, key=key, value=value)

    def copy(self, *numbers: int, stands: bool = True, ms: int = 3 * DAY) -> None:
        """Copy messages of the main lane in a transaction of its tracker; `stands`: they can be read."""
        key, value, headers = naming_tick(0, CLAIM, list(numbers), None)
        self.put(OTHER, list(headers), ms=ms, key=key, value=value)
        for number in numbers:
            at = len(self.logs["q__retry"])
            if stands:
                self.put("q__retry", [("kmq-ancestors", b"q:0:%d" % number)], value=b"x" * 1000)
            else:
                self.logs["q__retry"].append(None)
            ended = Marker(0, number, Op.END, by_tracker=True)
            self.mark(OTHER, ended, ("kmq-copy", b"q__retry:0:%d" % at), ms=ms)

    def bounds(
        self, _: Any, topic: str, _partitions: Any, *, uncommitted: bool = False
    ) -> dict[int, tuple[int, int]]:
        end = len(self.logs[topic])
        return {0: (0, end if uncommitted else min(end, self.hidden_from.get(topic, end)))}

    def scan(
        self,
        _: Any,
        topic: str,
        starts: Mapping[int, int],
        visit: Callable[[Any], None],
        *,
        limit: int | None = None,
        uncommitted: bool = False,
        **_more: Any,
    ) -> dict[int, ReadPosition]:
        end = self.bounds(None, topic, [0], uncommitted=uncommitted)[0][1]
        found = self.logs[topic][starts[0] : end][:limit]
        self.read.append((topic, len(found)))
        for record in found:
            visit(record)
        return {0: ReadPosition(0, end, end)}

    def scan_since(
        self,
        _: Any,
        topic: str,
        times: Mapping[int, int],
        visit: Callable[[int, list[Any]], bool],
        **_more: Any,
    ) -> None:
        log = [record for record in self.logs[topic] if record is not None]
        first = next((n for n, one in enumerate(log) if one.timestamp()[1] >= times[0]), len(log))
        self.read.append((topic, len(log) - first))
        visit(0, log[first:])

    def read_at(
        self, _: Any, topic: str, places: Iterable[tuple[int, int]], *, keep: Callable[[Any], Any], clock: Any
    ) -> dict[tuple[int, int], Any]:
        log = self.logs[topic]
        there = {place: keep(log[place[1]]) for place in places if place[1] < len(log) and log[place[1]]}
        self.read.append((topic, len(there)))
        self.kept += there.values()
        return there

    def lost(self, search: CopySearch | None = None, cuts: LogCuts = NO_CUTS) -> list[int]:
        search = search or CopySearch(-1, of_lanes=True, former=1)
        found = lost_copies.lost_of_lanes(KafkaConnection(), LANE, 0, cuts, search, SYSTEM_CLOCK)
        return list(found.get(OTHER, []))


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch) -> Logs:
    made = Logs(monkeypatch)
    made.mark(OWN, codec.tick(0), ms=2 * DAY)
    return made


def test_r46_where_nothing_is_lost_a_record_of_each_lane_is_looked_at(logs: Logs) -> None:
    for number in range(0, 3_000, 2):
        logs.copy(number, number + 1)
        logs.mark(OWN, Marker(0, number, Op.TAKE, 1000))
        logs.mark(OWN, Marker(0, number, Op.END))
    logs.end = 3_000
    assert logs.lost() == []
    assert sorted(logs.read) == [("q__markers", 4_500), ("q__retry", 2), ("q__retry__markers", 1)]
    assert not [one for one in logs.kept if isinstance(one, Message)], "else bodies fill the memory"


def test_r46_of_each_lane_the_last_markers_are_read(logs: Logs) -> None:
    for number in range(20_000):
        logs.mark(OTHER, Marker(0, number, Op.END))
    logs.mark(OTHER, Marker(0, 1, Op.END), ms=400 * DAY)
    assert logs.lost() == []
    assert ("q__markers", 10_000) in logs.read


def test_r46_whose_copy_is_gone_comes_again_and_nobody_else(logs: Logs) -> None:
    logs.copy(1)
    for number in range(2, 7):
        logs.copy(number, stands=number == 6)
    logs.mark(OTHER, Marker(0, 3, Op.TAKE, 1000))  # in flight again
    logs.mark(OWN, Marker(0, 3, Op.END))
    logs.end = 1
    assert logs.lost() == [2, 5], "4 was finished in the lane"
    assert logs.read.count((OWN, 1)) == 2, "its markers are read since the first of them was copied"


def test_r46_only_the_last_transaction_before_an_election_can_be_undecided(logs: Logs) -> None:
    """Its commit was cut away, and another decides."""
    logs.copy(1, stands=False)
    logs.copy(2, 3, stands=False)
    logs.end = 3
    assert logs.lost() == [2, 3]


def test_r46_behind_a_told_cut_it_is_looked_from_there_on(logs: Logs) -> None:
    logs.copy(1, stands=False)
    logs.copy(2)
    logs.copy(3, stands=False)
    assert logs.lost(CopySearch(2, of_lanes=True)) == [3]
    assert logs.lost(CopySearch(0, of_lanes=True)) == [1, 3]


def test_r46_copies_in_a_former_lane_of_the_name_are_not_looked_for(logs: Logs) -> None:
    logs.mark(OTHER, Marker(0, 1, Op.TAKE, 1000), ms=100 * DAY)  # a clock far ahead
    logs.copy(5, stands=False, ms=1 * DAY)
    logs.copy(6, stands=False, ms=2 * DAY - 9_000)  # before the first marker of the new lane
    logs.end = 0
    assert logs.lost() == [6]
    logs.logs[OWN].clear()
    assert logs.lost() == [], "nothing tells when the lane was made"


@pytest.mark.parametrize("topic", [OTHER, "q__retry"])
def test_r46_only_transactions_that_were_open_at_first_are_waited_for(logs: Logs, topic: str) -> None:
    logs.copy(1, stands=False)
    logs.end = 0
    search = CopySearch(-1, of_lanes=True, former=1)
    logs.hidden_from[topic] = 0
    with pytest.raises(Unavailable, match=f"a transaction in {topic} is open"):
        logs.lost(search)
    logs.hidden_from[topic] = len(logs.logs[topic])
    logs.copy(2, stands=False)
    assert logs.lost(search) == [1]
    logs.logs["q__retry"].clear()
    logs.hidden_from.clear()
    assert logs.lost(search) == [1], "what was waited for is cut away"


def test_r46_a_tracker_that_has_given_the_partition_up_writes_nothing(logs: Logs) -> None:
    logs.copy(1, stands=False)
    written: list[tuple[str, list[int]]] = []

    class Writer:
        def send_markers(self, topic: str, markers: list[Marker], _timeout_s: float) -> None:
            written.append((topic, [marker.offset for marker in markers]))

    def search(*, may_write: bool) -> int:
        search = CopySearch(0, of_lanes=True)
        writer: Any = Writer()
        return lost_copies.redeliver_lost_copies(
            KafkaConnection(), LANE, 0, NO_CUTS, search, writer, lambda: may_write, SYSTEM_CLOCK
        )

    with pytest.raises(Unavailable, match="another tracker"):
        search(may_write=False)
    assert written == []
    assert search(may_write=True) == 1
    assert written == [(OTHER, [1])]
