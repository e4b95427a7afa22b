"""Django's tasks on queues of kmqpy: `TaskBackend`, and the command `kmq_worker` of `manage.py`.

Works with `django.tasks` of Django 6 and newer, and with the package `django-tasks` on older ones. In the
queue, a task is a JSON object: its path, its arguments, its priority, and when it may run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pkgutil import resolve_name
from traceback import format_exception
from typing import Any
from urllib.parse import quote

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import close_old_connections, connections, transaction
from django.utils import timezone

from kmqpy import Message, Queue, Reject, queue_for
from kmqpy.errors import ConfigError, DecodeError, shown
from kmqpy.queue.url import parse_url
from kmqpy.telemetry.base import Telemetry

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
_opened: dict[tuple[int, str, int], Queue] = {}
"""By process, since servers fork, url and telemetry; Django makes a backend for each thread and each ASGI
request."""


class TaskBackend(BaseTaskBackend):  # type: ignore[misc]  # Django has no types
    """Puts tasks into queues of kmqpy, each into the queue of its `queue_name`.

    `TASKS["default"]["OPTIONS"]` has:

    url       of the storage, as for `queue_for`, without the name of a queue
    database  the name in DATABASES of the same database: tasks are enqueued within its transaction. Without
              it a task is enqueued at once, whether the transaction at hand commits or not
    atomic    with `database`: whether a task runs in a transaction, which its acknowledgement is part of. So
              what it does in the database is done once

    Results are not kept. Raises ImproperlyConfigured for options that are missing or unknown. A subclass may
    set `telemetry`, one object for all its backends, which hears of sends and tasks.
    """

    telemetry: Telemetry | None = None
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
        if (database := self.options.get("database")) is not None and database not in connections.settings:
            raise ImproperlyConfigured(f'{where}: "database" is {shown(database)}, which DATABASES has not')
        try:
            parse_url(self.options["url"], names_queue=False)
        except ConfigError as error:
            raise ImproperlyConfigured(f"{where}: {error}") from error

    def queue(self, name: str) -> Queue:
        """The queue of a `queue_name`; opened at its first use in each process."""
        url = self.options["url"]
        url = f"{url}{'&' if '?' in url else '?'}queue={quote(name, safe='')}"
        place = os.getpid(), url, id(self.telemetry)
        if place not in _opened:
            made = queue_for(url, telemetry=self.telemetry)
            if _opened.setdefault(place, made) is not made:  # another thread was faster
                made.close()
        return _opened[place]

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        """See BaseTaskBackend; the id of the result is that of the message.

        Raises InvalidTask, and the errors of `Queue.send`.
        """
        self.validate_task(task)
        path = task.module_path
        found: Any = None
        with suppress(ImportError, AttributeError, ValueError):
            found = resolve_name(path)
        if getattr(found, "func", None) is not task.func:
            raise InvalidTask(f"workers would find no task at {path}: give it the name of its function")
        result = self._result(task, args, kwargs, status="READY")
        body = {"task": path, "args": result.args, "kwargs": result.kwargs, "priority": task.priority}
        queue = self.queue(task.queue_name)
        options: dict[str, Any] = {}
        if queue.capabilities.priority:
            options["priority"] = _priority(task.priority)
        elif task.priority != tasks.DEFAULT_TASK_PRIORITY:
            raise InvalidTask(f"queue {task.queue_name} has no priorities")
        if task.run_after is not None:
            body["run_after"] = task.run_after.isoformat()
            # As timestamps, since without USE_TZ one may have a time zone, and the other has none.
            options["delay"] = max(0.0, task.run_after.timestamp() - timezone.now().timestamp())
        if "database" in self.options:
            options["transaction"] = connections[self.options["database"]]
        id_ = queue.send(json.dumps(body), **options)
        _set(result, id=id_, enqueued_at=timezone.now())
        # Robust, as all signals: what a receiver raises must neither repeat what is done nor hide an error.
        task_enqueued.send_robust(type(self), task_result=result)
        return result

    def run(self, queue: Queue, message: Message) -> None:
        """Run the task of a message of `queue`, within a handler of a Worker.

        Raises Reject for what is not a task, and what the task raises.
        """
        close_old_connections()
        try:
            self._run(queue, message)
        finally:
            close_old_connections()

    def _run(self, queue: Queue, message: Message) -> None:
        task, args, kwargs = self._task_of(message)
        result = self._result(task, args, kwargs, status="RUNNING")
        sent = datetime.fromtimestamp(message.first_enqueued_ms / 1000, UTC)
        _set(result, id=message.id, enqueued_at=sent if settings.USE_TZ else timezone.make_naive(sent))
        now, worker = timezone.now(), f"{socket.gethostname()}-{os.getpid()}"
        _set(result, started_at=now, last_attempted_at=now, worker_ids=[worker] * message.attempts)
        task_started.send_robust(type(self), task_result=result)
        context = [tasks.TaskContext(task_result=result)] if task.takes_context else []
        try:
            with self._acknowledged(queue, message):
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
            task_finished.send_robust(type(self), task_result=result)

    @contextmanager
    def _acknowledged(self, queue: Queue, message: Message) -> Iterator[None]:
        """Runs the block in a transaction with the acknowledgement, if the options say so."""
        if not self.options.get("atomic"):
            yield
            return
        database = self.options["database"]
        with transaction.atomic(using=database):
            yield
            queue.ack(message, transaction=connections[database])

    def _task_of(self, message: Message) -> tuple[Any, list[Any], dict[str, Any]]:
        """The task of a message, as it was enqueued, and its arguments.

        Raises Reject where no other try would help. One may where the task can't be imported: newer code has
        sent it, and this worker still runs the older.
        """
        try:
            body = message.json()
            path, args, kwargs = body["task"], body["args"], body["kwargs"]
            how = {"priority": body.get("priority"), "run_after": body.get("run_after")}
            if how["run_after"] is not None:
                how["run_after"] = _local(datetime.fromisoformat(how["run_after"]))
        except (DecodeError, KeyError, TypeError, ValueError) as error:
            raise Reject(f"no task: {type(error).__name__}: {error}") from error
        if not (isinstance(path, str) and isinstance(args, list) and isinstance(kwargs, dict)):
            raise Reject(f"{shown(path)}: task must be text, args a list, kwargs an object")
        try:
            task = resolve_name(path)
        except ValueError as error:
            raise Reject(f"{shown(path)} is not the path of a task") from error
        if not isinstance(task, tasks.Task):
            raise Reject(f"{shown(path)} is not a task: decorate it with @task")
        try:
            return task.using(backend=self.alias, queue_name=message.queue, **how), args, kwargs
        except (InvalidTask, TypeError, ValueError) as error:
            raise Reject(f"{shown(path)}: {error}") from error

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


def _local(time: datetime) -> datetime:
    """With a time zone if this process has USE_TZ, else without: the sender may have it otherwise."""
    if timezone.is_aware(time) == settings.USE_TZ:
        return time
    found: datetime = timezone.make_aware(time) if settings.USE_TZ else timezone.make_naive(time)
    return found


def _priority(of_task: int) -> int:
    """0 to 9 for Django's -100 to 100, whose default 0 is 4."""
    return int((of_task - tasks.TASK_MIN_PRIORITY) * 9 // (tasks.TASK_MAX_PRIORITY - tasks.TASK_MIN_PRIORITY))


def _set(result: Any, **fields: Any) -> None:
    """Change a result, which is frozen for whoever receives it."""
    for name, value in fields.items():
        object.__setattr__(result, name, value)
