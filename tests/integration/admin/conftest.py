"""An Admin in a root of its own for each test, or in that of a LiveQueue."""

import pytest

from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.settings import KafkaConnection


@pytest.fixture
def connection(cluster, queue_name):
    return KafkaConnection(bootstrap=cluster.bootstrap, root=f"/kmq-{queue_name}")


@pytest.fixture
def admin(connection, zookeeper):
    with Admin(connection, zookeeper) as admin:
        yield admin


@pytest.fixture
def admin_of():
    """`admin_of(queue)`: an Admin in the root of a LiveQueue."""
    import contextlib

    with contextlib.ExitStack() as admins:
        yield lambda queue: admins.enter_context(Admin(queue.connection, queue.zookeeper))
