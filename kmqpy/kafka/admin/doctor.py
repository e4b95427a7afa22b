"""`Doctor` gathers facts about queues from Kafka and the registry, then checks them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping

from kmqpy.errors import AccessDenied, ConfigError, QueueNotFound
from kmqpy.kafka.admin.checks.damage import check_damage
from kmqpy.kafka.admin.checks.log_cuts import check_log_cuts
from kmqpy.kafka.admin.checks.marker_format import check_marker_format
from kmqpy.kafka.admin.checks.retention import check_retention
from kmqpy.kafka.admin.checks.settings_topic import (
    check_record,
    check_records_of_no_queue,
    check_settings_topic,
)
from kmqpy.kafka.admin.checks.topic_settings import OF_KAFKA, check_topic_settings, check_topics_of_kafka
from kmqpy.kafka.admin.checks.topics import (
    check_partitions,
    check_shared_topics,
    check_stale_markers,
    check_topics,
    check_unregistered_topics,
)
from kmqpy.kafka.admin.checks.trackers import (
    check_clocks,
    check_consumer_groups,
    check_offsets,
    check_trackers,
)
from kmqpy.kafka.admin.checks.transactions import check_hanging
from kmqpy.kafka.admin.checks.znodes import unreadable_settings, unusable_znodes
from kmqpy.kafka.admin.context import AdminContext, name_of
from kmqpy.kafka.admin.facts import Facts
from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.admin.registry_entries import RegisteredQueue
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.copies.own_hanging import OwnTransaction, own_transaction
from kmqpy.kafka.damaged_logs import DamagedLog, DamageSearch
from kmqpy.kafka.group_commits import KnownRecord, group_commits, last_taken, new_cuts
from kmqpy.kafka.hanging import HangingTransaction, HangingTransactions
from kmqpy.kafka.log_ends import TopicPlace
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.settings import SETTINGS_TOPIC, QueueSettings
from kmqpy.kafka.settings_mirror import Records
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.kafka.topic_names import shared_topics, topics_of
from kmqpy.kafka.topics import Members, TopicInfo

CHECKS = (
    check_topics,
    check_shared_topics,
    check_partitions,
    check_retention,
    check_topic_settings,
    check_log_cuts,
    check_hanging,
    check_damage,
    check_trackers,
    check_stale_markers,
    check_offsets,
    check_clocks,
    check_consumer_groups,
    check_marker_format,
    check_record,
)
"""The checks of one queue. Findings of equal severity are listed in this order."""
_OF_ALL_LANES = (check_shared_topics, check_topic_settings, check_hanging, check_marker_format, check_record)
"""Those whose findings for the queue are about its lanes, too."""


def check(facts: Facts) -> list[Finding]:
    """Return a finding for each fault of the queue, errors first; one finding `ok` if there is no fault."""
    name, queue = facts.settings.name, facts.settings.queue_name
    command = re.compile(rf"(kmq queue [a-z]+) {re.escape(name)}\b")  # on the queue, not on its lane
    found = [
        Finding(severity, name, kind, what, command.sub(rf"\1 {queue}", to_do))
        for one_check in CHECKS
        if queue == name or one_check not in _OF_ALL_LANES
        for severity, kind, what, to_do in one_check(facts)
    ]
    found += unusable_znodes(name, facts.unusable_znodes)
    found.sort(key=lambda finding: finding.severity is not Severity.ERROR)
    return found or [
        Finding(Severity.OK, name, Kind.OK, "topics, retention, trackers and offsets are as they should")
    ]


class Doctor:
    """Finds what is wrong with queues, their topics, trackers and znodes, and says how to fix it.

    Raises ConfigError with NO_ZOOKEEPER.
    """

    def __init__(self, context: AdminContext, *, reads_logs: bool = False) -> None:
        self._context = context
        self._registry = context.registry
        self._damage = DamageSearch(context.connection, to_end=reads_logs)
        self._search = HangingTransactions(context.connection, context.clock, trust_producers=True)

    def examine(self, queue: str | QueueSettings) -> list[Finding]:
        """Return the findings about one queue; raises QueueNotFound."""
        with contextlib.closing(self._damage):
            records, _ = self._context.records(name_of(queue))
            return self._diagnosis(queue, *self._context.topics.groups(), records)

    def examine_all(self) -> list[Finding]:
        """Return the findings about every registered queue, and about topics and znodes of no queue."""
        context, registry = self._context, self._registry
        groups, members = context.topics.groups()
        records, error = context.records()
        registered, damaged = registry.every_queue()
        names = [one.name for one in registered]
        told = Records() if records is None else records
        used = {topic for one in (*registered, *told.own.values(), *told.others) for topic in topics_of(one)}
        # A queue whose settings or record can't be read may use any topic.
        found = [] if damaged or error else check_unregistered_topics(context.topics.names(), used)
        found += unusable_znodes("registry", registry.stray_unusable_znodes())
        found += check_settings_topic(self._settings_topic(), error, names)
        for name in (*OF_KAFKA, SETTINGS_TOPIC):
            with contextlib.suppress(AccessDenied):  # users of queues need no right to see Kafka's own topics
                central = context.topics.describe([name], with_config=True)
                found += check_topics_of_kafka(central.values(), context.topics.brokers())
        ownerless = [topic for one in told.own.values() if one.name not in names for topic in topics_of(one)]
        found += check_records_of_no_queue(told, names, context.topics.describe(ownerless, with_config=True))
        with contextlib.closing(self._damage):
            for name in names:
                with contextlib.suppress(QueueNotFound):  # removed meanwhile
                    found += self._diagnosis(name, groups, members, records)
        return found

    def quick_look(self, queue: str | QueueSettings) -> list[Finding]:
        """Like examine(), but only what takes few requests; for a tracker that begins to serve a queue.

        Leaves out other consumer groups, which take a request for each group of the cluster, topics that
        several queues share, for which the settings of all queues are read, and unusable znodes, for which
        all znodes of the queue are read.
        """
        return check(self._facts(*self._context.find(queue), self._context.records(name_of(queue))[0]))

    def _diagnosis(
        self,
        queue: str | QueueSettings,
        groups: Mapping[str, list[str]],
        members: Members,
        records: Records | None,
    ) -> list[Finding]:
        """Return the findings about one queue; see examine(). `groups`, `members`: see Topics.groups()."""
        registry = self._registry
        try:
            settings, known = self._context.find(queue)
        except ConfigError as error:
            name = queue if isinstance(queue, str) else queue.name
            return [unreadable_settings(name, error), *unusable_znodes(name, registry.unusable_znodes(name))]
        found = self._of_lane(settings, known, groups, members, records)
        told = {(one.kind, one.what) for one in found}
        for lane in settings.lanes()[:-1]:
            there = self._of_lane(lane, self._context.registered(lane.name), groups, members, records)
            found += [one for one in there if one.kind is not Kind.OK and (one.kind, one.what) not in told]
        return [one for one in found if one.kind is not Kind.OK] or found

    def _of_lane(
        self,
        settings: QueueSettings,
        known: RegisteredQueue | None,
        groups: Mapping[str, list[str]],
        members: Members,
        records: Records | None,
    ) -> list[Finding]:
        registry = self._registry
        facts = self._facts(settings, known, records, looks=True)
        hanging = self._hanging(facts.topics.values())
        own = {one.hanging.place: one for one in self._own(settings, hanging)}
        return check(
            dataclasses.replace(
                facts,
                bootstrap=self._context.connection.bootstrap,
                hanging=hanging,
                own_hanging=own,
                groups=tuple(groups.get(settings.name, ())),
                members=members,
                shared=tuple(shared_topics(settings, registry.every_queue()[0])),
                unusable_znodes=tuple(registry.unusable_znodes(settings.name)),
            )
        )

    def own_hanging(self, queue: str | QueueSettings) -> list[OwnTransaction]:
        """Return the hanging transactions of trackers and redrives in the topics of a queue."""
        settings, known = self._context.find(queue)
        return self._own(settings, self._hanging(self._context.described(settings, known).values()))

    def _hanging(self, topics: Iterable[TopicInfo]) -> tuple[HangingTransaction, ...]:
        places = [(topic.name, partition) for topic in topics for partition in range(topic.partitions)]
        self._search.look(places)  # transactions count that are still there in a second look
        left = [place for place in places if self._search.is_open(place)]
        return tuple(self._search.look(left)) if left else ()

    def _own(self, queue: QueueSettings, hanging: Iterable[HangingTransaction]) -> list[OwnTransaction]:
        found = (own_transaction(self._context.connection, queue, one) for one in hanging)
        return [one for one in found if one is not None]

    def _facts(
        self,
        settings: QueueSettings,
        known: RegisteredQueue | None,
        records: Records | None,
        *,
        looks: bool = False,
    ) -> Facts:
        """Gather the facts for check(), except `groups`, `members`, `shared` and `unusable_znodes`.

        With `looks`, looks for damage, too: where clients and the next tracker begin to read.
        """
        context, log = self._context, self._context.topics
        topics = context.described(settings, known)
        owners, stored = context.tracked(settings, known)
        messages, markers = topics.get(settings.name), topics.get(settings.markers_topic)
        queue_log = log.offsets(messages.name, range(messages.partitions)) if messages else {}
        markers_log = log.offsets(markers.name, range(markers.partitions)) if markers else {}
        commits: dict[int, Commit] = {}
        ids = TopicIds(messages.topic_id if messages else "", markers.topic_id if markers else "")
        if messages is not None:
            commits = group_commits(context.connection, settings, queue_log, ids)
        damaged: list[DamagedLog] = []
        if looks:
            taken_to = {partition: commit.offset for partition, commit in commits.items()}
            read_to = {partition: one.offset for partition, one in stored.items()}
            unread = {
                **_unread(settings.name, queue_log, taken_to),
                **_unread(settings.markers_topic, markers_log, read_to),
            }
            damaged = self._damage.find(unread)
        found_cuts: dict[int, LogCuts] = {}
        if messages is not None and not damaged:  # to read what is damaged could end this process
            ends = {
                partition: KnownRecord(one.taken_end - 1, one.queue_epoch, may_be_control=True)
                for partition, one in stored.items()
                if one.queue_id == ids.queue and one.taken_end > 0 and partition in queue_log
            }
            found_cuts = new_cuts(context.connection, settings, last_taken(commits), ends)
        return Facts(
            settings=settings,
            registered=known,
            topics=topics,
            brokers=log.brokers(),
            trackers=tuple(self._registry.trackers()),
            owners=owners,
            stored=stored,
            markers_log=markers_log,
            markers_latest=log.latest_timestamps(markers.name, markers_log) if markers else {},
            now_ms=context.clock.wall_ms(),
            queue_log=queue_log,
            commits=commits,
            damaged=tuple(damaged),
            new_cuts=found_cuts,
            records=records,
        )

    def _settings_topic(self) -> TopicInfo | None:
        """Describe kmq.queues; None if it does not exist."""
        topics = self._context.topics
        try:
            found = topics.describe([SETTINGS_TOPIC], with_config=True)
        except AccessDenied:  # we may not see Kafka's settings of the topic
            found = topics.describe([SETTINGS_TOPIC])
        return found.get(SETTINGS_TOPIC)


def _unread(
    topic: str, log: Mapping[int, tuple[int, int]], read_to: Mapping[int, int]
) -> dict[TopicPlace, int]:
    """Where reading goes on in each partition of a topic that is not read to its end."""
    begin = {partition: max(start, read_to.get(partition, 0)) for partition, (start, _) in log.items()}
    return {(topic, partition): at for partition, at in begin.items() if at < log[partition][1]}
