"""Creates container znodes, which ZooKeeper removes with their last child; kazoo has no method for that."""

from __future__ import annotations

from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import Create2
from kazoo.security import OPEN_ACL_UNSAFE

_CONTAINER_MODE = 4
"""The create mode of containers, as it stands in the flags of a request."""


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo ships no types
    """The request that creates a container: Create2 with another operation code; the answer is the same."""

    type = 19


def create_container(zk: KazooClient, path: str) -> None:
    """Create one container, or an ordinary znode if the server knows no containers (ZooKeeper before 3.5.3).

    Raises the errors of zk.create().
    """
    acl = zk.default_acl or OPEN_ACL_UNSAFE
    result: Any = zk.handler.async_result()
    zk._call(_CreateContainer((zk.chroot or "") + path, b"", acl, _CONTAINER_MODE), result)
    try:
        result.get()
    except UnimplementedError:
        zk.create(path)


def ensure_path(zk: KazooClient, path: str) -> None:
    """Create an ordinary znode and, as containers, its missing parents; do nothing if the znode exists.

    ZooKeeper may remove an empty container before it gets its child; ensure_path() creates it again then.
    """
    while True:
        try:
            zk.create(path)
        except NodeExistsError:
            return
        except NoNodeError:
            _ensure_container(zk, path.rpartition("/")[0])
        else:
            return


def _ensure_container(zk: KazooClient, path: str) -> None:
    try:
        create_container(zk, path)
    except NodeExistsError:
        return
    except NoNodeError:
        _ensure_container(zk, path.rpartition("/")[0])
        _ensure_container(zk, path)
