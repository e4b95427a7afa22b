"""Queues on Kafka."""
