"""The application of Celery of celery_tasks.py. As a program it sends tasks, and prints those accepted."""

import os
import random
import sys
import time
from pathlib import Path

from celery import Celery

ETA_S = (12.0, 18.0)
app = Celery("celery_app", broker=f"sqs://any:any@localhost:{os.environ['PORT']}")
app.conf.update(
    broker_transport_options={
        "is_secure": False,
        "region": "us-east-1",
        "visibility_timeout": int(os.environ["LEASE_S"]),
        "wait_time_seconds": 5,
        "polling_interval": 0.1,
    },
    task_default_queue="celery",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
)


@app.task(name="run")
def run(name, due_s):
    """Note that it ran, when (s of the machine's monotonic clock), and how much too early."""
    now_s = time.monotonic()
    with Path(os.environ["RUNS"]).open("a") as file:
        file.write(f"{name} {now_s} {due_s - now_s}\n")


def main(sender, count):
    """Send until so many were accepted, each task once: whether one without an answer runs nobody knows."""
    accepted = 0
    for place in range(10 * count):
        wait_s = random.uniform(*ETA_S)
        name = f"{sender}-{place}"
        try:
            run.apply_async((name, time.monotonic() + wait_s), countdown=wait_s, retry=False)
        except Exception as error:
            print(type(error).__name__, file=sys.stderr)
            time.sleep(0.1)
            continue
        print(name, flush=True)
        accepted += 1
        if accepted == count:
            return


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
