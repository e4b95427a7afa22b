"""Queues on storages other than Kafka: each storage implements `Engine`, StoredQueue works over each."""
