"""The numbers that Kafka's offsets, and all times in ms, stay within."""

INT64_MAX = 2**63 - 1
