"""Queues in ZooKeeper with a unit of work: N items taken and K put, over several queues, in one commit."""

from kmqpy.zookeeper.queue.dead_letters import DeadLetter, DeadLetters
from kmqpy.zookeeper.queue.listener import Listener, MessageConsumer
from kmqpy.zookeeper.queue.policies import AtLeastOnce, ConsumeOnce, ConsumeTimes
from kmqpy.zookeeper.queue.queue import ZkQueue, ZkQueueSettings
from kmqpy.zookeeper.queue.takes import Item
from kmqpy.zookeeper.queue.transaction import Outcome, Transaction

__all__ = [
    "AtLeastOnce",
    "ConsumeOnce",
    "ConsumeTimes",
    "DeadLetter",
    "DeadLetters",
    "Item",
    "Listener",
    "MessageConsumer",
    "Outcome",
    "Transaction",
    "ZkQueue",
    "ZkQueueSettings",
]
