"""Taking a queue out of the registry: it is marked, its trackers let go, then its znodes are deleted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kmqpy.core.clock import Clock
from kmqpy.errors import ConfigError, QueueNotFound, Unavailable
from kmqpy.kafka.admin.registry_entries import decode_queue, encode_queue, readable_part, shown
from kmqpy.kafka.admin.registry_requests import ATTEMPTS, RegistryRequests
from kmqpy.kafka.admin.znode_paths import parent_of
from kmqpy.zookeeper.session import session_of, unavailable

log = logging.getLogger(__name__)

POLL_S = 0.05
TOGETHER = 1_000  # znodes deleted in one ZooKeeper transaction: the server takes 1 MB


def remove_queue(
    requests: RegistryRequests, name: str, timeout: float, released: Callable[[], None], clock: Clock
) -> None:
    """Mark the queue as deleting, wait until its trackers let go, then remove it.

    `released` is called in between, when no tracker has the queue and none can take it any more.

    Raises QueueNotFound, or after `timeout` s Unavailable, saying who holds which partition, or what
    `released` raises; the mark stays then, and a second call goes on.
    """
    deadline = clock.monotonic() + timeout
    marked = _mark_deleting(requests, name)
    while holders := _delete_znodes(requests, name, marked, released):
        if clock.monotonic() >= deadline:
            raise Unavailable(
                f"queue {name!r} is marked as deleting, but after {timeout:g} s still held: "
                f"{', '.join(holders)}; run the removal again once they let go"
            )
        clock.sleep(POLL_S)
    log.info("queue removed", extra={"queue": name})


def _mark_deleting(requests: RegistryRequests, name: str) -> int:
    """Mark the queue; returns the czxid of its znode, which no queue made later under the name has."""
    with unavailable(requests.zk):
        for _ in range(ATTEMPTS):
            data, _children = requests.raw(name)
            if data is None:
                raise QueueNotFound(f"queue {name!r} is not registered")
            try:
                settings, deleting = decode_queue(name, data[0])
            except ConfigError:
                settings, deleting = readable_part(name, data[0]), False
            czxid: int = data[1].czxid
            if deleting:
                return czxid
            transaction = requests.zk.transaction()
            marked = encode_queue(settings, deleting=True)
            transaction.set_data(requests.paths.queue(name), marked, data[1].version)
            if requests.commit(transaction):
                return czxid
    raise Unavailable(f"queue {name!r} is changed by others all the time; try again")


def _delete_znodes(
    requests: RegistryRequests, name: str, marked: int, released: Callable[[], None]
) -> list[str]:
    """Remove the queue's znodes, whoever made them; returns who or what prevents it, empty when done.

    Does nothing where the znode is not the one that was marked: another call has removed that.
    """
    top, partitions = requests.paths.queue(name), requests.paths.partitions(name)
    with unavailable(requests.zk):
        stats = requests.tree(top)
    if top not in stats or stats[top].czxid != marked:
        return []
    held = [
        path.split("/")[-2]
        for path, stat in stats.items()
        if session_of(stat) is not None
        and path.endswith("/leader")
        and parent_of(parent_of(path)) == partitions
    ]
    if held:
        leaders = requests.data(held, lambda number: f"{partitions}/{number}/leader")
        leaders.sort(key=lambda found: (len(found[0]), found[0]))
        return [f"partition {number} by {shown(data)}" for number, data, _ in leaders] or [
            "by trackers that are just letting go"
        ]
    released()
    with unavailable(requests.zk):
        paths = list(reversed(requests.tree(top)))
        # Marked as deleting, no tracker takes it over meanwhile; the queue's own znode goes last.
        done = all(
            _delete_together(requests, paths[i : i + TOGETHER]) for i in range(0, len(paths), TOGETHER)
        )
        gone = done or requests.wait(requests.zk.exists_async(top)) is None
    return [] if gone else ["its znodes are just being changed"]


def _delete_together(requests: RegistryRequests, paths: Iterable[str]) -> bool:
    transaction = requests.zk.transaction()
    for path in paths:
        transaction.delete(path)
    return requests.commit(transaction)
