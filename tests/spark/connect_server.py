"""A Spark Connect server in a process of its own: connect_server.py <port> <Spark settings>.

Ends with its standard input.
"""

import json
import sys

from pyspark.sql import SparkSession

from kmqpy.spark.session import start


def main(port: str, settings: str) -> None:
    builder = SparkSession.builder.config(map=json.loads(settings)).config(
        map={
            "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
            "spark.connect.grpc.binding.address": "127.0.0.1",
            "spark.connect.grpc.binding.port": port,
        }
    )
    start(builder, connector=False)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
