"""Django's tasks on a real Django: enqueued within its transactions, and run by `manage.py kmq_worker`."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import until

from kmqpy import queue_for

SETTINGS = """
USE_TZ = True
SECRET_KEY = "no secret"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.db"}}
INSTALLED_APPS = ["kmqpy.contrib.django"]
TASKS = {"default": {
    "BACKEND": "kmqpy.contrib.django.TaskBackend",
    "QUEUES": ["default", "mails"],
    "OPTIONS": {
        "url": "sqlite:///shop.db?create=true&max_redeliveries=1&retry_delays=0s",
        "database": "default",
        "atomic": True,
    },
}}
"""
SHOP = """
try:
    from django.tasks import task
except ModuleNotFoundError:
    from django_tasks import task
from django.db import connection

def write(what):
    with connection.cursor() as cursor:
        cursor.execute("INSERT INTO done VALUES (%s)", [what])

@task(priority=10, takes_context=True)
def mail(context, order, *, to):
    write(f"{order} to {to}, attempt {context.attempt}")

@task
async def count(numbers):
    return sum(numbers)

@task
def fail():
    write("what is rolled back")
    raise OSError("no server")

def no_task():
    write("what nobody declared")
"""
SENDER = """
import json, sys, django
django.setup()
from datetime import timedelta
from django.db import connection, transaction
from django.utils import timezone
import shop
with connection.cursor() as cursor:
    cursor.execute("CREATE TABLE IF NOT EXISTS done (what TEXT)")
try:
    with transaction.atomic():
        shop.mail.enqueue(1, to="nobody")
        raise ValueError
except ValueError:
    pass
with transaction.atomic():
    result = shop.mail.enqueue(2, to="ann")
shop.count.enqueue([1, 2])
shop.fail.enqueue()
shop.mail.using(run_after=timezone.now() + timedelta(hours=1), queue_name="mails").enqueue(3, to="bob")
refused = []
for wrong in (lambda: shop.mail.using(queue_name="others"), lambda: shop.mail.using(priority=101)):
    try:
        wrong()
    except Exception as error:
        refused.append(type(error).__name__[:11])
print(json.dumps([result.id, result.status, refused]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project_settings.py").write_text(SETTINGS)
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


def run(project: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(project), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, *arguments], cwd=project, env=variables, text=True, **options)


def test_tasks_run_once_and_those_that_fail_become_dead_letters(project):
    with run(project, "-c", SENDER, stdout=subprocess.PIPE) as sender:
        id_, status, refused = json.loads(sender.communicate()[0])
    assert (status, refused) == ("READY", ["InvalidTask", "InvalidTask"])
    url = f"sqlite:///{project}/shop.db?queue="
    with queue_for(f"{url}mails") as mails, queue_for(f"{url}default") as queue:
        assert (mails.size(), mails.receive(10)) == (1, [])  # it is for an hour later
        assert [message.id for message in queue.peek(1)] == [id_]  # the highest priority
        for body in ({"task": "shop.no_task", "args": [], "kwargs": {}}, {"task": "shop.mail"}, [1]):
            queue.send(json.dumps(body))
        with run(project, "-m", "django", "kmq_worker") as worker:
            until(lambda: len(list(queue.dead_letters.list())) == 4 and not queue.size() + queue.in_flight())
            worker.send_signal(signal.SIGTERM)
        reasons = sorted(str(letter.reason).split(":")[:2] for letter in queue.dead_letters.list())
    assert worker.returncode == 0
    assert reasons == [
        ["nack", " OSError"],
        ["rejected", " 'shop.no_task' is not a task"],
        ["rejected", " no task"],
        ["rejected", " no task"],
    ]
    with contextlib.closing(sqlite3.connect(project / "shop.db")) as database:
        assert database.execute("SELECT what FROM done").fetchall() == [("2 to ann, attempt 1",)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "url"),
        ({"url": "memory:", "urls": 1}, "urls"),
        ({"url": "memory:", "atomic": True}, "database"),
        ({"url": "sqlite:///shop.db", "database": "other"}, "'other'"),
        ({"url": "sqlite:///shop.db?queue=jobs"}, "names no queue"),
    ],
)
def test_wrong_options_are_named(project, options, named):
    wrong = f"TASKS['default']['OPTIONS'] = {options}\n"
    (project / "project_settings.py").write_text(SETTINGS + wrong)
    with run(project, "-m", "django", "kmq_worker", stderr=subprocess.PIPE) as worker:
        assert named in worker.communicate()[1].splitlines()[-1]
    assert worker.returncode == 1


