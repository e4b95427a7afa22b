"""Pipelines in a process of its own, one after the other, which dies where it is told to.

    pipeline_driver.py <connection> <Spark settings> <folder> <death> <sink>=<queue settings> …

It dies (with its JVM, by SIGKILL) `written`: when the sink has a micro-batch and Spark does not know; or
`committing`: when files of a Delta table are there and its commit is not, or before the commit of the
transaction of a database.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from pyspark.sql import SparkSession

from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.spark.pipeline import run_pipeline
from kmqpy.spark.session import start
from kmqpy.spark.sinks import target_of
from kmqpy.spark.sinks.delta import DeltaTarget
from kmqpy.spark.sinks.jdbc import JdbcTarget
from kmqpy.spark.sinks.target import Sink

SCHEMA = "id int"


def sinks_in(folder):
    checkpoint = str(folder / "jdbc-checkpoint")
    return {
        "delta": Sink(path=str(folder / "delta"), format="delta"),
        "jdbc": Sink(
            path=f"jdbc:sqlite:{folder}/rows.db",
            format="jdbc",
            options={"table": "rows"},
            checkpoint=checkpoint,
        ),
    }


def die():
    os.killpg(0, signal.SIGKILL)


def die_when_delta_is_written():
    write = DeltaTarget.write

    def writing(self, *arguments, **named):
        write(self, *arguments, **named)
        die()

    DeltaTarget.write = writing


def die_committing_delta(folder):
    write = DeltaTarget.write

    def writing(self, *arguments, **named):
        before = set(folder.glob("*.parquet"))

        def watch():
            while set(folder.glob("*.parquet")) == before:
                time.sleep(0.001)
            die()

        threading.Thread(target=watch, daemon=True).start()
        write(self, *arguments, **named)

    DeltaTarget.write = writing


def die_committing_jdbc():
    connected, write = JdbcTarget._connected, JdbcTarget.write

    class Dying:
        def __init__(self, connection):
            self.connection = connection

        def execute(self, statement):
            if statement == "commit":
                die()
            self.connection.execute(statement)

    @contextlib.contextmanager
    def dying(self):
        with connected(self) as connection:
            yield Dying(connection)

    def writing(self, *arguments, **named):
        JdbcTarget._connected = dying
        write(self, *arguments, **named)

    JdbcTarget.write = writing


def main():
    connection = KafkaConnection(**json.loads(sys.argv[1]))
    folder, death = Path(sys.argv[3]), sys.argv[4]
    {
        "": lambda: None,
        "delta committing": lambda: die_committing_delta(folder / "delta"),
        "delta written": die_when_delta_is_written,
        "jdbc committing": die_committing_jdbc,
    }[death]()
    sinks = sinks_in(folder)
    targets = {name: target_of(sink, connection) for name, sink in sinks.items()}
    builder = SparkSession.builder.master("local[2]").config(map=json.loads(sys.argv[2]))
    builder = builder.config("spark.databricks.delta.snapshotPartitions", "1")  # 50 are for large tables
    for target in targets.values():
        builder = builder.config(map=dict(target.settings))
    jar_sets = [name for target in targets.values() for name in target.jar_sets]
    spark = start(builder, jar_sets=jar_sets)
    for one in sys.argv[5:]:
        name, _, settings = one.partition("=")
        queue = QueueSettings.from_json(settings.encode())
        run_pipeline(spark, queue, connection, schema=SCHEMA, sink=sinks[name], lease=60, max_batch=6)
    found = {
        name: sorted(
            row["id"] for row in target.read(spark, spark.createDataFrame([], SCHEMA).schema).collect()
        )
        for name, target in targets.items()
    }
    (folder / "found.json").write_text(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
