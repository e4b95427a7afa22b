"""Container znodes: ZooKeeper removes them when their last child is gone; kazoo has no call for them."""

from __future__ import annotations

from typing import Any

from kazoo.client import KazooClient
from kazoo.exceptions import NodeExistsError, NoNodeError, UnimplementedError
from kazoo.protocol.serialization import Create2
from kazoo.security import OPEN_ACL_UNSAFE

_CONTAINER = 4
"""The flag of the create mode."""


class _CreateContainer(Create2):  # type: ignore[misc]  # kazoo ships no types
    """Create2 under the operation code of containers; the answer is the same."""

    type = 19


def create_container(zk: KazooClient, path: str) -> None:
    """Make one container; an ordinary znode where the server knows no containers (before 3.5.3).

    Raises what zk.create() does.
    """
    acl = zk.default_acl or OPEN_ACL_UNSAFE
    result: Any = zk.handler.async_result()
    zk._call(_CreateContainer((zk.chroot or "") + path, b"", acl, _CONTAINER), result)
    try:
        result.get()
    except UnimplementedError:
        zk.create(path)


def ensure_path(zk: KazooClient, path: str) -> None:
    """Make an ordinary znode, and its missing parents as containers; nothing if it is there.

    ZooKeeper may remove an empty container between two steps; then they start again.
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
