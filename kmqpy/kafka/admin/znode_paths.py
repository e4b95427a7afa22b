"""Where the znodes of the registry are. Pure: no I/O."""

from __future__ import annotations


class ZnodePaths:
    """The znodes under `root`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.queues = f"{root}/queues"
        self.trackers = f"{root}/trackers"
        self.jobs = f"{root}/jobs"

    def queue(self, name: str) -> str:
        """Settings."""
        return f"{self.queues}/{name}"

    def partitions(self, name: str) -> str:
        """The parent of all partitions."""
        return f"{self.queues}/{name}/partitions"

    def partition(self, name: str, partition: int) -> str:
        """The parent of leader and offset."""
        return f"{self.queues}/{name}/partitions/{partition}"

    def leader(self, name: str, partition: int) -> str:
        """The znode that names the tracker of the partition."""
        return f"{self.queues}/{name}/partitions/{partition}/leader"

    def offset(self, name: str, partition: int) -> str:
        """The safe markers offset."""
        return f"{self.queues}/{name}/partitions/{partition}/offset"

    def tracker(self, tracker_id: str) -> str:
        """A member."""
        return f"{self.trackers}/{tracker_id}"

    def job(self, job_id: str) -> str:
        """A job that runs trackers on Spark."""
        return f"{self.jobs}/{job_id}"


def parent_of(path: str) -> str:
    """The path of the znode above."""
    return path.rpartition("/")[0]