def told(project: Path, program: str, **settings: Any) -> Any:
    """What a program in the project prints, as JSON; its database has the table `done`."""
    changed = "".join(f"{name} = {value!r}\n" for name, value in settings.items())
    (project / "project_settings.py").write_text(SETTINGS + changed)
    with contextlib.closing(sqlite3.connect(project / "shop.db")) as database:
        database.execute("CREATE TABLE done (what TEXT)")
    with run(project, "-c", BEGINNING + program, stdout=subprocess.PIPE) as child:
        return json.loads(child.communicate()[0])


BEGINNING = """
import asyncio, json, threading, django
django.setup()
from datetime import datetime, timedelta, timezone as zones
from django.db import connection
from django.utils import timezone
from kmqpy.contrib.django import task_backends, task_enqueued, task_finished
import shop
backend = task_backends["default"]

def done():
    with connection.cursor() as cursor:
        cursor.execute("SELECT what FROM done")
        return [what for what, in cursor.fetchall()]

def error_of(call, *arguments, **options):
    try:
        call(*arguments, **options)
    except Exception as error:
        return type(error).__name__
"""


def test_all_threads_and_requests_of_a_process_share_its_queue(project):
    program = """
opened = [backend.queue("default")]

def open_again():
    opened.append(task_backends["default"].queue("default"))

thread = threading.Thread(target=open_again)
thread.start()
thread.join()

async def request():
    await shop.count.aenqueue([1])
    open_again()

for _ in range(2):
    asyncio.run(request())
print(json.dumps([len({*map(id, opened)}), backend.queue("default").size()]))
"""
    assert told(project, program) == [1, 2]


def test_a_queue_may_have_any_name(project):
    name = "50% a+b&c=d/é"
    program = f"""
shop.count.using(queue_name={name!r}).enqueue([1])
message, = backend.queue({name!r}).receive()
backend.run(backend.queue({name!r}), message)
print(json.dumps(message.queue))
"""
    tasks = {"default": {"BACKEND": "kmqpy.contrib.django.TaskBackend", "QUEUES": []}}
    options = {"OPTIONS": {"url": "memory:?create=true"}}
    assert told(project, program, TASKS={"default": tasks["default"] | options}) == name


def test_a_task_sees_how_it_was_enqueued(project):
    (project / "shop.py").write_text(
        SHOP
        + """
@task(takes_context=True)
def look(context):
    result = context.task_result
    of = result.task
    write([of.backend, of.queue_name, of.priority, of.run_after.isoformat(), result.enqueued_at.isoformat()])
"""
    )
    program = """
ago = timezone.now() - timedelta(hours=1)
seen = []
shop.write = seen.extend
before = timezone.now()
shop.look.using(queue_name="mails", priority=-7, run_after=ago).enqueue()
message, = backend.queue("mails").receive()
backend.run(backend.queue("mails"), message)
late = datetime.fromisoformat(seen.pop()) - before
print(json.dumps([*seen, ago.isoformat(), abs(late) < timedelta(minutes=1)]))
"""
    *how, run_after, ago, is_now = told(project, program)
    assert (how, run_after, is_now) == (["default", "mails", -7], ago, True)


def test_a_task_that_lost_its_lease_is_rolled_back_and_told_as_failed(project):
    program = """
told = []
task_finished.connect(lambda task_result, **_: told.append(task_result.status), weak=False)
shop.mail.enqueue(1, to="ann")
queue = backend.queue("default")
message, = queue.receive(lease=0.1)
again = queue.receive(wait=30)
error = error_of(backend.run, queue, message)
print(json.dumps([error, told, done(), len(again)]))
"""
    assert told(project, program) == ["ReceiptError", ["FAILED"], [], 1]


