import os
import re
from types import SimpleNamespace

import pytest

from kmqpy.errors import ConfigError, NotSupported, Unavailable
from kmqpy.kafka import storage
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.queue import opening, parse_url, queue_for, storage_for
from kmqpy.zookeeper.settings import ZooKeeperConnection


class Opened:
    """A queue."""


@pytest.fixture
def opened(monkeypatch):
    """What KmqClient would have been made with."""
    calls = []
    for name in [name for name in os.environ if name.startswith("KMQ_")]:
        monkeypatch.delenv(name)

    def note(settings, connection, *, shared, codec, on_close, **arguments):
        calls.append((settings, (connection, shared.zookeeper), arguments))
        return Opened()

    monkeypatch.setattr(storage, "KmqClient", note)
    return calls


def test_a_kafka_url_names_brokers_and_queue(opened):
    assert isinstance(queue_for("KAFKA://h:9092,h2:9092?queue=q"), Opened)
    settings, (connection, zookeeper), arguments = opened[0]
    assert (settings.name, connection.bootstrap, zookeeper.hosts) == ("q", "h:9092,h2:9092", "")
    assert arguments == {"telemetry": None}


def test_further_parameters_are_settings(opened):
    queue_for(
        "kafka://h:9092?queue=q&lease_ms=1m&max_redeliveries=none&max_in_flight=5&holder=me"
        "&markers=range&zookeeper=z:2181&root=/other&security.protocol=SSL&sasl.password=a%26b%3D"
    )
    settings, (connection, zookeeper), arguments = opened[0]
    assert zookeeper == ZooKeeperConnection(hosts="z:2181")
    assert (settings.lease_ms, settings.max_redeliveries, settings.markers) == (60_000, None, "range")
    assert "markers" in settings.given_fields
    assert connection == KafkaConnection(
        bootstrap="h:9092",
        root="/other",
        kafka={"security.protocol": "SSL", "sasl.password": "a&b="},
    )
    assert arguments == {"telemetry": None, "max_in_flight": 5, "holder": "me"}


def test_the_format_of_markers_is_checked():
    with pytest.raises(ConfigError, match="markers: 'fast' is neither"):
        queue_for("kafka://127.0.0.1:1?queue=q&markers=fast")


def test_what_the_url_leaves_open_is_as_the_environment_says(opened, monkeypatch, tmp_path):
    file = tmp_path / "kmq.toml"
    file.write_text(
        'root = "/file"\n[kafka]\nsasl.username = "me"\nclient.id = "file"\n[tracker]\nworkers = 1\n'
    )
    monkeypatch.setenv("KMQ_CONFIG", str(file))
    monkeypatch.setenv("KMQ_BOOTSTRAP", "other:9092")
    monkeypatch.setenv("KMQ_ZOOKEEPER", "z:2181")
    monkeypatch.setenv("KMQ_KAFKA_SECURITY_PROTOCOL", "SSL")
    queue_for("kafka://h:9092?queue=q&client.id=url")
    queue_for("kafka://h:9092?queue=q&zookeeper=&root=/url&security.protocol=PLAINTEXT")
    kafka_settings = {"sasl.username": "me", "client.id": "url", "security.protocol": "SSL"}
    assert [zookeeper.hosts for _, (_, zookeeper), _ in opened] == ["z:2181", ""]
    assert [connection for _, (connection, _), _ in opened] == [
        KafkaConnection(bootstrap="h:9092", root="/file", kafka=kafka_settings),
        KafkaConnection(
            bootstrap="h:9092",
            root="/url",
            kafka={"sasl.username": "me", "client.id": "file", "security.protocol": "PLAINTEXT"},
        ),
    ]


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("kafka://h:9092?queue=q&lease=5", "'lease'; did you mean lease_ms"),
        ("kafka://h:9092?queue=q&zzz=1", "unknown setting 'zzz'"),
        ("kafka://h:9092?queue=q&name=other", "'name'"),
        ("kafka://h:9092?queue=q&bootstrap=x", "unknown setting 'bootstrap'"),
        ("kafka://h:9092?queue=q&max_redeliveries=many", "max_redeliveries"),
        ("kafka://h:9092?queue=q&max_in_flight=-1", "max_in_flight"),
        ("kafka://h:9092?queue=q&idle_timeout_ms=soon", "idle_timeout_ms"),
        ("kafka://h:9092?queue=q&create=maybe&lease_ms=5", "lease_ms"),
        ("kafka://h:9092?queue=q&order=lifo", "order: 'lifo' is none of 'any', 'fifo', 'group'"),
        ("kafka://h:9092?queue=q&holder=a&holder=b", "more than once"),
        ("kafka://h:9092?queue=a/b", "topic name"),
        ("kafka://h:9092", "names no queue"),
        ("kafka://h:9092?queue=", "names no queue"),
        ("kafka://h:9092?queue", "can't be read"),
        ("kafka://h:9092/path?queue=q", "no path"),
        ("kafka://?queue=q", "kafka://host:9092"),
        ("kafka:q?queue=q", "kafka://host:9092"),
        ("kafka://h:9092?queue=q#x", "#"),
        ("localhost?queue=q", "no scheme"),
        ("", "no scheme"),
        ("kafka://[::1?queue=q", "can't be read"),
        (None, "not text"),
        ("sqlite:///x?queu=q", "names no queue; write it like sqlite:///relative.db?queue=name"),
        ("memory:", "write it like memory:?queue=name"),
        ("rediss://h?queue", "it can't be read; write it like rediss://host:6379/0?queue=name"),
        ("mariadb://h/db?queue=q#x", "#; write it like mariadb://host/database?queue=name"),
    ],
)
def test_bad_urls_are_refused_in_one_line(url, told):
    with pytest.raises(ConfigError, match=re.escape(told)) as caught:
        queue_for(url)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "kafka://user:hunter2@h:9092?queue=q",
        "kafka://h:9092?sasl.password=hunter2",
        "kafka://h:9092?queue=q&sasl.password=hunter2#hunter2",
        "kafka://h:9092?queue=q&sasl.password=x&hunter2=1",
        "kafka://h:9092?queue=q&sasl.password=x&hunter2=1&hunter2=2",
        "kafka://me:hunter2?hunter2=hunter2@h:9092?queue=q",
        "kafka://me:a?queue=hunter2@h:9092?queue=q",
        "kafka://me:a/hunter2@h:9092?queue=q",
        "memory://me:a?hunter2@here?queue=q",
        "memory://me:a?hunter2=b@here&queue=q",
        "kafka://me:a?hunter2=b@h:9092&queue=q",
        "memory://me:a#hunter2@here?queue=q",
    ],
)
def test_a_password_is_never_shown(url):
    with pytest.raises(ConfigError) as caught:
        queue_for(url)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(parse_url("kafka://h?queue=q&sasl.password=hunter2"))


