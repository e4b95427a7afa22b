"""Checks whether a transaction that nobody ends holds back the readers of the queue's topics."""

from __future__ import annotations

from datetime import UTC, datetime

from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity


def check_hanging(facts: Facts) -> Faults:
    """Find hanging transactions; see kmqpy.kafka.hanging."""
    for one in facts.hanging:
        own = facts.own_hanging.get(one.place)
        # Whoever replays old records may write their times into a transaction of now.
        doubtful = own is None and one.told_by_producer
        which = "an open transaction" if doubtful else "a transaction that nobody ends"
        clock = " by the clock of its producer" if doubtful else ""
        since = datetime.fromtimestamp(one.since_ms / 1000, UTC)
        what = (
            f"{one.topic}, partition {one.partition}: {which} has held back readers at offset {one.offset} "
            f"since {since:%Y-%m-%d %H:%M:%S} UTC{clock}; about {one.waiting} records wait"
        )
        tool = f"kafka-transactions.sh --bootstrap-server {facts.bootstrap}"
        place = f"--topic {one.topic} --partition {one.partition}"
        abort = f"`{tool} abort {place} --start-offset {one.offset}`"
        describe = f"`{tool} describe-producers {place}` shows"
        if doubtful:
            to_do = (
                f"{describe} which producer has written it; if that is at work, leave it. Otherwise {abort} "
                "ends it and drops its records"
            )
        elif own is None:
            to_do = f"{abort} ends it and drops its records; {describe} its producer id"
        elif not own.may_be_ended:
            to_do = (
                "do not abort it: that would lose its copies, whose originals are finished. The next "
                f"redelivery by {own.transactional_id} commits it; {describe} its producer id"
            )
        else:
            drawback = "; then what it has copied is copied a second time" if own.commits else ""
            to_do = (
                f"`kmq doctor {facts.settings.name} --fix` ends it if {own.transactional_id} has written it. "
                f"Else, or if Kafka has forgotten that id, {describe} which producer has; if that is at "
                f"work, leave it, otherwise {abort} ends it{drawback}"
            )
        yield Severity.ERROR, Kind.HANGING_TRANSACTION, what, to_do
