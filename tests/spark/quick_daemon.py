"""pyspark.daemon whose workers find imported what each would import, in half a second of CPU and more.

See spark.python.daemon.module.
"""

import importlib
import sys

from pyspark.daemon import manager

NEEDED = {
    "pyspark.worker": (
        "pandas",
        "pyarrow",
        "pyspark.sql.pandas.serializers",
        "kmqpy.spark.task",
        "tracker.spark.task",
    )
}
"""By the module that a worker runs; others than this one are started too rarely."""


def import_all() -> None:
    for worker in sys.argv[1:]:
        for name in (worker, *NEEDED.get(worker, ())):
            importlib.import_module(name)


if __name__ == "__main__":
    import_all()
    manager()