def test_a_task_whose_transaction_is_broken_is_not_acknowledged(project):
    (project / "shop.py").write_text(
        SHOP
        + """
from contextlib import suppress
from django.db import IntegrityError, transaction

@task
def go_on():
    write("what is rolled back")
    with suppress(IntegrityError), transaction.atomic(savepoint=False):
        raise IntegrityError
"""
    )
    program = """
shop.go_on.enqueue()
queue = backend.queue("default")
error = error_of(backend.run, queue, *queue.receive())
print(json.dumps([error, done(), queue.in_flight()]))
"""
    assert told(project, program) == ["TransactionManagementError", [], 1]


def test_the_telemetry_of_a_backend_hears_of_tasks(project):
    (project / "shop_tasks.py").write_text("""
from kmqpy.contrib.django import TaskBackend
from kmqpy.telemetry.base import Telemetry

class Told(Telemetry):
    def finished(self, queue, op, count=1):
        with open("told", "a") as file:
            print(op, count, file=file)

    def processing(self, message):
        self.finished(message.queue, "process")
        return super().processing(message)

class Backend(TaskBackend):
    telemetry = Told()
""")
    tasks = {
        "default": {"BACKEND": "shop_tasks.Backend", "OPTIONS": {"url": "sqlite:///shop.db?create=true"}}
    }
    told(project, "shop.count.enqueue([1])\nprint(0)", TASKS=tasks)
    with run(project, "-m", "django", "kmq_worker") as worker:
        with queue_for(f"sqlite:///{project}/shop.db?queue=default") as queue:
            until(lambda: not queue.size() + queue.in_flight())
        worker.send_signal(signal.SIGTERM)
    assert (project / "told").read_text() == "send 1\nprocess 1\nack 1\n"


@pytest.mark.breadth
def test_a_receiver_of_a_signal_that_fails_changes_nothing(project):
    program = """
def broken(**_):
    raise OSError
for signal in (task_enqueued, task_finished):
    signal.connect(broken)
shop.mail.enqueue(1, to="ann")
shop.fail.enqueue()
queue = backend.queue("default")
errors = [error_of(backend.run, queue, message) for message in queue.receive(2)]
print(json.dumps([errors, done(), queue.in_flight()]))
"""
    assert told(project, program) == [[None, "OSError"], ["1 to ann, attempt 1"], 1]


def test_a_task_of_newer_code_is_tried_again_and_one_that_workers_can_not_find_is_not_enqueued(project):
    program = """
queue = backend.queue("default")
queue.send(json.dumps({"task": "shop.later", "args": [], "kwargs": {}}))
queue.send(json.dumps({"task": "later.mail", "args": [], "kwargs": {}}))
for task, priority in ((5, 0), ("", 0), ("no path!", 0), ("shop.count", float("nan"))):
    queue.send(json.dumps({"task": task, "args": [], "kwargs": {}, "priority": priority}))
errors = [error_of(backend.run, queue, message) for message in queue.receive(9)]
renamed, gone = shop.task(shop.no_task), shop.task(shop.no_task)
gone.func.__name__ = gone.func.__qualname__ = "gone"
print(json.dumps([errors, [error_of(one.enqueue) for one in (renamed, gone)], queue.size()]))
"""
    errors, refused, size = told(project, program)
    assert errors == ["AttributeError", "ModuleNotFoundError", *["Reject"] * 4]
    assert ([one[:11] for one in refused], size) == (["InvalidTask"] * 2, 0)


@pytest.mark.breadth
def test_without_time_zones_run_after_may_have_one_or_none(project):
    program = """
hour = timedelta(hours=1)
for run_after in (datetime.now() + hour, datetime.now(zones.utc) + hour):
    shop.count.using(run_after=run_after).enqueue([1])
queue = backend.queue("default")
print(json.dumps([queue.size(), len(queue.receive(2))]))
"""
    assert told(project, program, USE_TZ=False, TIME_ZONE="Asia/Tokyo") == [2, 0]
