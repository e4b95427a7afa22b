"""An Admin in the root of a LiveQueue."""

import contextlib

import pytest

from kmqpy.kafka.admin.admin import Admin


@pytest.fixture
def admin_of():
    """Open it: `admin_of(queue)`."""
    with contextlib.ExitStack() as admins:
        yield lambda queue: admins.enter_context(Admin(queue.connection, queue.zookeeper))
