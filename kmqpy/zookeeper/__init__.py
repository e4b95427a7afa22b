"""ZooKeeper: sessions, their security, and queues whose items are znodes."""
