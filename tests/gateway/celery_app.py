"""An application of Celery for test_sqs_clients.py: each run of a task is a line of the file $RUNS."""

import os
import signal
from pathlib import Path

from celery import Celery

RUNS = Path(os.environ["RUNS"])
app = Celery("celery_app", broker=f"sqs://any:any@localhost:{os.environ['PORT']}")
app.conf.update(
    broker_transport_options={
        "is_secure": False,
        "region": "us-east-1",
        "visibility_timeout": 6,
        "wait_time_seconds": 1,
        "polling_interval": 0.1,
        "sqs-creation-attributes": {
            "RedrivePolicy": '{"deadLetterTargetArn": "arn:aws:sqs:us-east-1:1:dead", "maxReceiveCount": 3}'
        },
    },
    task_default_queue="tasks",
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_enable_remote_control=False,
    worker_prefetch_multiplier=10,
)


@app.task(bind=True)
def run(self, name):
    """Note that it ran; "killed" kills the process when it runs first, "poison" whenever it runs."""
    runs = RUNS.read_text().split("\n") if RUNS.exists() else []
    with RUNS.open("a") as file:
        file.write(f"{name}\n")
    if name == "poison" or (name == "killed" and name not in runs):
        os.kill(os.getpid(), signal.SIGKILL)
