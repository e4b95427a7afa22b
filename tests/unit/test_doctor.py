"""The doctor's checks: each fault alone gives its one finding."""

from dataclasses import replace

import pytest

from kmqpy.core.durations import DAY_MS
from kmqpy.errors import AccessDenied, ConfigError
from kmqpy.kafka.admin.checks.advice import create_command
from kmqpy.kafka.admin.checks.marker_format import check_before_ranges
from kmqpy.kafka.admin.checks.settings_topic import check_records_of_no_queue, check_settings_topic
from kmqpy.kafka.admin.checks.topic_settings import check_topics_of_kafka
from kmqpy.kafka.admin.checks.topics import check_unregistered_topics
from kmqpy.kafka.admin.doctor import check
from kmqpy.kafka.admin.facts import Facts
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.admin.registry_entries import RegisteredQueue, StoredOffset, TrackerInfo
from kmqpy.kafka.client.offset_commits import Commit
from kmqpy.kafka.damaged_logs import DamagedLog
from kmqpy.kafka.hanging import HangingTransaction
from kmqpy.kafka.markers.log_cuts import LogCuts
from kmqpy.kafka.settings import QueueSettings
from kmqpy.kafka.settings_mirror import Records
from kmqpy.kafka.topics import GroupMember, TopicInfo

QUEUE = QueueSettings(name="q")
TRACKER = TrackerInfo("t1", "host", 0, None, kafka_ok=True)
GOOD = {
    "retention.ms": str(14 * DAY_MS),
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
    "message.timestamp.type": "LogAppendTime",
    "max.message.bytes": "1000000",
    "min.insync.replicas": "2",
    "unclean.leader.election.enable": "false",
}
NAMES = ("q", "q__markers", "q__undelivered", "q__undelivered__markers")


LARGER = {"max_message_bytes": "10000000"}


def topic(name, *, partitions=2, replication=3, **config):
    settings = {key.replace("_", "."): value for key, value in config.items()}
    return TopicInfo(name, f"id of {name}", partitions, replication, {**GOOD, **settings})


def facts(*topics, without=(), **changes):
    found = {name: topic(name, **(LARGER if name == "q__undelivered" else {})) for name in NAMES}
    found = {name: one for name, one in found.items() if name not in without}
    found.update({one.name: one for one in topics})
    healthy = Facts(
        settings=QUEUE,
        registered=RegisteredQueue(QUEUE, 2),
        topics=found,
        brokers=3,
        trackers=(TRACKER,),
        owners={0: "t1", 1: "t1"},
        stored={0: StoredOffset(5, "id of q__markers", 0)},
        markers_log={0: (5, 9), 1: (0, 0)},
        queue_log={0: (5, 9), 1: (0, 0)},
        commits={0: Commit(7, 0)},
        groups=("kmq-q",),
        markers_latest={0: (6, 14_000)},
        now_ms=10_000,
    )
    return replace(healthy, **changes)


def test_a_healthy_queue_is_ok():
    (found,) = check(facts())
    assert found.severity is Severity.OK
    assert found.queue == "q"


ERROR, WARNING = Severity.ERROR, Severity.WARNING


CLIENTS, TRACKERS = "q", "q__markers"


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        ({TRACKERS: [("any", "any")]}, (ERROR, Kind.RANGES_WITH_JVM_TRACKER)),
        ({CLIENTS: [("kmq-q", "consumer-kmq-q-1")]}, (WARNING, Kind.RANGES_WITH_JVM_CLIENTS)),
        ({CLIENTS: [("kmq-q", "rdkafka")]}, None),
        ({CLIENTS: [("audit", "consumer-audit-1")], "another": [("kmq-q", "consumer-1")]}, None),
    ],
)
def test_programs_on_the_jvm_are_told_of_where_a_registered_queue_has_range_markers(members, wanted):
    members = {topic: [GroupMember(*one) for one in some] for topic, some in members.items()}
    found = [(one.severity, one.kind) for one in check(facts(members=members)) if one.kind is not Kind.OK]
    assert found == ([wanted] if wanted else [])
    for settings in (replace(QUEUE, markers="jvm"), None):
        registered = settings and RegisteredQueue(settings, 2)
        kinds = {one.kind for one in check(facts(members=members, registered=registered))}
        assert kinds.isdisjoint({Kind.RANGES_WITH_JVM_TRACKER, Kind.RANGES_WITH_JVM_CLIENTS})


