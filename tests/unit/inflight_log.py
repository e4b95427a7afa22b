"""A markers partition for tests of the in-flight state."""

from kmqpy.kafka.markers.codec import TICK_OFFSET, Marker, Op
from kmqpy.kafka.markers.inflight import InFlight

LEASE = 30_000
T0 = 1_700_000_000_000


class Log:
    """A markers partition and the state read from it; time moves only when told."""

    def __init__(self, **state):
        self.state = InFlight(**state)
        self.at = 0
        self.now = T0

    @property
    def in_redelivery(self):
        return len(self.state._entries.handed_out)

    def add(self, op, offset, after=LEASE, *, later=0, timestamp=None, **fields):
        self.now += later
        marker = Marker(0, offset, op, after, **fields)
        changed = self.state.apply(marker, self.at, self.now if timestamp is None else timestamp)
        self.at += 1
        return changed

    def take(self, offset, after=LEASE, **fields):
        return self.add(Op.TAKE, offset, after, **fields)

    def extend(self, offset, after=LEASE, **fields):
        return self.add(Op.EXTEND, offset, after, **fields)

    def nack(self, offset, after=0, **fields):
        return self.add(Op.NACK, offset, after, **fields)

    def dead_letter(self, offset, **fields):
        return self.add(Op.DEAD_LETTER, offset, 0, **fields)

    def delay(self, offset, after, **fields):
        return self.add(Op.DELAY, offset, after, counts=False, **fields)

    def end(self, offset, **fields):
        return self.add(Op.END, offset, 0, **fields)

    def wait(self, ms):
        """Time passes; a tick says so."""
        return self.add(Op.END, TICK_OFFSET, 0, later=ms)

    def due(self, limit=100):
        return [entry.offset for entry in self.state.take_due(limit)]
