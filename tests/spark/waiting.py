"""What a queue waits for, when a query has ended that was to process it."""

from support import until

from kmqpy.kafka.admin import stats


def counted(queue):
    return stats.queue_stats(queue.connection, queue.settings)


def settled(queue) -> bool:
    """Whether nothing waits and nothing is in flight."""
    found = counted(queue)
    return (found.depth, found.in_flight) == (0, 0)


def until_ready(queue) -> None:
    """Wait until the tracker has redelivered something, or all is settled.

    A query that is started before has nothing to do, and starting it is what costs.
    """

    def ready():
        found = counted(queue)
        return found.depth > found.delayed or not (found.depth or found.in_flight)

    until(ready, 120, lambda: counted(queue), every=0.05)
