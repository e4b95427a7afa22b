"""The queue on Kafka."""
