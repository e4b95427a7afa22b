"""Deletes a queue: its topics, once trackers have let go of it, then its entry in the registry.

Leftovers are the topics, and the record in kmq.queues, of a queue that is not in the registry any more, for
example because ZooKeeper was emptied. No tracker serves such a queue, so their deletion waits for no tracker.
"""

from __future__ import annotations

from dataclasses import dataclass

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound, TopicError
from kmqpy.kafka.admin.context import AdminContext
from kmqpy.kafka.admin.lane_removal import LaneRemoval
from kmqpy.kafka.settings import LANE_SUFFIXES, MARKERS_SUFFIX, SETTINGS_TOPIC, QueueSettings
from kmqpy.kafka.settings_mirror import Records
from kmqpy.kafka.topic_names import check_new_queue_name, topics_of


@dataclass(frozen=True, kw_only=True)
class Deletion:
    """What the deletion of a queue, or of its leftovers, deletes.

    topics  the topics that are deleted, each with about the number of its records
    kept    topics of the queue that stay, each with the other queue that uses the topic, maybe a queue of
            another ZooKeeper root
    """

    queue: str
    topics: dict[str, int]
    kept: dict[str, str]


class QueueDeletion:
    """Deletes a registered queue, or the leftovers of a queue; see Admin.delete_queue()."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def delete(self, name: str, *, timeout: Duration, if_empty: bool, leftovers: bool) -> Deletion:
        """Delete a queue, or its leftovers; returns what was deleted. See Admin.delete_queue()."""
        found = self.deletion(name, leftovers=leftovers)
        if if_empty:
            self._check_empty(name)
        if leftovers:
            self._delete(name, list(found.topics))
        else:
            wait_s = duration_ms(timeout, "timeout") / 1000
            self._context.registry.mark_deleting(name)  # so that nobody adds lanes meanwhile
            LaneRemoval(self._context).remove_others(name, (), wait_s)
            # The topics are determined once more: a queue that was created meanwhile may use one of them.
            self._context.registry.remove(
                name, wait_s, on_released=lambda: self._delete(name, self._to_delete(name, leftovers)[0])
            )
        return found

    def deletion(self, name: str, *, leftovers: bool = False) -> Deletion:
        """Return what delete() would delete; deletes nothing. See Admin.deletion()."""
        names, kept = self._to_delete(name, leftovers)
        topics = self._context.topics.describe(names)
        records = {
            topic: sum(
                end - first
                for first, end in self._context.topics.offsets(topic, range(one.partitions)).values()
            )
            for topic, one in topics.items()
        }
        return Deletion(queue=name, topics=records, kept=kept)

    def _to_delete(self, name: str, leftovers: bool) -> tuple[list[str], dict[str, str]]:
        """Return the topics to delete, and the topics to keep, each of these with the queue that uses it.

        Topics of a registered queue are returned even if they don't exist. Raises the errors of
        Admin.delete_queue() for the name.
        """
        registered, damaged = self._context.registry.every_queue()
        users = {topic: one.name for one in registered if one.name != name for topic in topics_of(one)}
        own = {one.name: one for one in registered}.get(name)
        if unknown := [one for one in damaged if one != name]:
            raise ConfigError(
                f"queue {unknown[0]!r}: its settings in the registry can't be read, so nobody knows which "
                f"topics it uses, and none is deleted; write them anew with: kmq queue create {unknown[0]}"
            )
        if not leftovers and own is None:
            part = f"; topic {name!r} is one of queue {users[name]!r}" if name in users else ""
            raise QueueNotFound(
                f"queue {name!r} is not registered{part}; topics that are left over from a queue are deleted "
                f"with: kmq queue delete {name} --leftovers"
            )
        if leftovers and own is not None:
            raise ConfigError(f"queue {name!r} is registered; delete it with: kmq queue delete {name}")
        if own is None:
            check_new_queue_name(name)
            own = QueueSettings(name=name)
        topics = list(topics_of(own))
        records, error = self._context.records()
        if error is not None and (leftovers or not isinstance(error, AccessDenied)):
            raise error
        records = records or Records()
        elsewhere = {
            topic: f"{one.name} of another ZooKeeper root"
            for one in records.others
            for topic in topics_of(one)
        }
        users = elsewhere | users
        if leftovers:
            if name in records.unreadable_others:
                raise TopicError(
                    f"topic {SETTINGS_TOPIC} has a record of a queue {name!r} of another ZooKeeper root that "
                    "can't be read, so nobody knows whose these topics are, and none is deleted"
                )
            existing = self._context.topics.names()
            if own.markers_topic not in existing:
                topics.remove(name)  # a topic without a markers topic does not look like a queue's
            lanes = {f"{name}{ending}": f"{name}{ending}{MARKERS_SUFFIX}" for ending in LANE_SUFFIXES}
            for lane, markers in lanes.items():
                if {lane, markers} <= existing and lane not in records.own:  # else it is a queue
                    topics += [lane, markers]
            topics = [topic for topic in topics if topic in existing]
            recorded = name in records.own and existing.isdisjoint(topics_of(records.own[name]))
            if not recorded and not any(topic not in users for topic in topics):
                raise QueueNotFound(
                    f"nothing is left over from a queue {name!r} that belongs to no other queue"
                )
        kept = {topic: users[topic] for topic in topics if topic in users}
        return [topic for topic in topics if topic not in kept], kept

    def _delete(self, name: str, topics: list[str]) -> None:
        """Delete these topics, then the queue's record in kmq.queues."""
        self._context.topics.delete(topics)
        self._context.mirror(lambda mirror: mirror.remove(name))

    def _check_empty(self, name: str) -> None:
        """Raise TopicError if the queue holds messages or dead letters."""
        counted = self._context.stats(name)
        held = {
            "waiting": counted.depth,
            "in flight": counted.in_flight,
            "dead letters": counted.dead_letters,
        }
        if any(held.values()):
            shown = ", ".join(f"{count} {what}" for what, count in held.items() if count)
            raise TopicError(f"queue {name!r} is not empty ({shown}); nothing was deleted")
