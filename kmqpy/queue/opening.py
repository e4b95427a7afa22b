"""Opens queues and storages by url: `queue_for(url)` opens a queue, `storage_for(url)` a storage.

The scheme of the url selects a function that opens the storage (an `OpenStorage`). `_STORAGES` lists the
schemes of kmqpy's own storages. Other packages add storages by entry points of the group `kmqpy.storages`:
the name of an entry point is the scheme, and its object is the function.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, cast

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError, KmqError, NotSupported
from kmqpy.queue.protocol import Queue
from kmqpy.queue.storage import QUEUE_SETTINGS, Storage
from kmqpy.queue.url import EXAMPLE, QueueUrl, parse_url, split
from kmqpy.telemetry.base import Telemetry

OpenStorage = Callable[[QueueUrl, Telemetry | None], Storage]
"""A function that opens the storage of a url; the telemetry may be None."""

_STORAGES = {
    "kafka": "kmqpy.kafka.storage:open_storage",
    "memory": "kmqpy.storages.memory:open_storage",
    **dict.fromkeys(("postgresql", "mariadb", "mysql", "sqlite"), "kmqpy.storages.sql.opening:open_storage"),
    "zookeeper": "kmqpy.storages.zookeeper:open_storage",
    **dict.fromkeys(("redis", "rediss", "valkey", "valkeys"), "kmqpy.storages.redis:open_storage"),
    **dict.fromkeys(("http", "https", "http+zk"), "kmqpy.storages.http:open_storage"),
}
"""The OpenStorage of each scheme, as `module:function`; imported when a url of the scheme is opened."""

_ENTRY_GROUP = "kmqpy.storages"
"""The group of entry points by which other packages add storages."""


def queue_for(url: str, *, telemetry: Telemetry | None = None) -> Queue:
    """Open the queue of `<storage url>?queue=<name>`, for example `kafka://h:9092,h2:9092?queue=q`.

    Further query parameters are settings of the storage and of the queue. For Kafka, the environment gives
    settings of the connection that the url leaves out (KMQ_CONFIG, KMQ_KAFKA_… and so on, as for
    KafkaConnection.from_environment). User, password and path are percent-decoded: `me:p%40ss%2Fw@db`.
    close() of the queue, or the end of its `with` block, also closes the storage.

    Args:
        url: The storage's url with `queue=` and settings; see the page of the storage.
        telemetry: Told of every event; default: none.

    Raises:
        ConfigError: For a wrong url or setting.
        NotSupported: For a scheme without a storage.
        QueueNotFound: There is no such queue.
        Unavailable: The storage does not answer.
        MissingExtra: A package is missing; the text says how to install it.
    """
    opener = _find_opener(split(url).scheme)
    parsed = parse_url(url)
    storage = _open_checked(opener, parsed, telemetry)
    try:
        return storage.open_url(parsed)
    except BaseException:
        storage.close()
        raise


def storage_for(url: str, *, telemetry: Telemetry | None = None, engine: Any = None) -> Storage:
    """Open the storage of `<storage url>`: the url of a queue without `queue=` and the settings of the queue.

    Args:
        url: The storage's url, without `queue=`.
        telemetry: Told of every event of the queues; default: none.
        engine: An SQLAlchemy engine of the application, which connects to the database; the url then names no
            server, as in `postgresql:` or `sqlite:?prefix=jobs_`. The storage opens connections of its own as
            the engine does, keeps them in a pool of its own, and closes them; the engine stays open. For
            `redis:`, a `redis.Redis` or a `ConnectionPool` of redis-py in the same way.

    Raises:
        KmqError: As queue_for(), and ConfigError for an engine of another kind.
    """
    opener: Any = _find_opener(split(url).scheme)
    if engine is not None:
        if "engine" not in inspect.signature(opener).parameters:
            raise ConfigError(
                f"engine: the storage of {split(url).scheme}: is neither an SQL database nor Redis"
            )
        opener = functools.partial(opener, engine=engine)
    parsed = parse_url(url, names_queue=False)
    for name in parsed.settings:
        if name in QUEUE_SETTINGS:
            raise ConfigError(f"queue url: {name} is a setting of a queue; give it to Storage.create()")
    return _open_checked(opener, parsed, telemetry)


def _open_checked(opener: OpenStorage, url: QueueUrl, telemetry: Telemetry | None) -> Storage:
    try:
        storage = opener(url, telemetry)
    except KmqError:
        raise
    except Exception as error:  # from a storage of another package, or a library of a storage
        raise ConfigError(
            f"queue url: the storage for {url.scheme}: can't be opened: {type(error).__name__}"
        ) from error
    if not hasattr(storage, "open_url") or not hasattr(storage, "close"):
        raise ConfigError(
            f"queue url: what opens {url.scheme}: returned an object of type {type(storage).__name__}, which "
            "is not a Storage"
        )
    return storage


def _find_opener(scheme: str) -> OpenStorage:
    if scheme in _STORAGES:
        return cast("OpenStorage", _load_function(_STORAGES[scheme]))
    import importlib.metadata  # imported here: it takes longer to import than kmqpy.queue

    others: dict[str, importlib.metadata.EntryPoint] = {}
    for one in importlib.metadata.entry_points(group=_ENTRY_GROUP):
        others.setdefault(one.name.lower(), one)  # schemes of urls are lower-case, too
    if scheme in others:
        return _load_entry_point(others[scheme])
    hint = nearest(scheme, [*_STORAGES, *others]) or f"; {EXAMPLE}"
    raise NotSupported(f"queue url: there is no storage for {scheme}:{hint}")


def _load_entry_point(entry_point: Any) -> OpenStorage:
    """Import the function of an entry point of any installed package; raises ConfigError with its name."""
    named = f"storage {entry_point.name!r}: the entry point {entry_point.value!r} of the group {_ENTRY_GROUP}"
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


def _load_function(target: str) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)
