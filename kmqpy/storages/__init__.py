"""Storages other than Kafka: an `Engine` each, under the one queue of `stored_queue`."""
