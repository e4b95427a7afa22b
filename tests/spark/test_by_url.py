"""Executors use a queue behind a gateway, as any Python program does."""

from kmqpy import queue_for, storage_for
from tests.gateway.gateway_support import running


def test_partitions_send_to_and_take_from_a_queue(spark, tmp_path):
    with running(storage_for(f"sqlite:///{tmp_path}/jobs.db")) as served:
        served.storage.create("jobs")
        url = f"http://127.0.0.1:{served.gateway.port}?queue=jobs"

        def send(rows):
            with queue_for(url) as queue:
                queue.send_many([f"row {row.id}" for row in rows])

        def take(frames):
            with queue_for(url) as queue:
                for frame in frames:
                    messages = queue.receive(len(frame), wait=0)
                    queue.ack(messages)
                    yield frame.iloc[: len(messages)].assign(body=[one.body for one in messages])

        spark.range(20).repartition(2).foreachPartition(send)
        taken = spark.range(0, 30, numPartitions=2).mapInPandas(take, "id long, body binary")
        assert {bytes(row.body) for row in taken.collect()} == {b"row %d" % number for number in range(20)}
        with served.storage.open("jobs") as queue:
            assert queue.size() == queue.in_flight() == 0
