"""After a fork, the child's calls say so, its ends touch nothing, and the parent goes on."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import LiveQueue

FORKER = Path(__file__).with_name("forker.py")


def run(scenario: str, queue: LiveQueue) -> dict[str, Any]:
    where = {
        "bootstrap": queue.connection.bootstrap,
        "root": queue.connection.root,
        "zookeeper": queue.zookeeper.hosts,
    }
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(FORKER), scenario, json.dumps(where), queue.settings.to_json()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr  # of no thread, destructor or end of Python
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def assert_refused(child: dict[str, str], returning: tuple[str, ...]) -> None:
    """All its calls raised Forked but for those; it came to its end."""
    assert child.pop("child") == "0"
    assert child == {call: "returned" if call in returning else "Forked" for call in child}


@pytest.mark.parametrize(
    "lanes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"retry_lane": True, "priorities": 2}, id="lanes", marks=pytest.mark.breadth),
    ],
)
def test_a_client_refuses_to_work_in_a_child(make_queue, lanes):
    queue = make_queue(**lanes)
    queue.send(*map(str, range(7)))
    found = run("client", queue)
    own = found["children"].pop()
    assert own == {"own client": "returned", "close": "returned", "child": "0"}
    for child in found["children"]:
        assert_refused(child, returning=("close",))
    assert len(found["children"]) == 4
    assert found["parent"] == 6
    assert queue.ended() == set(range(7))  # and every end marker is the parent's, but for its own client's


def test_a_producer_refuses_to_work_in_a_child(queue):
    found = run("producer", queue)
    for child in found["children"]:
        assert_refused(child, returning=("close",))
    assert queue.copies() == {"before": 1, "after": 1}


@pytest.mark.breadth
def test_a_queue_a_worker_and_asyncio(queue):
    found = run("queue", queue)
    assert_refused(found["children"][0], returning=("stop", "idle stop", "asyncio close", "close"))
    assert found["handled"] == ["before", "after"]
    assert queue.ended() == {0, 1}


@pytest.mark.breadth
def test_administration_refuses_to_work_in_a_child(queue):
    found = run("admin", queue)
    assert_refused(found["children"][0], returning=("letters close", "close"))
    assert found["same"]


def test_a_tracker_refuses_to_work_in_a_child(queue):
    queue.send("x")
    found = run("tracker", queue)
    assert_refused(found["children"][0], returning=("stop", "idle stop"))
    assert (found["attempts"], found["owned"]) == (2, 1)
