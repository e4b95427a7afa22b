"""Queues in ZooKeeper itself, for up to some 10,000s of messages.

open_storage() opens urls like `zookeeper://host:2181/kmqpy`.
"""

from __future__ import annotations

import re
from contextlib import ExitStack
from typing import Any

from kmqpy.core.durations import DAY_MS
from kmqpy.core.settings import convert
from kmqpy.errors import ConfigError
from kmqpy.queue import QueueUrl
from kmqpy.storages.stored_storage import URL_SETTINGS, StoredStorage
from kmqpy.telemetry.base import Telemetry
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity

_SECURITY_SETTINGS = ("scheme", "ca", "certificate", "key", "tls")
_STORAGE_SETTINGS = ("timeout_ms", "max_packet_bytes", *_SECURITY_SETTINGS)
_DEFAULT_ROOT = "/kmqpy"
_NOT_IN_PATHS = re.compile("[\0-\x1f\x7f-\x9f\ud800-\uf8ff\ufff0-\U0010ffff]")
"""Characters that ZooKeeper refuses in paths: controls, surrogates, private, special and beyond U+FFFF."""


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None) -> StoredStorage:
    """Open the storage of a url. The url's path is the znode above all others; default `/kmqpy`.

    - `timeout`: a failed request is repeated for up to this time, then Unavailable; default 10s
    - `max_packet_bytes`: the servers' jute.maxbuffer, if it is not ZooKeeper's default: the largest request
    - `scheme`, `tls`, `ca`, `certificate`, `key`: fields of ZooKeeperSecurity; the url holds user and
      password

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.

    Raises:
        ConfigError: An argument or setting is invalid.
        Unavailable: The storage does not answer.
        AccessDenied: The server refuses the login, or the operation.
    """
    from kmqpy.storages.zookeeper.engine import ZooKeeperEngine
    from kmqpy.storages.zookeeper.znodes import Znodes
    from kmqpy.zookeeper.multi_read import MultiReadProbe
    from kmqpy.zookeeper.session import connect

    url.refuse_unknown([*_STORAGE_SETTINGS, *URL_SETTINGS])
    root = url.path.rstrip("/") or _DEFAULT_ROOT
    is_bad = any(part in (".", "..", "zookeeper") for part in root.split("/"))
    if "//" in root or is_bad or _NOT_IN_PATHS.search(root):
        raise ConfigError(
            f"queue url: {url.path!r} is not the path of a znode; write it like zookeeper://host:2181/queues"
        )
    more: dict[str, Any] = {}
    if "max_packet_bytes" in url.settings:
        more["max_packet_bytes"] = convert("max_packet_bytes", url.settings["max_packet_bytes"], int)
        if not 2**18 <= more["max_packet_bytes"] < 2**31:
            raise ConfigError(
                f"max_packet_bytes: {more['max_packet_bytes']} is not from {2**18} to {2**31 - 1}"
            )
    timeout_s = convert("timeout_ms", url.settings.get("timeout_ms", "10s"), int) / 1000
    if not 0 < timeout_s <= DAY_MS / 1000:
        raise ConfigError("timeout_ms: it must be above 0, and at most a day")
    with ExitStack() as opened:
        probe = MultiReadProbe()
        zk = opened.enter_context(connect(_connection(url), timeout=timeout_s, greeting=probe))
        engine = ZooKeeperEngine(Znodes(zk, root, probe=probe, timeout_s=timeout_s, **more))
        engine.on_close(opened.pop_all().close)
    return StoredStorage(engine, telemetry=telemetry)


def _connection(url: QueueUrl) -> ZooKeeperConnection:
    given: dict[str, Any] = {name: url.settings[name] for name in _SECURITY_SETTINGS if name in url.settings}
    if "tls" in given:
        given["tls"] = convert("tls", given["tls"], bool)
    security = ZooKeeperSecurity(username=url.user or "", password=url.password or "", **given)
    return ZooKeeperConnection(hosts=url.address or "127.0.0.1:2181", security=security)
