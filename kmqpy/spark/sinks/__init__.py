"""Makes the Target of each kind of sink: the code that writes the rows of a pipeline there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.spark.records import kafka_options
from kmqpy.spark.sinks.delta import DeltaTarget
from kmqpy.spark.sinks.files import FORMATS, FileTarget
from kmqpy.spark.sinks.jdbc import JdbcTarget
from kmqpy.spark.sinks.kafka import KafkaTarget
from kmqpy.spark.sinks.target import Sink, Target


def _iceberg(sink: Sink) -> Target:
    from kmqpy.spark.sinks.iceberg import IcebergTarget  # an extra; raises MissingExtra

    return IcebergTarget(sink)


_TARGETS: Mapping[str, Callable[[Sink], Target]] = {
    **dict.fromkeys(FORMATS, FileTarget),
    "delta": DeltaTarget,
    "iceberg": _iceberg,
    "jdbc": JdbcTarget,
    "kafka": KafkaTarget,
}
FOLDER_FORMATS = (*FORMATS, "delta")
"""Formats whose sinks are folders: they can have their checkpoint beside them."""

NAMES = tuple(_TARGETS)
"""The formats of all sinks."""


def target_of(sink: Sink, connection: KafkaConnection) -> Target:
    """The Target that writes to `sink`; raises ConfigError for an unknown format, and MissingExtra."""
    if sink.format not in _TARGETS:
        raise ConfigError(f"format: unknown sink {sink.format!r}: use {', '.join(NAMES)}")
    if sink.format == "kafka":
        sink = replace(sink, options={**kafka_options(connection), **sink.options})
    return _TARGETS[sink.format](sink)


def checkpoint_of(sink: Sink) -> str:
    """The folder of the checkpoint; raises ConfigError if none is named and the sink is not a folder."""
    if sink.checkpoint:
        return sink.checkpoint
    if sink.format not in FOLDER_FORMATS:
        raise ConfigError(
            f"checkpoint: name a folder (--checkpoint); a sink {sink.format} has none of its own"
        )
    return f"{sink.path.rstrip('/')}.kmq/checkpoint"
