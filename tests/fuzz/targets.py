"""What is fuzzed: each target takes any bytes and raises only when kmqpy broke a promise.

The promises: nothing but errors of the KmqError family; what was read can be written and reads the same
again; the size of what comes out is bounded.
"""

import contextlib
import json
from collections.abc import Callable
from datetime import timedelta
from unittest import mock

from confluent_kafka import TopicPartition

from kmqpy import message
from kmqpy.core import settings as settings_module
from kmqpy.core.durations import duration_ms, parse_duration_ms
from kmqpy.core.environment import from_environment
from kmqpy.errors import ConfigError, DecodeError, KmqError, ReceiptError
from kmqpy.kafka import storage
from kmqpy.kafka.admin import registry_entries
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.client.offset_commits import commit_of
from kmqpy.kafka.markers import codec, snapshot
from kmqpy.kafka.markers.codec import MAX_SPAN
from kmqpy.kafka.message_headers import int_header, redelivery_count
from kmqpy.kafka.receipt import Receipt
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topic_identity import TopicIds
from kmqpy.queue import queue_for
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tracker.settings import TrackerSettings

TARGETS: dict[str, Callable[[bytes], None]] = {}


def target(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
    TARGETS[function.__name__] = function
    return function


def _parts(data: bytes, count: int) -> list[bytes | None]:
    """`data` as `count` pieces, each behind a byte with its length (255: it is absent)."""
    parts: list[bytes | None] = []
    for _ in range(count):
        size, data = (data[0], data[1:]) if data else (255, b"")
        parts.append(None if size == 255 else data[:size])
        data = b"" if size == 255 else data[size:]
    return parts


def _text(data: bytes) -> str:
    """Any text, lone surrogates included."""
    return data.decode("utf-8", "surrogatepass" if b"\xed" in data else "replace")


def _any_text(data: bytes) -> str:
    try:
        return _text(data)
    except UnicodeDecodeError:
        return data.decode("latin-1")


@target
def marker(data: bytes) -> None:
    """A record of the markers topic: key, value, headers."""
    key, value, *rest = _parts(data, 8)
    names = ("kmq-op", "kmq-reason", "kmq-count", "kmq-holder", "kmq-by", "x")
    headers = [(name, content) for name, content in zip(names, rest, strict=True) if content is not None]
    try:
        found = codec.decode(key, value, headers)
    except DecodeError:
        return
    assert found.count <= MAX_SPAN
    assert len(found.runs) <= MAX_SPAN // 2
    again = codec.encode(found)
    assert codec.decode(*again) == found
    assert again[0] == key
    if not (value and value[0] in (3, 4)):  # of ends, what is shorter is written
        assert again[1] == value


@target
def range_marker(data: bytes) -> None:
    """The value of a range marker, which is where the counting is."""
    key = codec.encode_key(0, int.from_bytes(data[:2], "big"))
    with contextlib.suppress(DecodeError):
        found = codec.decode(key, data[2:])
        offsets = list(found.offsets())
        assert offsets == sorted(set(offsets))
        assert len(offsets) == found.count <= MAX_SPAN
        assert codec.decode(*codec.encode(found)) == found


@target
def headers(data: bytes) -> None:
    """Headers of a message, and what is read from them."""
    parts = _parts(data, 4)
    raw = [(name, part) for name, part in zip(("kmq-n", "kmq-count", "x", "y"), parts, strict=True)]
    found = message.headers_of(raw)
    with contextlib.suppress(DecodeError):
        number = int_header(found, "kmq-n")
        assert number is None or -(2**63) <= number < 2**63
    with contextlib.suppress(DecodeError):
        assert 0 <= redelivery_count(found, "kmq-count") < 2**31
    text = _any_text(data)
    ids = TopicIds("Q", "M")
    for metadata in (text, f"kmq1:{text}", f"kmq2:{text}", f"kmq2:{text}:Q:M", f"kmq2:7:{text}:M"):
        try:
            place = TopicPartition("q", 0, 5, metadata)
        except (ValueError, UnicodeError):  # nor could Kafka give it
            continue
        commit = commit_of(place, ids)
        assert commit is None or commit.markers_offset is None or 0 <= commit.markers_offset < 2**63


@target
def receipt(data: bytes) -> None:
    """A receipt; also one whose base64 is good."""
    import base64

    for text in (_any_text(data), "1." + base64.urlsafe_b64encode(data).decode().rstrip("=")):
        with contextlib.suppress(ReceiptError):
            found = Receipt.parse(text)
            assert Receipt.parse(str(found)) == found


@target
def registered_queue(data: bytes) -> None:
    """The znode of a queue."""
    with contextlib.suppress(ConfigError):
        settings = QueueSettings.from_json(data)
        assert QueueSettings.from_json(settings.to_json()) == settings
    with contextlib.suppress(ConfigError):
        settings = QueueSettings.from_json(data, newer=True)
        assert QueueSettings.from_json(settings.to_json()) == settings
    with contextlib.suppress(ConfigError):
        settings, deleting = registry_entries.decode_queue("q", data)
        again = registry_entries.encode_queue(settings, deleting=deleting)
        assert registry_entries.decode_queue("q", again) == (settings, deleting)


@target
def registered_tracker(data: bytes) -> None:
    """The znode of a tracker."""
    with contextlib.suppress(ConfigError):
        found = registry_entries.decode_tracker("t", data)
        assert registry_entries.decode_tracker("t", found.to_json()) == found


@target
def stored_offset(data: bytes) -> None:
    """The znode of a partition's safe offset, with its snapshot."""
    found = registry_entries.decode_offset("q", data)
    if found is not None:
        assert registry_entries.decode_offset("q", found.to_json()) == found


@target
def stored_snapshot(data: bytes) -> None:
    """A snapshot whose packing is good."""
    import base64
    import zlib

    packed = base64.b64encode(zlib.compress(data, 0)).decode()
    try:
        rows = snapshot.unpack(packed)
    except ValueError:
        return
    assert snapshot.unpack(snapshot.pack(rows)) == rows
    stored = StoredOffset(0, "id", 0, in_flight=tuple(rows))
    assert registry_entries.decode_offset("q", stored.to_json()) == stored


@target
def settings_file(data: bytes) -> None:
    """A config file."""
    with contextlib.suppress(ConfigError):
        file = settings_module.parse_file(data, "kmq.toml")
        for cls in (KafkaConnection, ZooKeeperConnection, QueueSettings, TrackerSettings):
            with contextlib.suppress(ConfigError):
                built = settings_module.build(cls, file)
                again = {key: getattr(built, name) for key, name in settings_module.keys(cls).items()}
                assert settings_module.build(cls, again) == built


@target
def environment(data: bytes) -> None:
    """Lines NAME=VALUE, as environment and as settings."""
    pairs = (line.partition("=") for line in _any_text(data).split("\n"))
    environ = {f"KMQ_{name}": value for name, _, value in pairs}
    for cls in (KafkaConnection, ZooKeeperConnection, QueueSettings, TrackerSettings):
        with contextlib.suppress(ConfigError):
            repr(settings_module.build(cls, from_environment(cls, environ)))


@target
def duration(data: bytes) -> None:
    """A duration as text."""
    with contextlib.suppress(ConfigError):
        ms = parse_duration_ms(_any_text(data))
        assert 0 <= ms < 2**63
        if ms < 10**14:
            assert duration_ms(timedelta(milliseconds=ms), "again") == ms


class _Unconnected:
    def __init__(self, *_: object, **__: object) -> None:
        """Instead of a queue, which would connect."""


@target
def url(data: bytes) -> None:
    """A queue url."""
    text = _any_text(data)
    with mock.patch.object(storage, "KmqClient", _Unconnected):
        for one in (text, f"kafka://{text}", f"kafka://h:9092?queue=q&{text}"):
            with contextlib.suppress(KmqError):
                queue_for(one)


SEEDS: dict[str, list[bytes]] = {
    "marker": [
        b"\x0c" + bytes(12) + b"\x01\x00" + b"\xff" * 6,
        b"\x0c" + bytes(12) + b"\x09\x01" + bytes(8) + b"\x06extend\x01a\x010\x01b\x07tracker\x01x",
        b"\x0c" + bytes(12) + b"\x0c\x02" + bytes(8) + b"\x03\x02\x05" + b"\xff" * 6,
    ],
    "range_marker": [
        b"\x00\x01\x03\x05\x02\x01",
        b"\x00\x01\x04\xff\x01",
        b"\x00\x00\x02" + bytes(8) + b"\x80\x01",
    ],
    "headers": [b"\x0212\x01\x05\xff\xff", b"12"],
    "receipt": [str(Receipt("q", "id", 0, 1)).encode(), b'["q","id",0,1]'],
    "registered_queue": [QueueSettings(name="q").to_json(), b'{"name":"q","deleting":true}'],
    "registered_tracker": [b'{"host":"h","started_ms":1,"queues":["a"],"kafka_ok":true}'],
    "stored_offset": [StoredOffset(5, "id", 7, missed_markers=True).to_json()],
    "stored_snapshot": [
        b'[[1,"5",2,1,3,4,null],[9,1,2,3,"lease",true,null,"me"]]',
        json.dumps([[1, "ff", 2, 0, 3, 4, "me"]]).encode(),
    ],
    "settings_file": [
        b'bootstrap="h:1"\nroot="/a"\n[kafka]\nsasl.password="x"\n[zookeeper_security]\nusername="u"\npassword="p"',
        b'name="q"\nredeliver_after_ms="5s"\nmax_redeliveries="none"',
    ],
    "environment": [
        b"BOOTSTRAP=h:1\nKAFKA_SASL_PASSWORD=x\nZOOKEEPER_SECURITY_TLS=yes",
        b"NAME=q\nMAX_HOLD_MS=1h",
    ],
    "duration": [b"1.5h", b"500ms", b" 7d"],
    "url": [b"kafka://h:9092?queue=q&max_in_flight=5&root=/x", b"sasl.password=x&lease_ms=5s"],
}
"""Where to begin: one of each kind of good input."""

_CONNECTION_KEYS = [*settings_module.keys(KafkaConnection), *settings_module.keys(ZooKeeperConnection)]

WORDS: dict[str, list[str]] = {
    "registered_queue": [*QueueSettings.__dataclass_fields__, "deleting", "NaN", "1e999", "[[[[[[[["],
    "settings_file": [*_CONNECTION_KEYS, *TrackerSettings.__dataclass_fields__],
    "environment": [name.upper() for name in (*_CONNECTION_KEYS, *QueueSettings.__dataclass_fields__)],
    "url": [*QueueSettings.__dataclass_fields__, "zookeeper", "holder", "instance_id", "queue="],
    "stored_offset": [*StoredOffset.__dataclass_fields__],
    "stored_snapshot": ["lease", "true", "null", "9223372036854775807"],
    "registered_tracker": ["host", "started_ms", "queues", "kafka_ok", "null"],
}
"""What mutations may put in, beside bytes."""
