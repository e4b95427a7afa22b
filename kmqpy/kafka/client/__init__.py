"""Sends, receives and acknowledges messages of queues on Kafka. Connects to Kafka only, not to ZooKeeper."""
