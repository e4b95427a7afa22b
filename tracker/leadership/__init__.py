"""Decides which tracker owns which partition, and stores the partitions' offsets; both in ZooKeeper."""
