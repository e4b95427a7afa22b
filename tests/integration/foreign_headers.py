"""Writes records whose header names are not UTF-8, as librdkafka and others can and confluent_kafka can't."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import confluent_kafka

_PRODUCER = 0
_TOPIC, _PARTITION, _VALUE, _KEY, _FLAGS, _HEADERS, _END = 1, 3, 4, 5, 7, 10, 0
_COPY = 2


def write(
    bootstrap: str,
    topic: str,
    value: bytes,
    headers: Sequence[tuple[bytes, bytes]],
    *,
    key: bytes = b"k",
    partition: int = 0,
) -> None:
    """Append one record, by the librdkafka that confluent_kafka brings along."""
    (library,) = (Path(confluent_kafka.__file__).parent.parent / "confluent_kafka.libs").glob("librdkafka*")
    rdkafka = ctypes.CDLL(str(library))
    for function in ("rd_kafka_conf_new", "rd_kafka_new", "rd_kafka_headers_new"):
        getattr(rdkafka, function).restype = ctypes.c_void_p
    problem = ctypes.create_string_buffer(512)
    conf = ctypes.c_void_p(rdkafka.rd_kafka_conf_new())
    rdkafka.rd_kafka_conf_set(conf, b"bootstrap.servers", bootstrap.encode(), problem, 512)
    handle = ctypes.c_void_p(rdkafka.rd_kafka_new(_PRODUCER, conf, problem, 512))
    made = ctypes.c_void_p(rdkafka.rd_kafka_headers_new(ctypes.c_size_t(len(headers))))
    for name, content in headers:
        rdkafka.rd_kafka_header_add(
            made, name, ctypes.c_ssize_t(len(name)), content, ctypes.c_ssize_t(len(content))
        )
    # A list of tags, each with its values.
    error = rdkafka.rd_kafka_producev(
        handle,
        *(ctypes.c_int(_TOPIC), ctypes.c_char_p(topic.encode())),
        *(ctypes.c_int(_PARTITION), ctypes.c_int32(partition)),
        *(ctypes.c_int(_FLAGS), ctypes.c_int(_COPY)),
        *(ctypes.c_int(_VALUE), ctypes.c_char_p(value), ctypes.c_size_t(len(value))),
        *(ctypes.c_int(_KEY), ctypes.c_char_p(key), ctypes.c_size_t(len(key))),
        *(ctypes.c_int(_HEADERS), made),
        ctypes.c_int(_END),
    )
    assert error == 0, f"rd_kafka_producev: {error}"
    assert rdkafka.rd_kafka_flush(handle, 10_000) == 0
    rdkafka.rd_kafka_destroy(handle)
