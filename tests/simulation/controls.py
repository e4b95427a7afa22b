"""Negative controls: kmqpy with one of its safeguards taken out. The checker must find each of them."""

from collections.abc import Sequence
from typing import Any

from kmqpy.markers import Marker
from kmqpy.registry import StoredOffset

from .actors import QueueSource, Redeliverer, Tracker, aborted, broken
from .kafka import Connection, MarkerWriter, Transactions
from .model import Steps
from .simulate import Controls


class UnfencedTransactions(Transactions):
    """Every producer has a transactional.id of its own, so none fences a predecessor."""

    def __init__(self, connection: Connection, transactional_id: str) -> None:
        super().__init__(connection, f"{transactional_id}-{connection.process.name}")


class PlainSends(Transactions):
    """Copies and end markers are sent one by one, by a producer that is fenced but has no transaction."""

    def _send_pending(self) -> Steps:
        yield from super()._send_pending()
        self._end(commit=True)

    def _send(self, place: tuple[str, int], key: bytes | None, value: Any, headers: Any) -> Any:
        record = super()._send(place, key, value, headers)
        self._end(commit=True)
        return record


class UnsafeOffsets(Tracker):
    """Stores how far it has read, past the takes of what is in flight."""

    def _offset_of(self, part: Any) -> StoredOffset | None:
        stored = super()._offset_of(part)
        if stored is None:
            return None
        return StoredOffset(part.state._position, stored.topic_id, part.state.now_ms)


class LateOperationsOpen(Tracker):
    """Any operation opens an entry, not only a take (rule R2)."""

    def _start_reading(self, part: Any, found: Any) -> None:
        super()._start_reading(part, found)
        part.state.missed_markers = True


class UnconfirmedStarts(MarkerWriter):
    """Does not wait for start markers: they are on their way when the messages are handed out."""

    def write(self, batch: Sequence[Marker], timeout_s: float) -> Steps:
        yield self._world.latency()
        end = self._connection.broker.logs[self._topic, 0].end
        self._process.spawn(self._append(batch), 50 * self._world.random())
        return {(marker.partition, marker.offset): end for marker in batch}


class RetriesFromMemory(Redeliverer):
    """Goes on with what it knows after a commit of unknown outcome (rule R1)."""

    def _transact(self, batch: Any, gone: Any) -> Steps:
        try:
            yield from super()._transact(batch, gone)
        except broken as error:
            raise aborted() from error


class ForgetsPredecessors(QueueSource):
    """Hands out what a crashed client had started and not committed (rule R10)."""

    def _started_since(self, partition: int, start: int, first_offset: int) -> Steps:
        yield from super()._started_since(partition, start, first_offset)
        return set()


CONTROLS = {
    "fencing off": Controls(transactions=UnfencedTransactions),
    "two sends instead of a transaction": Controls(transactions=PlainSends),
    "safe offset past the oldest start": Controls(tracker=UnsafeOffsets),
    "start markers not waited for": Controls(marker_writer=UnconfirmedStarts),
    "retry from memory": Controls(redeliverer=RetriesFromMemory),
    "late operations open": Controls(tracker=LateOperationsOpen),
    "predecessors forgotten": Controls(source=ForgetsPredecessors),
}
