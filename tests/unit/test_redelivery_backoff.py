"""What can't be redelivered now is tried again later and later, each message by itself."""

import itertools
from collections.abc import Sequence

from confluent_kafka import KafkaError, KafkaException

from kmqpy.kafka.markers.codec import Marker, Op
from kmqpy.kafka.markers.entry import Entry
from kmqpy.kafka.markers.inflight import InFlight
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from tracker.redelivery.originals import FetchResult, OriginalsReader
from tracker.redelivery.redeliverer import Redeliverer
from tracker.settings import TrackerSettings


class AwayReader(OriginalsReader):
    """Kafka does not answer, or the originals can't be read yet."""

    def __init__(self, *, answers: bool) -> None:
        self.answers = answers

    def fetch(self, topic: str, partition: int, offsets: Sequence[int]) -> FetchResult:
        if not self.answers:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return FetchResult(out_of_reach=list(offsets))


def entries(*offsets: int) -> list[Entry]:
    state = InFlight()
    for offset in offsets:
        state.apply(Marker(0, offset, Op.TAKE, 0), at=offset, timestamp_ms=1)
    return state.take_due(10)


def test_a_message_that_fails_again_and_again_waits_longer_each_time():
    for answers in (False, True):
        redeliverer = Redeliverer(KafkaConnection(), QueueSettings(name="q"), 0, TrackerSettings())
        waits = []
        for _ in range(12):
            reader = AwayReader(answers=answers)
            outcome = redeliverer.redeliver(entries(1), reader, lambda: True, lambda _: True)
            waits.append(outcome.failed[1])
        assert 0 < waits[0] < 1
        assert all(later >= 1.5 * wait or later == 30 for wait, later in itertools.pairwise(waits))
        assert waits[-1] == 30, "for ever, but not never"
        outcome = redeliverer.redeliver(entries(2), reader, lambda: True, lambda _: True)
        assert outcome.failed == {2: waits[0]}
