"""`manage.py kmq_worker`: runs the tasks of a queue."""

from functools import partial
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from kmqpy import Worker
from kmqpy.contrib.django import TaskBackend, task_backends


class Command(BaseCommand):  # type: ignore[misc]  # Django has no types
    """Runs tasks in threads. One that fails comes again, until the queue's last attempt is used up."""

    help = "Run the tasks of a queue until SIGTERM or Ctrl-C; running tasks are finished then."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the options."""
        parser.add_argument("--queue", default="default", help="one of QUEUES; default: default")
        parser.add_argument("--backend", default="default", help="a name in TASKS; default: default")
        parser.add_argument("--concurrency", type=int, default=4, help="tasks at a time; default: 4")

    def handle(self, *, queue: str, backend: str, concurrency: int, **_: Any) -> None:
        """Run until a signal comes; raises CommandError for another backend, and the errors of Worker."""
        found = task_backends[backend]
        if not isinstance(found, TaskBackend):
            raise CommandError(f'TASKS["{backend}"] is not a kmqpy.contrib.django.TaskBackend')
        if found.queues and queue not in found.queues:
            raise CommandError(f"unknown queue {queue}: use one of {', '.join(sorted(found.queues))}")
        messages = found.queue(queue)
        handler = partial(found.run, messages)
        Worker(messages, handler, concurrency=concurrency, telemetry=found.telemetry).run()
