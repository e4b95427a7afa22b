"""Replaces consumers of a tracker that are cut off: they never reach Kafka again, while other clients do.

kmqpy.kafka.cut_off explains how that happens.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from functools import partial

from kmqpy.kafka.cut_off import Client, CutOffCheck
from kmqpy.kafka.settings import SETTINGS_TOPIC
from tracker.background import Pool
from tracker.context import TrackerContext, TrackerPart
from tracker.kafka_clients import KafkaClients

_log = logging.getLogger(__name__)


class CutOffKeeper(TrackerPart):
    """Finds consumers that are cut off in a background job, and replaces them in the main loop.

    The job tests only consumers that are silent: no marker has come lately, or the last look-up of an end
    has failed. The main loop calls its consumer all the time, and confluent-kafka lets calls of one consumer
    wait for each other, so that a test of a busy consumer could take seconds.
    """

    def __init__(self, context: TrackerContext, kafka: KafkaClients) -> None:
        super().__init__(context)
        self._check = CutOffCheck(context.connection, SETTINGS_TOPIC, context.clock)
        self._consumers = (kafka.markers, kafka.ends)
        self._looking = False

    def check_silent_consumers(self) -> None:
        """Begin a job that asks Kafka with each silent consumer, if that is due and no such job runs."""
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
