"""Records of topics as frames, without Kafka."""

from datetime import UTC, datetime, timedelta

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])
RECORD = StructType(
    [
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
        StructField("headers", ArrayType(HEADER)),
    ]
)


def moment(ms):
    return EPOCH + timedelta(milliseconds=ms)


def naive(ms):
    """As collect() shows a timestamp in a session with UTC."""
    return None if ms is None else moment(ms).replace(tzinfo=None)


def frame_of(spark, records):
    """`records`: (partition, offset, ms, key, value, headers)."""
    rows = [
        (key, value, partition, offset, moment(ms), headers or None)
        for partition, offset, ms, key, value, headers in records
    ]
    return spark.createDataFrame(rows, RECORD)
