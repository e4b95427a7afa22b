"""`queue_for(url)` opens a queue, `storage_for(url)` a storage.

A storage is a module with a function that takes a `QueueUrl` and a telemetry; the tables below say which
scheme is whose. Storages of others are found by the entry-point group `kmqpy.storages`: the name of the entry
point is the scheme, its object a function as in `_STORAGES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, NotSupported
from kmqpy.queue.protocol import Queue
from kmqpy.queue.storage import Storage
from kmqpy.queue.url import EXAMPLE, QueueUrl, parse_url, split
from kmqpy.telemetry.base import Telemetry

OpenStorage = Callable[[QueueUrl, Telemetry | None], Storage]
"""What an entry point of the group `kmqpy.storages` is."""

_SQL = "kmqpy.storages.sql.opening:open_storage"
_STORAGES = {
    "memory": "kmqpy.storages.memory:open_storage",
    "postgresql": _SQL,
    "mariadb": _SQL,
    "sqlite": _SQL,
}
"""Scheme to `module:function`, an OpenStorage; imported when a queue of the scheme is opened."""

_QUEUES = {"kafka": "kmqpy.kafka.queue:open_queue"}
"""The same for what has no Storage yet: the function returns the Queue."""

_PLANNED = ("zookeeper", "redis", "http", "https")
"""Schemes that are kept for storages to come."""

_GROUP = "kmqpy.storages"


def queue_for(url: str, *, telemetry: Telemetry | None = None) -> Queue:
    """Open the queue of `<storage url>?queue=<name>`, for example `kafka://h:9092,h2:9092?queue=q`.

    Further query parameters are settings of the storage and of the queue. For Kafka, what they do not say of
    the connection is what the environment says (KMQ_CONFIG, KMQ_KAFKA_… and the like, as for
    KafkaConnection.from_environment). Other storages open a StorageQueue, which closes its storage when it is
    closed. A user, a password and the path are percent-decoded: `me:p%40ss%2Fw@db`. Close the queue, or use
    it in a `with`.

    Raises ConfigError for a url or setting that is wrong, NotSupported for a scheme without a
    storage, and what opening the storage raises (QueueNotFound, Unavailable, MissingExtra).
    """
    scheme = split(url).scheme
    if scheme not in _QUEUES:
        storage = _opener(scheme)(parsed := parse_url(url), telemetry)
        try:
            return storage.open_url(parsed)
        except BaseException:
            storage.close()
            raise
    parsed = parse_url(url)
    if parsed.user is not None:
        raise ConfigError(f"queue url: a {scheme}: url has no user; {EXAMPLE}")
    open_queue: Callable[[QueueUrl, Telemetry | None], Queue] = _load(_QUEUES[scheme])
    return open_queue(parsed, telemetry)


def storage_for(url: str, *, telemetry: Telemetry | None = None) -> Storage:
    """Open the storage of a url, which is that of a queue without `queue=`; raises as queue_for does."""
    scheme = split(url).scheme
    if scheme in _QUEUES:
        raise NotSupported(f"queue url: {scheme}: has queues only; use queue_for, or kmqpy.Admin")
    return _opener(scheme)(parse_url(url, names_queue=False), telemetry)


def _opener(scheme: str) -> OpenStorage:
    if scheme in _STORAGES:
        return cast("OpenStorage", _load(_STORAGES[scheme]))
    import importlib.metadata  # here, since loading it takes longer than all of this package

    others = importlib.metadata.entry_points(group=_GROUP)
    if scheme in others.names:
        return cast("OpenStorage", others[scheme].load())
    if scheme in _PLANNED:
        raise NotSupported(f"queue url: there is no storage for {scheme}: yet")
    hint = nearest(scheme, [*_QUEUES, *_STORAGES, *_PLANNED, *others.names]) or f"; {EXAMPLE}"
    raise NotSupported(f"queue url: there is no storage for {scheme}:{hint}")


def _load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
