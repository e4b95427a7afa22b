"""pyspark.daemon whose workers die as tests.spark.deaths says; see spark.python.daemon.module."""

import os

from pyspark.daemon import manager

from tests.chaos import sabotage
from tests.spark.deaths import patch_worker
from tests.spark.quick_daemon import import_all

if __name__ == "__main__":
    if os.environ.get("KMQ_TEST_SABOTAGE"):
        sabotage.apply(os.environ["KMQ_TEST_SABOTAGE"])
    import_all()
    patch_worker()
    manager()
