"""Sends, receives and acknowledges messages. Needs Kafka only."""
