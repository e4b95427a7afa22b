"""Reads topics as DataFrames, through Spark's Kafka source: with which options, and between which offsets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from kmqpy.errors import ConfigError
from kmqpy.kafka import partition_reader
from kmqpy.kafka.group_commits import commits_in_log
from kmqpy.kafka.places import Place
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.topics import QueueTopics, Topics
from kmqpy.spark.log_cuts import Cuts

Bounds = Mapping[int, tuple[int, int]]
"""The offsets to read of each partition: the first one, and the one after the last."""

_LOGIN_MODULES = "org.apache.kafka.common.security"
_SAME_IN_JAVA = ("security.protocol", "ssl.key.password")
"""Settings of librdkafka whose name and values are the same in Kafka's Java client."""
_TRANSLATED = {
    *_SAME_IN_JAVA,
    *("sasl.mechanism", "sasl.mechanisms", "sasl.username", "sasl.password"),
    *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location"),
    "ssl.endpoint.identification.algorithm",
}
_SECURITY_PREFIXES = ("sasl.", "ssl.", "security.", "enable.ssl.")
"""Other settings whose names begin so are refused: to drop them silently could weaken security."""
_RESERVED_OPTIONS = {
    *("kafka.isolation.level", "includeheaders", "subscribe", "subscribepattern", "assign"),
    *(f"{end}{how}" for end in ("startingoffsets", "endingoffsets") for how in ("", "bytimestamp")),
    *("startingtimestamp", "endingtimestamp"),
}
"""Options that kmqpy itself sets, in lower case. Others could make Spark read aborted records, other topics,
other offsets, or no headers."""


def read_topic(spark: SparkSession, options: Mapping[str, str], topic: str, bounds: Bounds) -> DataFrame:
    """The committed records within `bounds`; records that retention deletes meanwhile are left out."""
    given = {
        "assign": list(bounds),
        "startingOffsets": {str(p): first for p, (first, _) in bounds.items()},
        "endingOffsets": {str(p): end for p, (_, end) in bounds.items()},
    }
    own = {name: json.dumps({topic: value}) for name, value in given.items()}
    return _loaded(spark.read.format("kafka").options(**{"failOnDataLoss": "false", **options, **own}))


def stream_topics(
    spark: SparkSession, options: Mapping[str, str], topics: Sequence[str], starting: str = "earliest"
) -> DataFrame:
    """A stream of the committed records from `starting` on: earliest, latest, or offsets as Spark's JSON.

    A topic that its checkpoint does not know begins at its earliest record. The stream goes on behind records
    that were deleted after its checkpoint was written.
    """
    return _loaded(
        spark.readStream.format("kafka").options(
            **{"failOnDataLoss": "false", **options}, subscribe=",".join(topics), startingOffsets=starting
        )
    )


def check_options(options: Mapping[str, str] | None) -> None:
    """Raise ConfigError for options of Spark's Kafka source that kmqpy itself sets."""
    for name, value in (options or {}).items():
        if name.lower() in _RESERVED_OPTIONS:
            raise ConfigError(
                f"options: {name}: {value!r} is not yours to choose: kmqpy reads the committed records of "
                "the queue's topics, with their headers; leave it out"
            )


