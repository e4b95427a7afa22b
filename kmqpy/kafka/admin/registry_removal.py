"""Removes a queue from the registry: marks it, waits until its trackers let go, then deletes its znodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.core.pieces import pieces
from kmqpy.errors import ConfigError, QueueNotFound, TopicError, Unavailable
from kmqpy.kafka.admin.registry_entries import decode_queue, encode_queue, readable_part, shown
from kmqpy.kafka.admin.registry_requests import MAX_TRIES, RegistryRequests
from kmqpy.kafka.admin.znode_paths import parent_of
from kmqpy.kafka.settings import QueueSettings
from kmqpy.zookeeper.session import session_of, unavailable

log = logging.getLogger(__name__)

_POLL_S = 0.05
"""remove_queue() waits for this long before it looks again whether trackers still hold partitions."""
_MAX_OPS = 1_000
"""One ZooKeeper transaction deletes at most this many znodes: the server refuses requests of more than 1
MB."""


def remove_queue(
    requests: RegistryRequests, name: str, timeout: float, on_released: Callable[[], None]
) -> None:
    """Mark the queue as deleting, wait until its trackers let go, then delete its znodes.

    Trackers take no partition of a marked queue over. When no tracker holds a partition any more,
    remove_queue() calls `on_released`, then deletes the znodes. If others change znodes meanwhile, it tries
    again, and calls `on_released` again.

    Raises QueueNotFound if the queue is not registered. After `timeout` seconds, raises Unavailable, with a
    text that says which tracker holds which partition. Passes on errors of `on_released`. After an error the
    queue stays marked, and a second call goes on where this one ended.
    """
    deadline = SYSTEM_CLOCK.monotonic() + timeout
    czxid = mark_deleting(requests, name)
    while holders := _delete_znodes(requests, name, czxid, on_released):
        if SYSTEM_CLOCK.monotonic() >= deadline:
            raise Unavailable(
                f"queue {name!r} is marked as deleting, but after {timeout:g} s still held: "
                f"{', '.join(holders)}; run the removal again once they let go"
            )
        SYSTEM_CLOCK.sleep(_POLL_S)
    log.info("queue removed", extra={"queue": name})


def mark_deleting(requests: RegistryRequests, name: str) -> int:
    """Mark the queue, or lane, as deleting, unless it is marked. Returns the czxid of its znode.

    Raises TopicError for a lane that its queue names: somebody has added it again.

    The czxid is the id of the ZooKeeper transaction that created the znode: a queue that is registered later
    under the same name has another one.
    """
    with unavailable(requests.zk):
        for _ in range(MAX_TRIES):
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
            if settings.lane_of is not None:
                _check_unnamed(requests, transaction, settings)
            marked = encode_queue(settings, deleting=True)
            transaction.set_data(requests.paths.queue(name), marked, data[1].version)
            if requests.commit(transaction):
                return czxid
    raise Unavailable(f"queue {name!r} is changed by others all the time; try again")


def _check_unnamed(requests: RegistryRequests, transaction: Any, lane: QueueSettings) -> None:
    """Raise TopicError if the lane's queue names it; let the transaction fail if that changes meanwhile."""
    name = lane.queue_name
    data, _children = requests.raw(name)
    if data is None:
        return
    with suppress(ConfigError):
        queue, deleting = decode_queue(name, data[0])
        if not deleting and lane.name in queue.lane_names:
            raise TopicError(f"lane {lane.name!r} was added again; it is not removed")
    transaction.check(requests.paths.queue(name), data[1].version)


def _delete_znodes(
    requests: RegistryRequests, name: str, czxid: int, on_released: Callable[[], None]
) -> list[str]:
    """Delete the queue's znodes, if no tracker holds a partition; also znodes below that others made.

    Returns a text for each obstacle; none when the queue is gone. Does nothing if the queue's znode does not
    have this czxid: then another call has removed the queue that was marked.
    """
    top, partitions = requests.paths.queue(name), requests.paths.partitions(name)
    with unavailable(requests.zk):
        stats = requests.tree(top)
    if top not in stats or stats[top].czxid != czxid:
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
    on_released()
    with unavailable(requests.zk):
        paths = list(reversed(requests.tree(top)))
        # No tracker takes over a partition of a marked queue meanwhile. The queue's own znode goes last.
        done = all(_delete_together(requests, some) for some in pieces(paths, _MAX_OPS))
        gone = done or requests.wait(requests.zk.exists_async(top)) is None
    return [] if gone else ["its znodes are just being changed"]


def _delete_together(requests: RegistryRequests, paths: Iterable[str]) -> bool:
    """Delete these znodes in one transaction; False if others changed them first."""
    transaction = requests.zk.transaction()
    for path in paths:
        transaction.delete(path)
    return requests.commit(transaction)
