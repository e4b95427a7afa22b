"""Checks how long topics keep records (rule R9 of docs/rules.md).

Topics must keep records for longer than any lease or delay, and markers at least as long as their messages.
"""

from __future__ import annotations

from kmqpy.core.durations import DAY_MS
from kmqpy.kafka.admin.checks.advice import config_number, duration_text, set_advice
from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.retention import ample_retention_ms
from kmqpy.kafka.topic_names import dead_letter_queue

RESERVE_MS = DAY_MS
"""The doctor warns where a retention exceeds the longest lease or delay by less than this time, in ms.

Messages survive for this time while trackers or consumers are down."""


def check_retention(facts: Facts) -> Faults:
    """Find topics that delete records too early, or by their size."""
    # The markers topic is never advised a shorter retention than the queue topic has.
    queue = facts.settings
    longest, longest_text = queue.longest_ms, duration_text(queue.longest_ms)
    enough = ample_retention_ms(queue)
    of_queue = config_number(facts.topics.get(queue.name), "retention.ms")
    for name in (queue.name, queue.markers_topic):
        retention = config_number(facts.topics.get(name), "retention.ms")
        if retention is None or retention == -1:
            continue
        longer = enough
        if name == queue.markers_topic and of_queue is not None and _shorter(longer, of_queue):
            longer = of_queue
        to_do = set_advice("retention.ms", longer, name)
        if retention <= longest:
            what = (
                f"{name} keeps records for {duration_text(retention)}, but a message can be leased or "
                f"delayed for {longest_text}: it can be lost"
            )
            yield Severity.ERROR, Kind.RETENTION_TOO_SHORT, what, to_do
        elif retention < longest + RESERVE_MS:
            what = (
                f"{name} keeps records for {duration_text(retention)}: less than {duration_text(RESERVE_MS)} "
                f"more than the longest lease or delay ({longest_text}), too little for a longer standstill"
            )
            yield Severity.WARNING, Kind.RETENTION_WITHOUT_RESERVE, what, to_do
    dead = dead_letter_queue(queue)
    for name, its_markers in ((queue.name, queue.markers_topic), (dead.name, dead.markers_topic)):
        retention = config_number(facts.topics.get(name), "retention.ms")
        of_markers = config_number(facts.topics.get(its_markers), "retention.ms")
        if retention is not None and of_markers is not None and _shorter(of_markers, retention):
            what = (
                f"{its_markers} keeps records for a shorter time than {name}: "
                "finished messages can be redelivered"
            )
            to_do = set_advice("retention.ms", retention, its_markers)
            yield Severity.WARNING, Kind.MARKERS_RETENTION_SHORTER, what, to_do
    for name, topic in facts.topics.items():
        limit = config_number(topic, "retention.bytes")
        if limit is not None and limit != -1:
            what = f"{name} has retention.bytes={limit}: messages disappear when it is full, done or not"
            yield Severity.WARNING, Kind.RETENTION_BYTES, what, set_advice("retention.bytes", -1, name)


def _shorter(one: int, other: int) -> bool:
    """True if retention `one` is shorter than `other`; -1 stands for ever."""
    return one != -1 and (other == -1 or one < other)
