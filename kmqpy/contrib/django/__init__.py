"""Django's tasks on queues of kmqpy: `TaskBackend`, and the command `kmq_worker` of `manage.py`.

Works with `django.tasks` of Django 6 and newer, and with the package `django-tasks` on older ones. In the
queue, a task is a JSON object: its path, its arguments, its priority.
"""

from __future__ import annotations

import json
import os
import socket
from traceback import format_exception
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, transaction
from django.utils import timezone
from django.utils.module_loading import import_string

from kmqpy import Message, Queue, Reject, queue_for
from kmqpy.errors import DecodeError, shown

try:
    from django.tasks import base as tasks
    from django.tasks import task_backends
    from django.tasks.backends.base import BaseTaskBackend
    from django.tasks.exceptions import InvalidTask
    from django.tasks.signals import task_enqueued, task_finished, task_started
except ModuleNotFoundError:
    from django_tasks import base as tasks
    from django_tasks import task_backends
    from django_tasks.backends.base import BaseTaskBackend
    from django_tasks.exceptions import InvalidTaskError as InvalidTask
    from django_tasks.signals import task_enqueued, task_finished, task_started

__all__ = ["TaskBackend", "task_backends"]

_OPTIONS = {"url", "database", "atomic"}


class TaskBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Puts tasks into queues of kmqpy, each into the queue of its `queue_name`.

    `TASKS["default"]["OPTIONS"]` has:

    url       of the storage, as for `queue_for`, without the name of a queue
    database  the name in DATABASES of the same database: tasks are enqueued within its transaction. Without
              it a task is enqueued at once, whether the transaction at hand commits or not
    atomic    with `database`: whether a task runs in a transaction, which its acknowledgement is part of. So
              what it does in the database is done once

    Results are not kept. Raises ImproperlyConfigured for options that are missing or unknown.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        where = f'TASKS["{alias}"]["OPTIONS"]'
        if "url" not in self.options:
            raise ImproperlyConfigured(f'{where} needs "url", such as "postgresql://host/db?create=true"')
        if unknown := set(self.options) - _OPTIONS:
            raise ImproperlyConfigured(f"{where}: unknown {sorted(unknown)}; use {sorted(_OPTIONS)}")
        if self.options.get("atomic") and "database" not in self.options:
            raise ImproperlyConfigured(f'{where}: "atomic" needs "database", the name of one in DATABASES')
        self._opened: dict[tuple[int, str], Queue] = {}

    def queue(self, name: str) -> Queue:
        """The queue of a `queue_name`; opened at its first use in each process, since servers fork."""
        place = os.getpid(), name
        if place not in self._opened:
            url = self.options["url"]
            self._opened[place] = queue_for(f"{url}{'&' if '?' in url else '?'}queue={name}")
        return self._opened[place]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """See BaseTaskBackend; the id of the result is that of the message.

        Raises InvalidTask, and the errors of `Queue.send`.
        """
        self.validate_task(task)
        result = self._result(task, args, kwargs, status="READY")
        body = {"task": task.module_path, "args": result.args, "kwargs": result.kwargs}
        queue = self.queue(task.queue_name)
        options: dict[str, Any] = {}
        if queue.capabilities.priority:
            options["priority"] = _priority(task.priority)
        elif task.priority != tasks.DEFAULT_TASK_PRIORITY:
            raise InvalidTask(f"queue {task.queue_name} has no priorities")
        if task.run_after is not None:
            options["delay"] = max(0.0, (task.run_after - timezone.now()).total_seconds())
        if "database" in self.options:
            options["transaction"] = connections[self.options["database"]]
        id_ = queue.send(json.dumps(body), **options)
        _set(result, id=id_, enqueued_at=timezone.now())
        task_enqueued.send(type(self), task_result=result)
        return result

    def run(self, queue: Queue, message: Message) -> None:
        """Run the task of a message of `queue`, within a handler of a Worker.

        Raises Reject for what is no task, and what the task raises.
        """
        close_old_connections()
        try:
            if not self.options.get("atomic"):
                self._run(message)
                return
            database = self.options["database"]
            with transaction.atomic(using=database):
                self._run(message)
                queue.ack(message, transaction=connections[database])
        finally:
            close_old_connections()

    def _run(self, message: Message) -> None:
        task, args, kwargs = _task_of(message)
        now = timezone.now()
        result = self._result(task, args, kwargs, status="RUNNING")
        worker = f"{socket.gethostname()}-{os.getpid()}"
        _set(result, id=message.id, worker_ids=[worker] * message.attempts)
        _set(result, started_at=now, last_attempted_at=now)
        task_started.send(type(self), task_result=result)
        context = [tasks.TaskContext(task_result=result)] if task.takes_context else []
        try:
            _set(result, _return_value=task.call(*context, *result.args, **result.kwargs))
        except BaseException as error:
            path = f"{type(error).__module__}.{type(error).__qualname__}"
            trace = "".join(format_exception(error))
            result.errors.append(tasks.TaskError(exception_class_path=path, traceback=trace))
            _set(result, status=tasks.TaskResultStatus.FAILED)
            raise
        else:
            _set(result, status=tasks.TaskResultStatus.SUCCESSFUL)
        finally:
            _set(result, finished_at=timezone.now())
            task_finished.send(type(self), task_result=result)

    def _result(self, task: Any, args: Any, kwargs: Any, *, status: str) -> Any:
        times = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
        return tasks.TaskResult(
            task=task,
            id="",
            status=tasks.TaskResultStatus[status],
            args=args,
            kwargs=kwargs,
            backend=self.alias,
            errors=[],
            worker_ids=[],
            **times,
        )


def _task_of(message: Message) -> tuple[Any, list[Any], dict[str, Any]]:
    """The task of a message and its arguments; raises Reject, since no other try would help."""
    try:
        body = message.json()
        path, args, kwargs = body["task"], body["args"], body["kwargs"]
        task = import_string(path)
    except (DecodeError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise Reject(f"no task: {type(error).__name__}: {error}") from error
    if not isinstance(task, tasks.Task):
        raise Reject(f"{shown(path)} is no task: decorate it with @task")
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        raise Reject(f"{shown(path)}: args must be a list, kwargs an object")
    return task, args, kwargs


def _priority(of_task: int) -> int:
    """0 to 9 for Django's -100 to 100, whose default 0 is 4."""
    return int((of_task - tasks.TASK_MIN_PRIORITY) * 9 // (tasks.TASK_MAX_PRIORITY - tasks.TASK_MIN_PRIORITY))


def _set(result: Any, **fields: Any) -> None:
    """Change a result, which is frozen for whoever receives it."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)
