"""A Spark driver with every kind of query, in a process of its own, which is killed in the midst of them.

    killed_driver.py <connection> <Spark settings> <folder> <query>=<queue settings> …

It dies, with its JVM and its Python workers, by SIGKILL, when all of this is so at the same time:

    process, take     calls of the user's function are going on, in their second micro-batch
    delta-committing  files of the table are there, their commit is not
    delta-written     the table has a micro-batch, and Spark does not know
    iceberg           files of the table are there, their commit is not
    jdbc              a transaction of the database is just before its commit
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path

import pandas as pd
from pyiceberg.table import Transaction
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark import KmqSpark
from kmqpy.spark.pipeline import run_pipeline
from kmqpy.spark.session import start
from kmqpy.spark.sinks.delta import DeltaTarget
from kmqpy.spark.sinks.iceberg import IcebergTarget
from kmqpy.spark.sinks.jdbc import JdbcTarget
from kmqpy.spark.sinks.target import Sink
from tests.spark.sessions import JARS

FUNCTIONS = ("process", "take")
PIPELINES = ("delta-committing", "delta-written", "iceberg", "jdbc")
SCHEMA = "id int"
BATCH = 40
"""Messages of a micro-batch of `process` and `take`; their functions are called with a quarter of it."""

_LEASE_S = 30
_FREE_CALLS = 5
"""Calls of a function that return; the first micro-batch has four. Others last until the kill."""


def sink_of(name: str, folder: Path) -> Sink:
    if name == "jdbc":
        url, checkpoint = f"jdbc:sqlite:{folder}/rows.db", str(folder / "jdbc-checkpoint")
        return Sink(path=url, format="jdbc", options={"table": "rows"}, checkpoint=checkpoint)
    if name == "iceberg":
        catalog = {"uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
        checkpoint = str(folder / "iceberg-checkpoint")
        return Sink(path="all.rows", format="iceberg", options=catalog, checkpoint=checkpoint)
    return Sink(path=str(folder / name), format="delta")


def pipeline(spark: SparkSession, connection: KafkaConnection, queue: QueueSettings, sink: Sink) -> None:
    """Process what the queue holds, in several micro-batches."""
    run_pipeline(spark, queue, connection, schema=SCHEMA, sink=sink, lease=60, max_batch=5)


class FunctionJob:
    """`process` or `take`: a query that calls a function with what the queue holds, into Parquet files."""

    def __init__(
        self, spark: SparkSession, connection: KafkaConnection, queue: QueueSettings, how: str, folder: Path
    ) -> None:
        seen, killed = folder / f"{how}-seen", folder / "killed"
        seen.mkdir(exist_ok=True)

        def body(values: pd.Series) -> pd.Series:
            (seen / uuid.uuid4().hex).write_text("\n".join(value.decode() for value in values))
            while len(list(seen.iterdir())) > _FREE_CALLS and not killed.exists():
                time.sleep(0.05)
            return values.str.decode("utf-8")

        self.kmq = KmqSpark(spark, connection, queue)
        df = self.kmq.read_stream(max_offsets_per_trigger=BATCH)
        if how == "process":
            out = self.kmq.process(
                df, lambda frame: frame.assign(body=body(frame["value"])), "body string", lease=_LEASE_S
            )
        else:
            out = self.kmq.take(df, lease=_LEASE_S).select(
                F.pandas_udf(body, "string")("value").alias("body")
            )
        self._out = out
        self._path = str(folder / how)

    def start(self) -> StreamingQuery:
        writer = self.kmq.write_stream(self._out, f"{self._path}-checkpoint").format("parquet")
        return writer.trigger(availableNow=True).start(self._path)

    def run(self) -> None:
        self.kmq.await_termination(self.start())

    def __enter__(self) -> "FunctionJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.kmq.close()


class Death:
    """Comes when all queries have reached their places."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reached = {name: threading.Event() for name in ("delta-written", "iceberg", "jdbc")}

    def stand_still(self, name: str) -> None:
        self.reached[name].set()
        threading.Event().wait()

    def patch_delta(self) -> None:
        write = DeltaTarget.write

        def writing(target, *arguments, **named):
            if "written" in target.sink.path:
                write(target, *arguments, **named)
                self.stand_still("delta-written")
            self.wait_for_the_others()
            self.die_with_the_next_file(Path(target.sink.path))
            write(target, *arguments, **named)

        DeltaTarget.write = writing

    def wait_for_the_others(self) -> None:
        for event in self.reached.values():
            event.wait()
        while any(len(list((self.folder / f"{how}-seen").glob("*"))) <= _FREE_CALLS for how in FUNCTIONS):
            time.sleep(0.05)

    def die_with_the_next_file(self, table: Path) -> None:
        before = set(table.glob("*.parquet"))

        def watch():
            while set(table.glob("*.parquet")) == before:
                time.sleep(0.001)
            os.killpg(0, signal.SIGKILL)

        threading.Thread(target=watch, daemon=True).start()

    def patch_iceberg(self) -> None:
        write = IcebergTarget.write

        def writing(target, *arguments, **named):
            Transaction.commit_transaction = lambda _: self.stand_still("iceberg")
            write(target, *arguments, **named)

        IcebergTarget.write = writing

    def patch_jdbc(self) -> None:
        connected, write, stand_still = JdbcTarget._connected, JdbcTarget.write, self.stand_still

        class Standing:
            def __init__(self, connection):
                self.connection = connection

            def execute(self, statement):
                if statement == "commit":
                    stand_still("jdbc")
                self.connection.execute(statement)

        @contextlib.contextmanager
        def standing(target):
            with connected(target) as connection:
                yield Standing(connection)

        def writing(target, *arguments, **named):
            JdbcTarget._connected = standing
            write(target, *arguments, **named)

        JdbcTarget.write = writing


def main() -> None:
    connection = KafkaConnection(**json.loads(sys.argv[1]))
    folder = Path(sys.argv[3])
    queues = {
        name: QueueSettings.from_json(settings.encode())
        for name, _, settings in (one.partition("=") for one in sys.argv[4:])
    }
    death = Death(folder)
    death.patch_delta()
    death.patch_iceberg()
    death.patch_jdbc()
    # Tasks of `process` and `take` wait in four slots.
    builder = SparkSession.builder.master("local[8]").config(map=json.loads(sys.argv[2]))
    builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", BATCH // 4)
    spark = start(builder, jar_sets=JARS)
    with contextlib.ExitStack() as ends:
        for how in FUNCTIONS:
            ends.enter_context(FunctionJob(spark, connection, queues[how], how, folder)).start()
        threads = [
            threading.Thread(target=pipeline, args=(spark, connection, queues[name], sink_of(name, folder)))
            for name in PIPELINES
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
