"""Checks whether a damaged batch of records holds back those who read the queue's topics."""

from __future__ import annotations

from kmqpy.kafka.admin.facts import Facts, Faults
from kmqpy.kafka.admin.findings import Kind, Severity


def check_damage(facts: Facts) -> Faults:
    """Find damaged logs; see kmqpy.kafka.damaged_logs."""
    for one in facts.damaged:
        yield (
            Severity.ERROR,
            Kind.DAMAGED_LOG,
            f"{one.topic}, partition {one.partition}: nobody can read on from offset {one.offset}: {one.why}",
            'let another replica lead the partition, or skip the batch: docs/operations.md, "Damaged logs"',
        )
