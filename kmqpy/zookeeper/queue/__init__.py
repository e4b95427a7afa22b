"""Queues in ZooKeeper with a unit of work: one commit takes N items and puts K, over several queues."""

from kmqpy.zookeeper.queue.dead_letters import DeadItem, DeadItems
from kmqpy.zookeeper.queue.listener import Listener, MessageConsumer
from kmqpy.zookeeper.queue.policies import AtLeastOnce, ConsumeOnce, ConsumeTimes, Meta, Policy, Refusal
from kmqpy.zookeeper.queue.queue import ZkQueue, ZkQueueStats
from kmqpy.zookeeper.queue.shared import ZkQueueSettings
from kmqpy.zookeeper.queue.takes import Item
from kmqpy.zookeeper.queue.transaction import Transaction, TransactionOutcome

__all__ = [
    "AtLeastOnce",
    "ConsumeOnce",
    "ConsumeTimes",
    "DeadItem",
    "DeadItems",
    "Item",
    "Listener",
    "MessageConsumer",
    "Meta",
    "Policy",
    "Refusal",
    "Transaction",
    "TransactionOutcome",
    "ZkQueue",
    "ZkQueueSettings",
    "ZkQueueStats",
]
