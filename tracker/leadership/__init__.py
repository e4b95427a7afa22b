"""Which tracker looks after which partition, and the offsets they store in ZooKeeper."""
