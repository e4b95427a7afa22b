"""ZooKeeper: sessions and how they are secured."""
