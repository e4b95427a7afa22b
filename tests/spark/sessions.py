"""Settings of Spark for tests."""

from pyspark.sql import SparkSession

from kmqpy.spark import configure_spark_with_kmq

SMALL = {
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.driver.memory": "1g",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    # Half the start; what runs for seconds gains nothing from the second compiler.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}


def small(builder: SparkSession.Builder) -> SparkSession.Builder:
    """Settings for little data and little time."""
    return configure_spark_with_kmq(builder.config(map=SMALL))
