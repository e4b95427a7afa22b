"""What a url says of a Redis server, where no server is needed."""

import re
import sys

import pytest

from kmqpy.errors import ConfigError, MissingExtra
from kmqpy.queue import parse_url, storage_for
from kmqpy.storages import redis
from kmqpy.storages.redis.server import ServerSettings
from kmqpy.storages.tls import Tls


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("redis://h", {"host": "h"}),
        ("valkey://:p%40ss@h:7/3", {"host": "h", "port": 7, "db": 3, "user": "", "password": "p@ss"}),
        (
            "redis://me:a%2Fb@[::1]:7?timeout_ms=500ms&pool_size=3",
            {"host": "::1", "port": 7, "user": "me"} | {"password": "a/b", "timeout_s": 0.5, "pool_size": 3},
        ),
        ("redis://[::1]", {"host": "::1"}),
        ("rediss://h", {"host": "h", "tls": Tls()}),
        ("valkeys://h?ssl_verify=false", {"host": "h", "tls": Tls(verify=False)}),
        ("redis://h?application_name=shop", {"host": "h", "application_name": "shop"}),
    ],
)
def test_a_url_says_where_the_server_is(url, settings):
    parsed = parse_url(url, names_queue=False)
    found = redis._server_settings(parsed, secure=parsed.scheme in ("rediss", "valkeys"))
    assert found == ServerSettings(**settings)
    assert "p@ss" not in repr(found)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://", "'' is not the address of a server; write it like redis://user"),
        ("redis://a:1,b:2", "'a:1,b:2' is not the address"),
        ("redis://h:port", "not the address"),
        ("redis://h:99999", "not the address"),
        ("redis://h/x", "'/x' is not the number of a database"),
        ("redis://h?prefix=", "prefix: invalid prefix ''"),
        ("redis://h?prefix=a{b", "prefix: invalid prefix 'a{b'"),
        ("redis://h?poolsize=1", "'poolsize'; did you mean pool_size"),
        ("redis://h?pool_size=0", "pool_size: 0"),
        ("redis://h?timeout_ms=soon", "timeout_ms: 'soon'"),
        ("redis://h?timeout_ms=0s", "timeout_ms"),
        ("redis://h?ssl_ca_certs=x", "unknown setting 'ssl_ca_certs'"),
        ("rediss://h?ssl_ca_certs=no.pem", "ssl_ca_certs: the file 'no.pem' can't be read"),
        ("rediss://h?application_name=a b", "application_name"),
    ],
)
def test_a_bad_url_is_refused_before_anything_is_connected(url, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        storage_for(url)


def test_a_missing_redis_py_is_told(monkeypatch):
    for name in ("engine", "server", "arrival_subscriber"):
        monkeypatch.delitem(sys.modules, f"kmqpy.storages.redis.{name}", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "redis"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(MissingExtra, match=re.escape('pip install "kmqpy[redis]"')):
        storage_for("redis://h")
