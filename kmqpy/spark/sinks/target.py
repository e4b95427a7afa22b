"""The interface of a sink, as the pipeline uses it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError, NotSupported, shown

DEFAULT_FILE_BYTES = 128 * 2**20


@dataclass(frozen=True, kw_only=True)
class Sink:
    """Where the rows go.

    path          a folder, the URL of a database (`jdbc:…`), a table or topic: what `format` takes
    format        one of kmqpy.spark.sinks.NAMES
    options       what Spark's writer of that format takes
    partition_by  columns that name the folders of the files
    file_bytes    size that each file of a micro-batch should have, in bytes
    checkpoint    its folder; by default `<path>.kmq/checkpoint` where `path` is a folder
    """

    path: str
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    file_bytes: int = DEFAULT_FILE_BYTES
    checkpoint: str | None = None


@dataclass(frozen=True)
class Target(ABC):
    """Writes micro-batches to a sink. Spark may repeat one that was written, with the same number."""

    sink: Sink

    settings: ClassVar[Mapping[str, str]] = {}
    """Settings that the Spark session must have."""

    @property
    def jar_sets(self) -> tuple[str, ...]:
        """The sets of jars (kmqpy/dev/jars.json) that the session must have."""
        return ()

    @abstractmethod
    def check(self, spark: SparkSession, schema: StructType) -> None:
        """Make the place ready; raise ConfigError unless rows of this schema can be written there."""

    def bind(self, queue: str, topic_id: str) -> None:
        """Note that the rows are of this queue; raise ConfigError where there are rows of another one.

        Rows name their messages by partition and offset, so those of two queues would be taken for copies of
        each other, and be left out. The topic of a queue that was recreated counts as another queue.
        """
        noted = self._noted_queue(f"{queue} {topic_id}")
        name, _, noted_id = noted.partition(" ")
        whose = f"of queue {shown(name)}, not of {queue!r}"
        if (name, noted_id) == (queue, topic_id):
            return
        if name == queue:
            whose = f"of a queue {queue!r} whose topic was deleted and recreated since: other messages"
        raise ConfigError(f"out: {self.sink.path!r} has rows {whose}; name another place")

    def take_over(self, run: str) -> None:  # noqa: B027 (most sinks need nothing)
        """Note that this run writes here from now on, in sinks that only one run can write to.

        Other runs fail there at their next micro-batch. They would search the sink for messages before their
        commit, and not see those that this run adds meanwhile.
        """

    def _noted_queue(self, queue: str) -> str:
        """The name and topic id that are noted there; notes `queue` where nothing is."""
        return queue

    @abstractmethod
    def write(self, batch: DataFrame, number: int, run: str) -> None:
        """Write the rows of a micro-batch, which is evaluated once.

        run  names the checkpoint within which `number` says which micro-batch it is

        The sink may already have a micro-batch of this number, with other messages: this one may add those
        for which the function failed before or, after the checkpoint was replaced by an old copy, new ones.
        Rows of messages that the sink has are left out, all others are written.
        """

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:  # noqa: ARG002
        """The rows that were written; raises NotSupported where Spark can't read them."""
        raise NotSupported(f"format: {self.sink.format} is not read back")
