"""Spark with the pinned connector reads a real Kafka."""


def test_it_reads_a_topic(spark, make_queue):
    queue = make_queue(2)
    queue.producer().send("one", partition=1)
    options = {"kafka.bootstrap.servers": queue.connection.bootstrap, "subscribe": queue.name}
    rows = spark.read.format("kafka").options(**options).load().collect()
    assert [(row["partition"], bytes(row["value"])) for row in rows] == [(1, b"one")]