def kafka_options(connection: KafkaConnection, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Options with which Spark's Kafka source connects as librdkafka does with `connection`.

    more  options that are added, or replace those made here

    Of the settings for librdkafka, these are translated: security.protocol, SASL with a password, and TLS
    files in PEM, which are read here, so that executors need no files. Other settings of security raise
    ConfigError, as does a file that can't be read; all the rest only tunes librdkafka, and is left out.
    """
    check_options(more)
    given = {key: str(value) for key, value in connection.kafka.items()}
    for key in given.keys() - _TRANSLATED:
        if key.startswith(_SECURITY_PREFIXES) and f"kafka.{key}" not in (more or {}):
            raise ConfigError(
                f"kafka: {key}: has no counterpart in Spark's Kafka source; say it in Java's words, "
                "with KmqSpark(…, options={'kafka.…': …})"
            )
    java = {key: given[key] for key in _SAME_IN_JAVA if key in given}
    mechanism = given.get("sasl.mechanism") or given.get("sasl.mechanisms")
    if mechanism:
        java["sasl.mechanism"] = mechanism
        if "sasl.username" in given:
            module = "plain.PlainLoginModule" if mechanism == "PLAIN" else "scram.ScramLoginModule"
            user, password = _quoted(given["sasl.username"]), _quoted(given.get("sasl.password", ""))
            login = f"{_LOGIN_MODULES}.{module} required username={user} password={password};"
            java["sasl.jaas.config"] = login
    if "ssl.ca.location" in given:
        java |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": _pem(given, "ssl.ca.location")}
    if "ssl.certificate.location" in given:
        java["ssl.keystore.type"] = "PEM"
        java["ssl.keystore.certificate.chain"] = _pem(given, "ssl.certificate.location")
        java["ssl.keystore.key"] = _pem(given, "ssl.key.location")
    if given.get("ssl.endpoint.identification.algorithm") == "none":
        java["ssl.endpoint.identification.algorithm"] = ""
    return {
        "kafka.bootstrap.servers": connection.bootstrap,
        # At each poll Spark asks for the log's bounds and seeks, which drops fetched records: so large polls.
        "kafka.max.poll.records": "50000",
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
        **{f"kafka.{key}": value for key, value in java.items()},
        **(more or {}),
    }


def _loaded(reader: object) -> DataFrame:
    try:
        frame: DataFrame = reader.load()  # type: ignore[attr-defined]  # of a batch or a stream
        assert frame.columns  # Spark Connect analyses the plan only now
    except Exception as error:  # of several kinds, some of them py4j's
        if "Failed to find" not in str(error):
            raise
        raise ConfigError(
            "spark: this session has no Kafka connector; make it with "
            "configure_spark_with_kmq(SparkSession.builder).getOrCreate() before any other session, "
            'or run: spark-submit --jars "$(kmq spark-jars)"'
        ) from error
    return frame


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _pem(given: Mapping[str, str], key: str) -> str:
    try:
        return Path(given.get(key, "")).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(f"kafka: {key}: {given.get(key)!r} can't be read: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The range of offsets to read of each topic of a queue, by partition, for a state that is consistent.

    committed  the group's committed offsets, read before the ranges
    cuts       where logs of the queue topic were cut back, as far as the commits tell
    ends       the end of each partition of the queue topic, with records that are not committed; read last
    """

    topics: QueueTopics
    committed: list[Place]
    cuts: Cuts
    markers: Bounds
    queue: Bounds
    ends: list[Place]
    dead_letters: Bounds


def take_snapshot(connection: KafkaConnection, queue: QueueSettings) -> Snapshot:
    """Read the offsets of a Snapshot from Kafka; raises QueueNotFound, TopicError, Unavailable."""
    topics = Topics(connection).check(queue)
    dead, numbers = topics.dead_letters, range(topics.partitions)
    commits = commits_in_log(connection, queue, numbers, topics.ids)
    # The order matters. First the commits: a message below a committed offset has its markers in `markers`.
    # Then the markers, before dead letters and messages: a copy is there if `markers` has the end marker that
    # was written with it.
    markers = partition_reader.bounds(connection, queue.markers_topic, numbers)
    dead_letters = (
        {} if dead is None else partition_reader.bounds(connection, dead.name, range(dead.partitions))
    )
    messages = partition_reader.bounds(connection, queue.name, numbers)
    # With uncommitted records: JVM clients read them by default, so they may be taken, too.
    ends = partition_reader.bounds(connection, queue.name, numbers, uncommitted=True)
    return Snapshot(
        topics=topics,
        committed=sorted((partition, commit.offset) for partition, commit in commits.items()),
        cuts={partition: commit.cuts for partition, commit in commits.items() if commit.cuts},
        markers=markers,
        queue=messages,
        ends=[(partition, end) for partition, (_, end) in ends.items()],
        dead_letters=dead_letters,
    )


def committed_starts(
    connection: KafkaConnection, queue: QueueSettings, topics: QueueTopics
) -> dict[int, int]:
    """By partition, where the queue's group goes on; a purge may have deleted more than it has read."""
    partitions = range(topics.partitions)
    commits = commits_in_log(connection, queue, partitions, topics.ids)
    logs = partition_reader.bounds(connection, queue.name, partitions)
    return {p: max(commits[p].offset if p in commits else 0, low) for p, (low, _) in logs.items()}