def test_what_kafka_can_not_do_is_not_supported(opened):
    for setting in ("order=fifo", "requeue_to=front", "redelivery=manual", "delivery=at-most-once"):
        with pytest.raises(NotSupported, match=setting.partition("=")[0]):
            queue_for(f"kafka://h:9092?queue=q&{setting}")
    assert opened == []
    queue_for("kafka://h:9092?queue=q&order=any&requeue_to=back&redelivery=automatic&delivery=at-least-once")


def test_the_url_of_a_kafka_storage_has_no_settings_of_queues():
    for setting in ("max_redeliveries=1", "create=true"):
        with pytest.raises(ConfigError, match="is a setting of a queue"):
            storage_for(f"kafka://h:9092?{setting}")
    for name in ("markers_topic", "markers"):
        with pytest.raises(ConfigError, match=f"unknown setting '{name}'"):
            storage_for(f"kafka://h:9092?{name}=range")
    storage_for("kafka://h:9092?idle_timeout_ms=5s&root=/r").close()


@pytest.mark.parametrize("url", ["sqs://foo", "sqs://foo?queue", "sqs://foo?queue=q#x", "h:9092/q"])
def test_the_scheme_is_looked_at_first(url):
    scheme = url.partition(":")[0]
    told = f"there is no storage for {scheme}:; write it like kafka://host:9092?queue=name"
    with pytest.raises(NotSupported, match=re.escape(told)):
        queue_for(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:1?timeout_ms=100ms",
        "http://127.0.0.1:1?timeout_ms=100ms&api_key=hunter2",
        "zookeeper://127.0.0.1:1/kmqpy?timeout_ms=100ms",
        "postgresql://me:hunter2@127.0.0.1:1/db?timeout_ms=100",
        "mariadb://me:hunter2@127.0.0.1:1/db?timeout_ms=100",
    ],
)
def test_a_server_that_is_away_is_named_with_what_to_check(url):
    with pytest.raises(
        Unavailable, match=r" at 127.0.0.1:1\b.*; check the address, .*that .* runs"
    ) as caught:
        storage_for(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("http://me:hunter2@h?queue=q", "knows no users; .*KMQ_API_KEY"),
        ("http://h?queue=q&api_key=hunter2%20", "api_key: not a key"),
        ("http://h?queue=q&timeout_ms=0", "timeout_ms: 0 must be above 0"),
        ("http://h?queue=q&ssl_verify=false", "unknown setting 'ssl_verify'"),
        ("https://?queue=q", "not the address of a gateway; write it like https://host:8080"),
        ("http://a:b?queue=q", "is not an address"),
    ],
)
def test_a_wrong_url_of_a_gateway_is_told(url, told):
    with pytest.raises(ConfigError, match=told) as caught:
        queue_for(url)
    assert "hunter2" not in str(caught.value)


def test_an_unknown_scheme_is_told_the_nearest():
    with pytest.raises(NotSupported, match="kafak:; did you mean kafka"):
        queue_for("kafak://h:9092?queue=q")


def test_a_storage_is_a_line_in_the_table(monkeypatch):
    monkeypatch.setitem(opening._STORAGES, "sqlite", "test_queue_url:open_probe")
    parsed, telemetry = queue_for("sqlite:///dir/f%20g.db?queue=q&x=1")
    assert (parsed.address, parsed.path, parsed.queue, parsed.settings) == (
        "",
        "/dir/f g.db",
        "q",
        {"x": "1"},
    )
    assert telemetry is None


def open_probe(url, telemetry):
    return SimpleNamespace(open_url=lambda again: (again, telemetry), close=lambda: None)


def test_user_password_and_path_are_decoded_after_they_were_split():
    parsed = parse_url("postgresql://me%40x:p%40ss%2Fw%3A@db:5432/da%20ta?queue=q%2F1&a=%25")
    assert (parsed.user, parsed.password) == ("me@x", "p@ss/w:")
    assert (parsed.address, parsed.path, parsed.queue) == ("db:5432", "/da ta", "q/1")
    assert parsed.settings == {"a": "%"}
    assert "p@ss" not in repr(parsed)
    assert (parse_url("redis://:pw@h/0?queue=q").user, parse_url("redis://h/0?queue=q").user) == ("", None)
    with pytest.raises(ConfigError, match="can't be read"):
        parse_url("redis://me:%ff@h/0?queue=q")
