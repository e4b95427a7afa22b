"""Findings about the registry in ZooKeeper: unusable znodes, and settings of queues that can't be read."""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.kafka.admin.findings import Finding, Kind, Severity
from kmqpy.kafka.admin.unusable_znodes import UnusableZnode


def unusable_znodes(name: str, found: Iterable[UnusableZnode]) -> list[Finding]:
    """Return a finding for each unusable znode; `name` is the queue, or what else the znodes belong to."""
    to_do = "`kmq doctor --fix` removes it"
    kind = Kind.UNUSABLE_ZNODE
    return [Finding(Severity.WARNING, name, kind, f"{one.path}: {one.why}", to_do) for one in found]


def unreadable_settings(name: str, error: Exception) -> Finding:
    """Return the finding for a queue whose settings in the registry can't be read."""
    what = f"its settings in the registry can't be read, so trackers may not serve it: {error}"
    to_do = (
        f"`kmq queue create {name}` writes them anew, with what can be read of them; look at the result with "
        f"`kmq queue describe {name}`"
    )
    return Finding(Severity.ERROR, name, Kind.UNREADABLE_SETTINGS, what, to_do)
