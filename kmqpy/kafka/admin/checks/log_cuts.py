"""Checks whether logs of the queue topic were cut back (rule R39 of docs/rules.md)."""

from __future__ import annotations

from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity
from kmqpy.kafka.markers.log_cuts import NO_CUTS


def check_log_cuts(facts: Facts) -> Faults:
    """Find logs that were cut back, as long as retention has not deleted the place of the cut."""
    topic = facts.settings.name
    for partition in sorted(facts.queue_log):
        noticed = facts.noticed_cuts(partition)
        unnoticed = noticed.new_in(facts.new_cuts.get(partition, NO_CUTS))
        for cut in (*noticed.cuts, *unnoticed):
            if cut.start < facts.queue_log.get(partition, (0, 0))[0]:
                continue
            what = (
                f"{topic}, partition {partition}: its log was cut back to offset {cut.start}; what stood "
                "from there on is lost"
            )
            if cut in unnoticed:
                what += ". Neither a client nor a tracker has noticed that yet"
            to_do = (
                "nothing for kmqpy, which delivers what the log has now. See why Kafka lost records: all "
                "replicas without power, or an election of one that was behind; look at "
                f"unclean.leader.election.enable, min.insync.replicas and flush.messages of {topic}. This is "
                "told until retention has deleted the first message behind the cut"
            )
            yield Severity.WARNING, Kind.LOG_CUT, what, to_do
