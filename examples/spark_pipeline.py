"""A data pipeline on Spark: orders are enriched, written as Parquet, and acknowledged one by one.

Needs the extra `kmqpy[spark]`, a Kafka, and a tracker (`kmq dev up`, `kmq tracker`):

    python examples/spark_pipeline.py --out orders.parquet --report report

It sends 2,000 orders. One in ten fails the first time, as if a service was away, and is redelivered; one in a
hundred is no order at all, and becomes a dead letter. Then it adds up the orders of each customer, and prints
a report on the queue.
"""

from __future__ import annotations

import argparse
import json
import sys

import pandas as pd
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from kmqpy import KafkaConnection, KafkaStorage, QueueSettings, ZooKeeperConnection
from kmqpy.errors import KmqError
from kmqpy.spark import KmqSpark, configure_spark_with_kmq
from kmqpy.spark.health import health
from kmqpy.spark.pipeline import Sink, run_pipeline, written

SCHEMA = "id long, customer string, total double, attempts int"


def enrich(messages: pd.DataFrame) -> pd.DataFrame:
    """Make a row of each order; reject messages that are no order, give back those that fail for now."""
    rows, errors, rejected = [], [], []
    for body, attempts in zip(messages["value"], messages["attempts"], strict=True):
        row, error, reject = {}, None, False
        try:
            order = json.loads(body)
            row = {
                "id": order["id"],
                "customer": order["customer"],
                "total": order["count"] * order["price"],
                "attempts": attempts,
            }
            if order["id"] % 10 == 0 and attempts == 1:
                error = "the price service is away"
        except (ValueError, KeyError) as problem:
            error, reject = f"no order: {problem!r}", True
        rows.append(row)
        errors.append(error)
        rejected.append(reject)
    columns = ["id", "customer", "total", "attempts"]
    out = pd.DataFrame(rows, index=messages.index, columns=columns)  # the index says which messages they are
    return out.assign(kmq_error=errors, kmq_reject=rejected, kmq_delay=0.5)


def send_orders(name: str, connection: KafkaConnection, count: int) -> None:
    zookeeper = ZooKeeperConnection.from_environment()
    with KafkaStorage(connection, zookeeper) as storage:
        if zookeeper.hosts and name not in storage.list():  # without ZooKeeper, the queue must exist
            storage.create(name, partitions=4)
        storage.open(name).send_many(
            "broken"
            if number % 100 == 99
            else json.dumps(
                {"id": number, "customer": f"customer-{number % 7}", "count": 1 + number % 3, "price": 9.5}
            )
            for number in range(count)
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--queue", default="spark-orders")
    parser.add_argument("--orders", type=int, default=2_000)
    parser.add_argument("--out", default="orders.parquet", help="folder for the rows")
    parser.add_argument("--report", help="folder for the report, as text and PNG")
    parser.add_argument("--master", default="local[*,4]")
    parser.add_argument("--remote", help="Spark Connect instead: sc://host, or local[*]")
    options = parser.parse_args()

    connection = KafkaConnection.from_environment()
    builder = SparkSession.builder.config("spark.sql.shuffle.partitions", "4")
    builder = builder.remote(options.remote) if options.remote else builder.master(options.master)
    spark = configure_spark_with_kmq(builder).getOrCreate()

    queue = QueueSettings(name=options.queue)
    send_orders(options.queue, connection, options.orders)
    sink = Sink(path=options.out)
    run_pipeline(spark, queue, connection, schema=SCHEMA, sink=sink, function=enrich, drain=True)

    orders = written(spark, sink, SCHEMA, connection)
    by_customer = orders.groupBy("customer").agg(F.count("*").alias("orders"), F.sum("total").alias("total"))
    by_customer.write.mode("overwrite").parquet(f"{options.out}-by-customer")
    by_customer.orderBy("customer").show()

    report = health(KmqSpark(spark, connection, queue))
    print(report)
    if options.report:
        report.save(options.report)
    spark.stop()


if __name__ == "__main__":
    try:
        main()
    except KmqError as error:
        sys.exit(f"error: {error} (KMQ_BOOTSTRAP and KMQ_ZOOKEEPER: the line that kmq dev up prints)")
