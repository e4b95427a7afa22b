"""Settings under which what kmqpy has Spark read and write is the same on every machine, for every reader."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Spark's default, INT96, is no type of Iceberg, and other readers take 9999-12-31 for a day in 1816.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}

TEXT_OPTIONS = {
    "timeZone": "UTC",
    # Spark's defaults cut times to ms.
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""Options of to_json() and of writers of JSON and CSV. Readers take times with any fraction without them."""


@contextmanager
def portable(spark: SparkSession) -> Iterator[None]:
    """Give the session SETTINGS, and put back what it had."""
    before = {name: str(spark.conf.get(name)) for name in SETTINGS}
    changed = {name: value for name, value in before.items() if value != SETTINGS[name]}
    for name in changed:
        spark.conf.set(name, SETTINGS[name])
    try:
        yield
    finally:
        for name, value in changed.items():
            spark.conf.set(name, value)
