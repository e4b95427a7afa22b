"""Asks, inside the transaction of a redelivery, whether the queue's log may have been cut back (rule R39)."""

from __future__ import annotations

from kmqpy.errors import KmqError
from kmqpy.kafka.log_ends import LogEnd
from tracker.leadership.assignment import Partition
from tracker.reading.queue_ends import QueueEnds
from tracker.redelivery.known_log import KnownLog


class LogCheck:
    """Tells whether copies stand where the log is known; else their numbers could be those of other messages.

    new_end  where the log ends if somebody was elected leader since; None: nobody was, as far as is known
    """

    def __init__(self, ends: QueueEnds, key: Partition, log: KnownLog) -> None:
        self.new_end: LogEnd | None = None
        self._ends = ends
        self._key = key
        self._log = log

    def nobody_was_elected(self) -> bool:
        """Return False if the partition has another leader since the log was known, or Kafka does not answer.

        After an election, somebody must look whether the log was cut back before.
        """
        if self._log.epoch < 0:
            return True
        end = self._ends.with_epochs([self._key])[self._key]
        if isinstance(end, KmqError):
            return False
        if end.epoch > self._log.epoch:
            self.new_end = end
        return end.epoch == self._log.epoch
