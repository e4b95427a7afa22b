"""Replaces the consumers of a tracker that never reach Kafka again, as kmqpy.kafka.cut_off explains."""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from kmqpy.kafka.cut_off import Client, CutOffCheck
from kmqpy.kafka.settings import SETTINGS_TOPIC
from tracker.background import Pool
from tracker.context import TrackerContext
from tracker.kafka_clients import KafkaClients

_log = logging.getLogger(__name__)


class CutOffKeeper:
    """Looks for cut off consumers in the background, and replaces them in the main loop.

    Only those that got nothing from Kafka lately are asked. The main loop fetches all the time, and calls of
    one consumer never overlap (confluent-kafka sees to that), so asking can have to wait for seconds.
    """

    def __init__(self, context: TrackerContext, kafka: KafkaClients) -> None:
        self._jobs = context.jobs
        self._check = CutOffCheck(context.connection, SETTINGS_TOPIC, context.clock)
        self._consumers = (kafka.markers, kafka.ends)
        self._looking = False

    def look(self) -> None:
        """Ask Kafka with each silent consumer, when it is time to."""
        silent = [one.consumer for one in self._consumers if one.is_silent()]
        if silent and not self._looking and self._check.is_due():
            self._looking = True
            self._jobs.run(Pool.COUNTING, partial(self._check.find, silent), self._found)

    def _found(self, cut_off: Collection[Client] | Exception) -> None:
        self._looking = False
        if isinstance(cut_off, Exception):
            raise cut_off
        for one in self._consumers:
            if one.consumer in cut_off:
                _log.warning("consumer replaced: Kafka answers others only", extra={"of": type(one).__name__})
                one.renew()