def test_before_a_queue_gets_range_markers_jvm_trackers_stop_it_and_clients_are_told_of(caplog):
    with pytest.raises(ConfigError, match=r"markers: consumer group a, b reads q__markers.*--markers jvm"):
        check_before_ranges(QUEUE, {TRACKERS: [GroupMember("b", "1"), GroupMember("a", "2")]})
    check_before_ranges(QUEUE, {CLIENTS: [GroupMember("kmq-q", "rdkafka")]})
    assert not caplog.records
    check_before_ranges(QUEUE, {CLIENTS: [GroupMember("kmq-q", "consumer-1")]})
    assert "consumer group kmq-q has members on the JVM (consumer-1)" in caplog.text


CUT = LogCuts.parse("1<2@3,3<4@6")
"""Of the first, retention has deleted the place; see facts()."""

HANGING = HangingTransaction("q__markers", 1, 7, 3, 1_000, ())


def test_topics_of_kafka_on_one_broker_of_several_are_told_of():
    lossy = topic("__consumer_offsets", min_insync_replicas="1", unclean_leader_election_enable="true")
    one = topic("__transaction_state", replication=1, min_insync_replicas="1")
    found = [(one.queue, one.kind) for one in check_topics_of_kafka([lossy, one, topic("kmq.queues")], 3)]
    offsets = [("__consumer_offsets", kind) for kind in (Kind.UNCLEAN_ELECTION, Kind.TOO_FEW_IN_SYNC)]
    assert found == [*offsets, ("__transaction_state", Kind.ONE_REPLICA)]
    assert check_topics_of_kafka([one], 1) == []


