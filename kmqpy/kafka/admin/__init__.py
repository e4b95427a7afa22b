"""Creates, describes, checks and deletes queues. Needs ZooKeeper."""
