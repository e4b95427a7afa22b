"""`queue_for(url)` opens a queue, `storage_for(url)` a storage.

A storage is a module with a function that takes a `QueueUrl` and a telemetry; the table below says which
scheme is whose. Storages of others are found by the entry-point group `kmqpy.storages`: the name of the entry
point is the scheme, its object a function as in `_STORAGES`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, cast

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, KmqError, NotSupported
from kmqpy.queue.protocol import Queue
from kmqpy.queue.storage import QUEUE_SETTINGS, Storage
from kmqpy.queue.url import EXAMPLE, QueueUrl, parse_url, split
from kmqpy.telemetry.base import Telemetry

OpenStorage = Callable[[QueueUrl, Telemetry | None], Storage]
"""The function that an entry point of the group `kmqpy.storages` names."""

_STORAGES = {
    "kafka": "kmqpy.kafka.storage:open_storage",
    "memory": "kmqpy.storages.memory:open_storage",
    **dict.fromkeys(("postgresql", "mariadb", "sqlite"), "kmqpy.storages.sql.opening:open_storage"),
    "zookeeper": "kmqpy.storages.zookeeper:open_storage",
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "kmqpy.storages.redis:open_storage"),
}
"""Scheme to `module:function`, an OpenStorage; imported when a queue of the scheme is opened."""

_PLANNED = ("http", "https")
"""Schemes that are kept for storages to come."""

_GROUP = "kmqpy.storages"


def queue_for(url: str, *, telemetry: Telemetry | None = None) -> Queue:
    """Open the queue of `<storage url>?queue=<name>`, for example `kafka://h:9092,h2:9092?queue=q`.

    Further query parameters are settings of the storage and of the queue. For Kafka, what they do not say of
    the connection is what the environment says (KMQ_CONFIG, KMQ_KAFKA_… and the like, as for
    KafkaConnection.from_environment). A user, a password and the path are percent-decoded:
    `me:p%40ss%2Fw@db`. Close the queue, which closes its storage, or use it in a `with`.

    Raises ConfigError for a url or setting that is wrong, NotSupported for a scheme without a
    storage, and what opening the storage raises (QueueNotFound, Unavailable, MissingExtra).
    """
    opener = _opener(split(url).scheme)
    parsed = parse_url(url)
    storage = _opened(opener, parsed, telemetry)
    try:
        return storage.open_url(parsed)
    except BaseException:
        storage.close()
        raise


def storage_for(url: str, *, telemetry: Telemetry | None = None) -> Storage:
    """Open the storage of a url, which is that of a queue without `queue=` and the settings of a queue.

    Raises as queue_for does.
    """
    opener = _opener(split(url).scheme)
    parsed = parse_url(url, names_queue=False)
    for name in parsed.settings:
        if name in QUEUE_SETTINGS:
            raise ConfigError(f"queue url: {name} is a setting of a queue; give it to Storage.create()")
    return _opened(opener, parsed, telemetry)


def _opened(opener: OpenStorage, url: QueueUrl, telemetry: Telemetry | None) -> Storage:
    try:
        storage = opener(url, telemetry)
    except KmqError:
        raise
    except Exception as error:  # of a storage of others, or of what it uses
        raise ConfigError(
            f"queue url: the storage for {url.scheme}: can't be opened: {type(error).__name__}"
        ) from error
    if not hasattr(storage, "open_url") or not hasattr(storage, "close"):
        raise ConfigError(
            f"queue url: what opens {url.scheme}: returned an object of type {type(storage).__name__}, which "
            "is no Storage"
        )
    return storage


def _opener(scheme: str) -> OpenStorage:
    if scheme in _STORAGES:
        return cast("OpenStorage", _load(_STORAGES[scheme]))
    import importlib.metadata  # here, since loading it takes longer than all of this package

    others: dict[str, importlib.metadata.EntryPoint] = {}
    for one in importlib.metadata.entry_points(group=_GROUP):
        others.setdefault(one.name.lower(), one)  # as urls have it, where the case of a scheme says nothing
    if scheme in others:
        return _loaded(others[scheme])
    if scheme in _PLANNED:
        raise NotSupported(f"queue url: there is no storage for {scheme}: yet")
    hint = nearest(scheme, [*_STORAGES, *_PLANNED, *others]) or f"; {EXAMPLE}"
    raise NotSupported(f"queue url: there is no storage for {scheme}:{hint}")


def _loaded(entry_point: Any) -> OpenStorage:
    """The object of an entry point, which anybody can have installed; raises ConfigError that names it."""
    named = f"storage {entry_point.name!r}: the entry point {entry_point.value!r} of the group {_GROUP}"
    try:
        found = entry_point.load()
    except KmqError:  # a missing extra, for example
        raise
    except Exception as error:
        raise ConfigError(f"{named} can't be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(
            f"{named} is of type {type(found).__name__}; it must be a function that opens a Storage"
        )
    return cast("OpenStorage", found)


def _load(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
