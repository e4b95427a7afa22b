"""The application of docs/fastapi.md on a real server."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import blocks

PAGE = (Path(__file__).parents[2] / "docs" / "fastapi.md").read_text()
BROKEN = """
import kmqpy.worker.asyncio
async def run(self):
    raise OSError("the worker broke")
kmqpy.worker.asyncio.AsyncWorker.run = run
"""


@pytest.mark.parametrize(
    ("before", "said", "code"),
    [
        (BROKEN, "the worker broke", -signal.SIGTERM),
        pytest.param(
            "open('shop.db', 'w').write('no database' * 100)\n", "shop.db", 3, marks=pytest.mark.breadth
        ),
    ],
    ids=["worker", "queue"],
)
def test_a_server_whose_worker_or_queue_fails_ends(tmp_path, before, said, code):
    application = next(block.code for block in blocks(PAGE) if block.language == "python")
    (tmp_path / "shop.py").write_text(before + application)
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert said in ended.stderr
    assert ended.returncode == code
