"""Uses much of Spark in a little time, so that its classes are recorded: see sessions.CLASSES.

training.py <file to record them in>
"""

import sys
import tempfile
from pathlib import Path

from pyspark.sql import SparkSession, functions

from tests.spark.sessions import INTERPRETED, JAVA_OPTIONS, small


def main(recording: str) -> None:
    options = f"{JAVA_OPTIONS} -XX:ArchiveClassesAtExit={recording} -Xlog:cds*=off"
    builder = small(SparkSession.builder.master("local[2]").config(map=INTERPRETED))
    session = builder.config("spark.driver.extraJavaOptions", options).getOrCreate()
    gateway = session.sparkContext._gateway
    with tempfile.TemporaryDirectory() as folder:
        use(session, Path(folder))
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


def use(session: SparkSession, folder: Path) -> None:
    rows = [(number, str(number).encode(), {"n": [number]}) for number in range(50)]
    frame = session.createDataFrame(rows, "a int, b binary, c map<string, array<int>>")
    frame = frame.withColumn(
        "s", functions.struct("a", functions.expr("transform(c['n'], x -> x + 1)").alias("t"))
    )
    frame.where("a > 3").groupBy("a").agg(functions.max("b"), functions.collect_list("s")).orderBy(
        "a"
    ).collect()
    frame.select("a", functions.explode("c")).join(frame.select("a", "b"), "a", "left").distinct().count()
    frame.mapInPandas(lambda frames: frames, frame.schema).mapInArrow(lambda ones: ones, frame.schema).count()
    frame.select("a", "b").write.parquet(str(folder / "parquet"))
    session.read.parquet(str(folder / "parquet")).createOrReplaceTempView("read")
    session.conf.set("spark.sql.codegen.wholeStage", "true")
    session.conf.set("spark.sql.codegen.factoryMode", "FALLBACK")
    session.sql("SELECT a, row_number() OVER (ORDER BY a) n, from_json('{}', 'x int') j FROM read").toPandas()
    stream = session.readStream.schema("a int, b binary").parquet(str(folder / "parquet"))
    out = stream.groupBy("a").count().writeStream.outputMode("update")
    out.foreachBatch(lambda batch, _: batch.persist().collect()).option(
        "checkpointLocation", str(folder / "checkpoint")
    ).trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1])
