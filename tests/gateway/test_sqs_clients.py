"""Celery with a real worker, and aioboto3, which need another boto3 than the tests, with the gateway."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from gateway_support import fresh_memory, running
from sqs_support import client

from kmqpy.core.clock import SYSTEM_CLOCK, wait_until
from tests.chaos.celery_tasks import PACKAGES, packages

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def environment():
    """Variables with which Python finds the packages."""
    try:
        folder = packages()
    except subprocess.SubprocessError as error:
        pytest.skip(f"the package registry does not give {PACKAGES}: {error}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent)])}


def test_tasks_of_celery_run_once_with_an_eta_and_again_when_their_process_was_killed(environment, tmp_path):
    runs = tmp_path / "runs"
    with running(fresh_memory()) as served:
        given = {**environment, "RUNS": str(runs), "PORT": str(served.gateway.port)}
        command = [sys.executable, "-m", "celery", "-A", "celery_app", "worker", "-c", "2"]
        send = (
            "from celery_app import run\n"
            "run.apply_async(('later',), countdown=12)\n"  # the visibility timeout is 6 s
            "run.delay('killed'), run.delay('poison')\n"
            "[run.delay(f'plain-{n}') for n in range(20)]\n"
        )
        dead = client(served).create_queue(QueueName="dead")["QueueUrl"]
        subprocess.run([sys.executable, "-c", send], env=given, cwd=tmp_path, check=True, timeout=60)
        began_s = SYSTEM_CLOCK.monotonic()

        def done() -> Counter[str]:
            return Counter(runs.read_text().split() if runs.exists() else ())

        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(command, env=given, cwd=tmp_path, stdout=log, stderr=log)
            try:
                wait_until(lambda: len(done()) == 23 and done()["killed"] == 2, 60)
                assert SYSTEM_CLOCK.monotonic() - began_s > 10  # it has waited
                with served.storage.open("tasks") as queue:
                    wait_until(lambda: not queue.size() + queue.in_flight(), 20)
                assert done() - Counter({*done()}) == {"killed": 1, "poison": 2}
                assert len(client(served).receive_message(QueueUrl=dead)["Messages"]) == 1
            except BaseException:
                print((tmp_path / "log").read_text()[-9_000:])
                raise
            finally:
                worker.terminate()
                worker.wait(60)


_AIO = """
import asyncio, sys, aioboto3

async def main():
    session = aioboto3.Session(aws_access_key_id="x", aws_secret_access_key="y", region_name="us-east-1")
    async with session.resource("sqs", endpoint_url=sys.argv[1]) as sqs:
        queue = await sqs.create_queue(QueueName="aio")
        waiting = asyncio.ensure_future(queue.receive_messages(WaitTimeSeconds=20))
        await asyncio.sleep(0.5)
        text = {"DataType": "String", "StringValue": "1"}
        await asyncio.gather(*(
            queue.send_message(MessageBody=f"m{n}", MessageAttributes={"n": text}) for n in range(30)
        ))
        found = await asyncio.wait_for(waiting, 10)
        while len(found) < 30:
            found += await queue.receive_messages(MaxNumberOfMessages=10, WaitTimeSeconds=2)
        await asyncio.gather(*(one.delete() for one in found))
        print(len({await one.body for one in found}), await queue.receive_messages())

asyncio.run(main())
"""


def test_aioboto3_sends_and_receives_at_a_time(environment):
    with running(fresh_memory()) as served:
        command = [sys.executable, "-c", _AIO, f"http://localhost:{served.gateway.port}"]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    assert done.stdout.strip() == "30 []", done.stderr[-9_000:]
