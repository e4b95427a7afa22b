"""kmqpy: message-queue semantics for Apache Kafka."""
