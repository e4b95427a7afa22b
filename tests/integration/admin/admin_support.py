"""What tests of the administration share."""

from kmqpy.kafka.admin.findings import Severity


def store(queue, offset):
    """Write the stored offset of partition 0, as a tracker does."""
    from kmqpy.zookeeper.session import connect

    with connect(queue.zookeeper) as zk:
        path = f"{queue.connection.root}/queues/{queue.name}/partitions/0/offset"
        if zk.exists(path):
            zk.set(path, offset.to_json())
        else:
            zk.create(path, offset.to_json())


def errors(findings):
    return [one.what for one in findings if one.severity is Severity.ERROR]


def warnings(findings):
    # With one broker every topic has one replica only.
    return [
        one.what for one in findings if one.severity is Severity.WARNING and "one replica" not in one.what
    ]
