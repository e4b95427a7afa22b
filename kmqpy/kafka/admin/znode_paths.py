"""The paths of the registry's znodes; `registry` says what they hold. Pure: no I/O."""

from __future__ import annotations


class ZnodePaths:
    """The paths of the znodes under `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.queues = f"{root}/queues"
        self.trackers = f"{root}/trackers"
        self.jobs = f"{root}/jobs"

    def queue(self, name: str) -> str:
        """The znode with the settings of the queue."""
        return f"{self.queues}/{name}"

    def partitions(self, name: str) -> str:
        """The parent of the znodes of all partitions."""
        return f"{self.queues}/{name}/partitions"

    def partition(self, name: str, partition: int) -> str:
        """The parent of the partition's leader and offset znodes."""
        return f"{self.queues}/{name}/partitions/{partition}"

    def leader(self, name: str, partition: int) -> str:
        """The znode with the id of the tracker that has the partition."""
        return f"{self.queues}/{name}/partitions/{partition}/leader"

    def offset(self, name: str, partition: int) -> str:
        """The znode with the markers offset from which the partition's next tracker reads."""
        return f"{self.queues}/{name}/partitions/{partition}/offset"

    def tracker(self, tracker_id: str) -> str:
        """The znode of a running tracker."""
        return f"{self.trackers}/{tracker_id}"

    def job(self, job_id: str) -> str:
        """The znode of a job that runs trackers on Spark."""
        return f"{self.jobs}/{job_id}"


def parent_of(path: str) -> str:
    """Return the path of the znode above `path`."""
    return path.rpartition("/")[0]
