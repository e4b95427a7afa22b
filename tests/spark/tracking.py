"""What tests of the tracker on Spark do with a queue."""

import contextlib
import time
from collections import Counter

from support import until

from kmqpy.errors import KmqError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.markers.codec import Marker, Op

LONG_S = 300.0
"""What Spark may need on a busy machine; a few seconds elsewhere."""


def take(queue, each, name, lease_ms=lambda number: 200):
    """Send `each` messages to every partition, and take them; their bodies."""
    bodies, markers = [], []
    for partition in range(queue.partitions):
        ends = partition_reader.bounds(queue.connection, queue.name, [partition], uncommitted=True)
        new = [f"{name}-{partition}-{number}" for number in range(each)]
        queue.send(*new, partition=partition)
        bodies += new
        first = ends[partition][1]
        markers += [Marker(partition, first + n, Op.TAKE, lease_ms(n)) for n in range(each)]
    queue.mark_all(markers)
    return bodies


def stored(queue) -> Counter[str]:
    """How often each body stands in the queue topic; a broker that is slow to answer is asked again."""
    while True:
        with contextlib.suppress(KmqError):
            return queue.copies()
        time.sleep(0.5)


def each_came_again_once(queue, bodies):
    """Wait until each has come again; and none more than once."""

    def came():
        copies = stored(queue)
        return all(copies[body] >= 2 for body in bodies)

    until(came, LONG_S, lambda: stored(queue), every=0.2)
    copies = stored(queue)
    assert {body: copies[body] for body in bodies if copies[body] != 2} == {}
