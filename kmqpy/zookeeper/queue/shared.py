"""The settings of a ZkQueue, and what all its transactions share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from kazoo.client import KazooClient

from kmqpy.core.throttle import Throttle
from kmqpy.errors import ConfigError, KmqError
from kmqpy.zookeeper.multi_read import MultiReadProbe
from kmqpy.zookeeper.packets import MAX_PACKET_BYTES
from kmqpy.zookeeper.queue.candidates import Candidates
from kmqpy.zookeeper.queue.commit_records import CommitRecords
from kmqpy.zookeeper.queue.layout import QueuePaths, transactions_path
from kmqpy.zookeeper.queue.policies import AtLeastOnce, Policy
from kmqpy.zookeeper.queue.sessions import Reads, SessionWatch

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
"""A warning about the same item is logged at most once in this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZkQueueSettings:
    """The settings of a ZkQueue; all processes that share a queue should use the same settings.

    Args:
        root: The parent of all queues.
        policy: How often an item is handed out: AtLeastOnce, ConsumeTimes, ConsumeOnce, or a Policy of your
            own.
        policies: The policies of single queues, by name; all others have `policy`.
        strict_fifo: Whether no item is handed out while another transaction has an earlier item.
        session_timeout_ms: ZooKeeper removes the locks of a killed process after this many ms.
        max_packet_bytes: The jute.maxbuffer of the servers; a commit that is not a little smaller (see
            packets.py) raises MessageError.
    """

    root: str = "/zms"
    policy: Policy = field(default_factory=AtLeastOnce)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    strict_fifo: bool = False
    session_timeout_ms: int = 6_000
    max_packet_bytes: int = MAX_PACKET_BYTES

    def __post_init__(self) -> None:
        if not self.root.startswith("/") or self.root.endswith("/"):
            raise ConfigError(f"root: {self.root!r} must be the path of a znode, like /zms")
        _check_policy("policy", self.policy)
        if not isinstance(self.policies, Mapping):
            raise ConfigError(f"policies: {self.policies!r} must be a dict of queues and their policies")
        for queue, policy in self.policies.items():
            QueuePaths(self.root, queue)
            _check_policy(f"policies[{queue!r}]", policy)

    def policy_of(self, queue: str) -> Policy:
        """Return the policy of a queue.

        Args:
            queue: The queue's name.
        """
        return self.policies.get(queue, self.policy)


def _check_policy(name: str, policy: object) -> None:
    if isinstance(policy, type) or not isinstance(policy, Policy):
        raise ConfigError(
            f"{name}: {policy!r} is not a policy; give one like AtLeastOnce() or ConsumeTimes(3)"
        )


class SharedQueues:
    """The queues of one session, for all its transactions. Thread-safe.

    records  lends commit records
    """

    def __init__(self, zk: KazooClient, probe: MultiReadProbe, settings: ZkQueueSettings) -> None:
        self.settings = settings
        self.session = SessionWatch(zk)
        self.reads = Reads(self.session, probe)
        self.records = CommitRecords(zk, transactions_path(settings.root))
        self._mutex = threading.Lock()
        self._sources: dict[str, Candidates] = {}
        self._throttle = Throttle(_WARN_EVERY_S)

    def paths(self, queue: str) -> QueuePaths:
        """Return the paths of a queue's znodes.

        Args:
            queue: The queue's name.

        Raises:
            ConfigError: No queue can have this name.
        """
        return QueuePaths(self.settings.root, queue)

    def source(self, queue: str) -> Candidates:
        """Return the Candidates of a queue, which all threads share.

        Args:
            queue: The queue's name.
        """
        with self._mutex:
            if queue not in self._sources:
                self._sources[queue] = Candidates(self.session, self.paths(queue))
            return self._sources[queue]

    def warn_of_item(self, queue: str, error: KmqError) -> None:
        """Log, once a minute for each item, that it can't be taken.

        Args:
            queue: The queue's name.
            error: Names the item, and why.
        """
        if self._throttle.allows(str(error)):
            _log.warning("queue %s: an item can't be taken and stays: %s", queue, error)
