"""Queues behind a gateway: open_storage() opens `http://host:8080`, or https, also of several gateways.

`http+zk://zk1:2181` finds them in ZooKeeper.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kmqpy.core.settings import check_addresses, convert
from kmqpy.errors import ConfigError, MissingExtra
from kmqpy.queue import QueueUrl
from kmqpy.storages.stored_storage import URL_SETTINGS
from kmqpy.storages.tls import TLS_SETTINGS, tls_of
from kmqpy.telemetry.base import Telemetry

if TYPE_CHECKING:
    from kmqpy.storages.http.discovery import Discovery
    from kmqpy.storages.http.storage import RemoteStorage

KEY_VARIABLE = "KMQ_API_KEY"
_STORAGE_SETTINGS = ("api_key", "timeout_ms")
_TIMEOUT_MS = 10_000


def open_storage(url: QueueUrl, telemetry: Telemetry | None = None) -> RemoteStorage:
    """Open the queues of a gateway: `http://host:8080`, or `https://one:8443,two:8443` of several.

    Several gateways are of the same storage: a call goes to the next one when one does not answer. A path
    in the url stands before all paths, where a proxy needs it.

    `http+zk://zk1:2181,zk2:2181?cluster_name=prod` finds the gateways that `kmq gateway --discovery zk1:2181
    --cluster-name prod` registers there, again whenever none answers; users and TLS of ZooKeeper are those of
    the environment, as for ZooKeeperConnection.

    - `api_key`: the key that `kmq key create` has made; default: the environment's KMQ_API_KEY
    - `timeout`: a failed call is repeated for up to this time, then Unavailable; default 10s. Of a send whose
      answer was lost nobody knows whether it happened: it is repeated only if all its messages have dedup
      ids, else it raises UnknownOutcome
    - `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_verify`: with https; see Tls
    - `cluster_name`: with http+zk; default: none

    Queues can what those of the gateway's storage can, but there are no transactions, and queues with
    `delivery="at-most-once"` can't be opened: they need the message itself to put it back. `receipt()` is
    a request. A look shows at most 10,000 messages, or 16 MiB of bodies.

    Args:
        url: What parse_url() returned.
        telemetry: Told of every event of the queues; default: none.

    Raises:
        ConfigError: An argument or setting is invalid.
        MissingExtra: A package is missing; the text says how to install it.
        Unavailable: The storage does not answer.
        AccessDenied: The server refuses the login, or the operation.
    """
    secure = url.scheme == "https"
    found = url.scheme == "http+zk"
    more = [*(TLS_SETTINGS if secure or found else ()), *(["cluster_name"] if found else ())]
    url.refuse_unknown([*_STORAGE_SETTINGS, *more, *URL_SETTINGS])
    if url.user is not None:
        raise ConfigError(f"queue url: a gateway knows no users; give its key as {KEY_VARIABLE}, or api_key=")
    example = f"{url.scheme}://host:{2181 if found else 8080}"
    check_addresses(url.address, "queue url", example)
    hosts = [host for host in map(str.strip, url.address.split(",")) if host]
    if not hosts or any("/" in host for host in hosts):
        raise ConfigError(
            f"queue url: {url.address!r} is not the address of a gateway; write it like {example}"
        )
    key = url.settings.get("api_key", os.environ.get(KEY_VARIABLE))
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        where = "api_key" if "api_key" in url.settings else KEY_VARIABLE
        raise ConfigError(f"{where}: not a key; `kmq key create` prints one of letters and digits")
    timeout_ms: int = convert("timeout_ms", url.settings.get("timeout_ms", _TIMEOUT_MS), int)
    if timeout_ms <= 0:
        raise ConfigError(f"timeout_ms: {timeout_ms} must be above 0")
    try:
        from kmqpy.storages.http.gateways import Gateways
        from kmqpy.storages.http.storage import RemoteStorage
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise MissingExtra("http", f"a queue on {url.scheme}:") from None
    urls = [f"{url.scheme}://{host}{url.path.rstrip('/')}" for host in hosts]
    gateways = Gateways(
        _discovery(url, timeout_ms / 1000) if found else lambda: urls,
        key=key,
        timeout_s=timeout_ms / 1000,
        tls=tls_of(url, wanted=True) if secure or found else None,
    )
    try:
        return RemoteStorage(gateways, telemetry=telemetry)
    except BaseException:
        gateways.close()
        raise


def _discovery(url: QueueUrl, timeout_s: float) -> Discovery:
    from kmqpy.storages.http.discovery import Discovery
    from kmqpy.zookeeper.settings import ZooKeeperConnection

    security = ZooKeeperConnection.from_environment().security
    zookeeper = ZooKeeperConnection(hosts=url.address + url.path.rstrip("/"), security=security)
    return Discovery(zookeeper, url.settings.get("cluster_name", ""), timeout_s)
