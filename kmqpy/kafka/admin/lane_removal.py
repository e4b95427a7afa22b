"""Removes lanes of a queue: waits until they are empty, then takes them from the registry and from Kafka.

A lane is removed in steps, each of which a second call finds done:

1. `alter` names the lane in the setting `draining_lanes`: clients still take from it, trackers copy nothing
   to it any more, and who sends with its priority sends to another lane.
2. It is waited until nothing is left in it, and nothing has come for a while.
3. The settings name it no more, so clients leave it.
4. Its trackers let go of it; its topics are deleted, then its znodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container
from functools import partial

from kmqpy.errors import QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin import stats
from kmqpy.kafka.admin.checks.advice import option_of_lane
from kmqpy.kafka.admin.context import AdminContext
from kmqpy.kafka.settings import RETRY_SUFFIX, QueueSettings

QUIET_S = 15.0
"""Nothing must have come into a lane for so long: then clients and trackers know that it is being removed,
and transactions that had begun before are over, or count as messages. CurrentSettings.keeps() needs it."""
_POLL_S = 0.5


def with_draining(before: QueueSettings, after: QueueSettings) -> QueueSettings:
    """Return `after` with the lanes that it lacks, and `before` has, as ones that are being removed."""
    plain = dataclasses.replace(after, draining_lanes=())
    kept = {lane.name for lane in plain.lanes()}
    left = [lane.name for lane in before.lanes() if lane.name not in kept]
    endings = tuple(name.removeprefix(f"{after.name}__") for name in left)
    return dataclasses.replace(after, draining_lanes=endings)


class LaneRemoval:
    """Removes the lanes of a queue that its setting `draining_lanes` names, or that no setting names."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def finish(self, name: str, timeout_s: float) -> QueueSettings:
        """Remove the lanes of queue `name` that are empty; returns its settings.

        Raises Unavailable if a lane is not empty, or not let go by its trackers, after `timeout_s`, and
        TopicError if one that the settings lack holds messages.
        """
        settings = self._context.registry.get(name).settings
        deadline = self._context.clock.monotonic() + timeout_s
        self._remove_unnamed(settings, deadline)  # what an earlier call has left
        for lane in settings.lanes()[:-1]:
            if lane.name.removeprefix(f"{name}__") in settings.draining_lanes:
                self._wait_until_drained(lane, deadline)
                settings = self._forget(name, lane)
                self._remove_unnamed(settings, deadline)
        return settings

    def _remove_unnamed(self, settings: QueueSettings, deadline: float) -> None:
        named = {lane.name for lane in settings.lanes()}
        registry = self._context.registry
        for lane in registry.lanes(settings.name):  # perhaps a version without lanes has written the settings
            is_checked = lane.name in named or registry.get(lane.name).deleting
            if not is_checked and (left := self._count(lane)):
                raise TopicError(
                    f"lane {lane.name!r} holds {left} messages, and the settings lack it; "
                    f"add it again with: kmq queue alter {settings.name} {option_of_lane(lane.name)}"
                )
        left_s = max(1.0, deadline - self._context.clock.monotonic())
        self.remove_others(settings.name, named, left_s)

    def remove_others(self, name: str, named: Container[str], timeout_s: float) -> None:
        """Remove the registered lanes of queue `name` but the `named` ones, with their topics."""
        for lane in self._context.registry.lanes(name):
            if lane.name not in named:
                topics = [lane.name, lane.markers_topic]
                released = partial(self._context.topics.delete, topics)
                self._context.registry.remove(lane.name, timeout_s, on_released=released)

    def _wait_until_drained(self, lane: QueueSettings, deadline: float) -> None:
        """Wait until the lane is empty and nothing has come for QUIET_S; raises Unavailable."""
        clock, topics = self._context.clock, self._context.topics
        quiet_since, end = clock.monotonic(), -1
        while True:
            try:
                found = topics.check(lane)
                now_at = sum(last for _, last in topics.offsets(lane.name, range(found.partitions)).values())
                left = self._count(lane)
            except QueueNotFound:
                return  # somebody has deleted its topic
            if now_at != end:
                quiet_since, end = clock.monotonic(), now_at
            if not left and clock.monotonic() - quiet_since >= QUIET_S:
                return
            if clock.monotonic() >= deadline:
                what = f"{left} messages wait or are in flight there" if left else "messages came until now"
                raise Unavailable(
                    f"lane {lane.name!r} is being removed, but {what}; once they are done, run: "
                    f"kmq queue alter {lane.queue_name} {option_of_removal(lane)}"
                )
            clock.sleep(_POLL_S)

    def _count(self, lane: QueueSettings) -> int:
        """How many messages wait or are in flight in a lane; 0 if somebody has deleted its topic."""
        context = self._context
        try:
            counted = stats.queue_stats(
                context.connection, lane, tracked=self._tracked, topics=context.topics, clock=context.clock
            )
        except QueueNotFound:
            return 0
        return counted.depth + counted.in_flight

    def _tracked(self, lane: QueueSettings) -> stats.TrackedPartitions:
        return self._context.tracked(lane, self._context.registered(lane.name))

    def _forget(self, name: str, lane: QueueSettings) -> QueueSettings:
        """Take the lane out of the settings; returns them."""
        registry = self._context.registry
        while True:
            one = registry.get(name)
            before = one.settings
            left = tuple(end for end in before.draining_lanes if f"{name}__{end}" != lane.name)
            after = dataclasses.replace(before, draining_lanes=left)
            if registry.register(after, one.partitions, before=before):
                return self._context.mirror_settings(after)


def option_of_removal(lane: QueueSettings) -> str:
    """The option of `kmq queue alter` by which the lane's removal goes on."""
    return "--no-retry-lane" if lane.name.endswith(RETRY_SUFFIX) else f"--priorities {lane.priorities}"
