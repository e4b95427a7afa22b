"""Sink: the place to which a pipeline writes rows. Target: the interface of the code that writes there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from kmqpy.errors import ConfigError, NotSupported, shown
from kmqpy.spark.sinks.limits import Limit


@dataclass(frozen=True, kw_only=True)
class Sink:
    """The place to which a pipeline writes its rows, as the user describes it.

    Attributes:
        path: A folder, the URL of a database (`jdbc:…`), a table or a topic, as `format` requires.
        format: One of kmqpy.spark.sinks.NAMES.
        options: Of Spark's writer of that format; for "iceberg" of the catalog, for "jdbc" with `table`.
        partition_by: Columns by whose values the files are sorted into folders.
        file_bytes: The size in bytes that files should have, where a micro-batch has enough rows.
        checkpoint: The folder of Spark's checkpoint; `<path>.kmq/checkpoint` if `path` is a folder.
    """

    path: str
    format: str = "parquet"
    options: Mapping[str, str] = field(default_factory=dict)
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 2**20
    checkpoint: str | None = None


@dataclass(frozen=True)
class Target(ABC):
    """Writes micro-batches to a sink. Spark may repeat a micro-batch that was written, under its number."""

    sink: Sink

    settings: ClassVar[Mapping[str, str]] = {}
    """Settings that the Spark session must have."""

    @property
    def jar_sets(self) -> tuple[str, ...]:
        """The sets of jars, listed in kmqpy/dev/jars.json, that the Spark session must have."""
        return ()

    @abstractmethod
    def check(self, spark: SparkSession, schema: StructType) -> None:
        """Make the sink ready; raise ConfigError unless rows of this schema can be written to it."""

    def bind(self, queue: str, topic_id: str, ending: str = "") -> None:
        """Note at the sink that its rows are of this queue; raise ConfigError if another queue is noted.

        Rows identify their messages by partition and offset: those of another queue, or of a topic that was
        recreated since, would be taken for redeliveries, and be left out.

        ending  if `queue` is a lane: the ending of its name. Each lane has a note of its own
        """
        noted = self._noted_queue(f"{queue} {topic_id}", ending)
        name, _, noted_id = noted.partition(" ")
        whose = f"of queue {shown(name)}, not of {queue!r}"
        if (name, noted_id) == (queue, topic_id):
            return
        if name == queue:
            what = "lane" if ending else "queue"
            whose = f"of a {what} {queue!r} whose topic was deleted and recreated since: other messages"
        raise ConfigError(f"out: {self.sink.path!r} has rows {whose}; name another place")

    def take_over(self, run: str) -> None:  # noqa: B027 (most sinks need nothing)
        """Note, in sinks to which only one run may write, that this run writes from now on.

        Other runs fail at their next micro-batch: they search the sink for messages before they commit, and
        would not see messages that this run adds meanwhile.
        """

    def limits(self, schema: StructType) -> tuple[Limit, ...]:  # noqa: ARG002
        """The values of these columns that the sink can't hold: their messages are refused."""
        return ()

    def _noted_queue(self, queue: str, ending: str) -> str:  # noqa: ARG002
        """The queue name and topic id noted at the sink; notes those in `queue` if there is no note."""
        return queue

    @abstractmethod
    def write(self, batch: DataFrame, number: int, run: str) -> None:
        """Write the rows of a micro-batch, and evaluate its plan only once.

        number  of the micro-batch within its checkpoint
        run     the name of the checkpoint

        The sink may already have a micro-batch with this number, but with other messages: messages for which
        the function failed the first time, or new ones after an old copy has replaced the checkpoint. Rows of
        messages that the sink has are left out; all other rows are written.
        """

    def read(self, spark: SparkSession, schema: StructType) -> DataFrame:  # noqa: ARG002
        """The rows that were written; raises NotSupported if Spark can't read them."""
        raise NotSupported(f"format: {self.sink.format} is not read back")
