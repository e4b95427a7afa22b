"""Creates, describes, counts, checks and deletes queues. `Admin` and the registry need ZooKeeper."""