@pytest.mark.parametrize(
    ("what", "severity", "given"),
    [
        (
            "q__markers, partition 0, 3: a replica is not in sync",
            WARNING,
            facts(replace(topic("q__markers"), behind=(0, 3))),
        ),
        ("queue topic q does not exist", ERROR, facts(without=["q"])),
        ("markers topic q__markers does not exist", ERROR, facts(without=["q__markers"])),
        ("dead-letter topic q__undelivered does not exist", ERROR, facts(without=["q__undelivered"])),
        ("no redrive, no purge", ERROR, facts(without=["q__undelivered__markers"])),
        ("not registered", ERROR, facts(registered=None, trackers=(), owners={})),
        ("marked as deleting", WARNING, facts(registered=RegisteredQueue(QUEUE, 2, deleting=True))),
        ("q has 2 partitions, q__markers has 1", ERROR, facts(topic("q__markers", partitions=1))),
        ("q has 2 partitions, q__markers has 3", WARNING, facts(topic("q__markers", partitions=3))),
        ("q__undelivered has 1", ERROR, facts(topic("q__undelivered", partitions=1, **LARGER))),
        (
            "trackers know of 1",
            ERROR,
            facts(registered=RegisteredQueue(QUEUE, 1)),
        ),
        ("can be lost", ERROR, facts(topic("q", retention_ms=str(DAY_MS)))),
        ("too little for a longer standstill", WARNING, facts(topic("q", retention_ms=str(7 * DAY_MS + 1)))),
        ("finished messages can be redelivered", WARNING, facts(topic("q", retention_ms="-1"))),
        (
            "finished messages can be redelivered",
            WARNING,
            facts(topic("q__undelivered__markers", retention_ms=str(DAY_MS))),
        ),
        ("retention.bytes=5", WARNING, facts(topic("q__markers", retention_bytes="5"))),
        ("q__markers is compacted", ERROR, facts(topic("q__markers", cleanup_policy="compact,delete"))),
        ("CreateTime", WARNING, facts(topic("q__markers", message_timestamp_type="CreateTime"))),
        ("unclean", WARNING, facts(topic("q", unclean_leader_election_enable="true"))),
        ("one replica only", WARNING, facts(topic("q", replication=1, min_insync_replicas="1"))),
        ("confirmed by one broker only", WARNING, facts(topic("q", min_insync_replicas="1"))),
        ("nothing is sent", ERROR, facts(topic("q", min_insync_replicas="4"))),
        ("large ones get stuck", ERROR, facts(topic("q", max_message_bytes="10000001"))),
        ("too large to be copied", WARNING, facts(topic("q__undelivered", max_message_bytes="1065536"))),
        ("no tracker runs", ERROR, facts(trackers=(), owners={})),
        (
            "no running tracker serves this queue",
            ERROR,
            facts(trackers=(replace(TRACKER, queues=frozenset({"other"})),), owners={}),
        ),
        ("does not reach Kafka", WARNING, facts(trackers=(replace(TRACKER, kafka_ok=False),))),
        ("partitions without a tracker: 1", ERROR, facts(owners={0: "t1"})),
        ("of an earlier topic", WARNING, facts(stored={0: StoredOffset(5, "other", 0)})),
        ("below the log start 5", ERROR, facts(stored={0: StoredOffset(4, "id of q__markers", 0)})),
        ("beyond the end 9", WARNING, facts(stored={0: StoredOffset(10, "id of q__markers", 0)})),
        ("offset 7 has a timestamp 120 s ahead", WARNING, facts(markers_latest={1: (7, 130_000)})),
        ("is 3600 s ahead", WARNING, facts(stored={0: StoredOffset(5, "id of q__markers", 3_610_000)})),
        ("up to 2 messages were deleted before", WARNING, facts(commits={0: Commit(3, 0)})),
        (
            "q, partition 0: its log was cut back to offset 6; what stood from there on is lost",
            WARNING,
            facts(commits={0: Commit(7, 0, 4, CUT)}, new_cuts={0: CUT}),
        ),
        ("has noticed that yet", WARNING, facts(new_cuts={0: CUT})),
        ("q__markers, partition 1: a transaction that nobody ends", ERROR, facts(hanging=(HANGING,))),
        (
            "q, partition 1: nobody can read on from offset 7: CRC",
            ERROR,
            facts(damaged=(DamagedLog("q", 1, 7, "CRC"),)),
        ),
        ("one queue topic serves one kmq group", WARNING, facts(groups=("kmq-q", "audit"))),
    ],
)
def test_each_fault_is_found_alone(what, severity, given):
    found = check(given)
    assert [one.severity for one in found] == [severity], found
    assert what in found[0].what
    assert found[0].to_do


def test_the_age_of_a_transaction_by_its_producers_clock_is_doubtful():
    """Someone who replays old records may be at work: an abort would lose what that writes."""
    place = "--topic q__markers --partition 1"
    (found,) = check(facts(hanging=(replace(HANGING, told_by_producer=True),)))
    assert "since 1970-01-01 00:00:01 UTC by the clock of its producer" in found.what
    assert "nobody ends" not in found.what
    describe, leave, abort = (
        found.to_do.index(part)
        for part in (f" describe-producers {place}`", "leave it", f" abort {place} --start-offset 7`")
    )
    assert describe < leave < abort
    (found,) = check(facts(hanging=(HANGING,)))
    assert "producer" not in found.what
    assert found.to_do.index(" abort ") < found.to_do.index(" describe-producers ")


def test_a_purged_partition_lost_nothing():
    assert check(facts(queue_log={0: (9, 9), 1: (0, 0)}))[0].severity is Severity.OK


