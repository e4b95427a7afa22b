"""AWS's SDKs for Java, 2 (JSON) and 1 (the query protocol), with the gateway; sqs_jvm.py runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gateway_support import fresh_memory, running
from sqs_support import ACCOUNT

pytestmark = pytest.mark.interop
JVM = Path(__file__).with_name("sqs_jvm.py")


@pytest.mark.parametrize("sdk", [pytest.param(1, marks=pytest.mark.breadth), 2])
def test_a_program_in_java_does_all(sdk):
    with running(fresh_memory()) as served:
        endpoint = f"http://localhost:{served.gateway.port}"
        done = subprocess.run(
            [sys.executable, str(JVM), str(sdk), endpoint],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3_000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["url"] == found["same"] == f"{endpoint}/{ACCOUNT}/java"
    received = found["received"]
    assert received["body"] == "a\r\nü <&>"
    assert received["attributes"] == {"text": "ü", "raw": "3"}
    assert received["system"]["ApproximateReceiveCount"] == "1"
    assert found["count"] == "2"
    assert found["batch"] == [["e0", "e1"], ["e2 InvalidMessageContents"]]
    assert found["deleted"] == ["d0", "d1"]
    assert found["attributes"]["VisibilityTimeout"] == "45"
    assert found["attributes"]["ApproximateNumberOfMessages"] == "0"
    assert found["is_duplicate"]
    assert found["fifo"] == [["a1", "a"], ["a2", "a"], ["b1", "b"]]
    assert found["raised"] == ["QueueDoesNotExistException", "AWS.SimpleQueueService.NonExistentQueue"]
