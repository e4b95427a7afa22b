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
        ["rejected", " 'shop.no_task' is no task"],
        ["rejected", " no task"],
        ["rejected", " no task"],
    ]
    with contextlib.closing(sqlite3.connect(project / "shop.db")) as database:
        assert database.execute("SELECT what FROM done").fetchall() == [("2 to ann, attempt 1",)]


@pytest.mark.parametrize(
    ("options", "named"),
    [({}, "url"), ({"url": "memory:", "urls": 1}, "urls"), ({"url": "memory:", "atomic": True}, "database")],
)
def test_wrong_options_are_named(project, options, named):
    wrong = f"TASKS['default']['OPTIONS'] = {options}\n"
    (project / "project_settings.py").write_text(SETTINGS + wrong)
    with run(project, "-m", "django", "kmq_worker", stderr=subprocess.PIPE) as worker:
        assert named in worker.communicate()[1].splitlines()[-1]
    assert worker.returncode == 1