def test_errors_come_first():
    found = check(facts(topic("q", unclean_leader_election_enable="true"), without=["q__markers"]))
    assert [one.severity for one in found] == [ERROR, WARNING]


def test_settings_that_kafka_does_not_tell_are_no_fault():
    bare = {name: replace(topic(name), config={}) for name in NAMES}
    assert check(facts(topics=bare))[0].severity is Severity.OK


def test_queues_that_nobody_registered_are_found():
    topics = {*NAMES, "other", "other__markers", "lonely", "dead", "dead__markers"}
    assert [one.queue for one in check_unregistered_topics(topics, {*NAMES, "dead", "dead__markers"})] == [
        "other"
    ]


def test_lanes_that_settings_of_an_older_version_lack_are_no_queues_of_their_own():
    lanes = {"q__retry", "q__retry__markers", "q__priority2", "q__priority2__markers"}
    found = check_unregistered_topics({*NAMES, *lanes, "a__retry", "a__retry__markers"}, {*NAMES})
    assert [(one.queue, one.to_do.partition(";")[0]) for one in found] == [
        ("a__retry", "`kmq queue create a__retry` registers it"),
        ("q__priority2", "`kmq queue alter q --priorities 3` adds it"),
        ("q__retry", "`kmq queue alter q --retry-lane` adds it"),
    ]


def test_timestamps_of_clients_in_the_markers_of_a_lane_are_found():
    queue = replace(QUEUE, retry_lane=True)
    lane = topic("q__retry__markers", message_timestamp_type="CreateTime")
    (found,) = check(facts(topic("q__retry"), lane, settings=queue, registered=RegisteredQueue(queue, 2)))
    assert (found.kind, found.to_do) == (
        Kind.CLIENT_TIMESTAMPS,
        "set message.timestamp.type=LogAppendTime on q__retry__markers",
    )


def test_a_queue_that_is_to_be_made_anew_gets_all_its_settings():
    queue = QueueSettings(
        name="q", late_acks=True, retry_lane=True, priorities=3, lane_share=0.5, retry_delays=("1s", "1m")
    )
    options = create_command(queue, {}, set()).partition("create q ")[2]
    assert options == "--priorities 3 --late-acks --retry-lane --set lane_share=0.5 --set retry_delays=1s,1m"


def test_what_is_wrong_with_the_topic_of_all_queues_settings():
    def kinds(found, error=None, queues=("q",)):
        return [one.kind for one in check_settings_topic(found, error, list(queues))]

    mirror = replace(topic("kmq.queues", partitions=1), config={"cleanup.policy": "compact"})
    assert kinds(mirror) == kinds(None, queues=()) == []
    assert kinds(None) == [Kind.SETTINGS_TOPIC_MISSING]
    assert kinds(None, AccessDenied("no")) == [Kind.SETTINGS_TOPIC_UNREADABLE]
    both = replace(mirror, partitions=2, config={"cleanup.policy": "delete"})
    assert kinds(both) == [Kind.SETTINGS_TOPIC_NOT_COMPACTED, Kind.SETTINGS_TOPIC_PARTITIONS]


def test_a_record_that_says_what_the_registry_says_is_fine_and_so_is_none_where_clients_guess_right():
    fine = Records(own={"q": QUEUE.with_topic_ids({name: f"id of {name}" for name in NAMES})})
    for records in (None, fine):
        assert [one.kind for one in check(facts(records=records))] == [Kind.OK]
    for markers, kind in (("jvm", Kind.OK), ("range", Kind.RECORD_MISSING)):
        queue = replace(QUEUE, markers=markers)
        told = facts(settings=queue, registered=RegisteredQueue(queue, 2), records=Records())
        assert [one.kind for one in check(told)] == [kind]
    assert check_records_of_no_queue(fine, ["q"], {}) == []
