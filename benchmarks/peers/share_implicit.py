"""Share groups of Kafka with implicit acknowledgement: the poll for the next batch acknowledges a batch."""

from typing import Any

from benchmarks.peers.share_group import ShareGroup


def connect(options: dict[str, Any]) -> ShareGroup:
    return ShareGroup(options, explicit=False)
