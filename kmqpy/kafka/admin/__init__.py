"""Administers queues on Kafka: creates, describes, changes, counts, checks, purges and deletes them.

Most of this needs the registry of queues in ZooKeeper; `Admin` says which calls work without ZooKeeper.
"""
