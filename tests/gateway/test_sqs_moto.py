"""moto's own SQS suite with a gateway in place of moto's server; moto_plugin.py lists where kmqpy differs.

The suite is in moto's sdist only, which pip fetches once, and the cache keeps.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from gateway_support import fresh_memory, running
from moto_plugin import ACCOUNT

from kmqpy.dev.jars import cache_folder

pytestmark = [pytest.mark.slow, pytest.mark.breadth]
_MOTO = "moto==5.2.5"
_PARTS = ("tests/__init__.py", "tests/conftest.py", "tests/test_sqs/")
_AT_ONCE = "8"
"""The tests mostly sleep. They reckon with a quick machine, so those that fail run again."""
_OPTIONS = (
    *("-q", "-n", _AT_ONCE, "--tb=short", "--color=no", "--reruns", "2"),
    *("-p", "moto_plugin", "-p", "no:cacheprovider", "-p", "no:kmqpy", "-p", "no:valkey"),
)
_FILES = ("tests/test_sqs/test_sqs.py", "tests/test_sqs/test_sqs_message_attributes.py")
_WHERE_MOTO_IS = "http://localhost:5000"
"""Its tests expect URLs of queues there."""


@pytest.fixture(scope="module")
def suite():
    """A folder with the tests."""
    folder = cache_folder() / f"{_MOTO}-sqs"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as made:
            fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "moto"]
            try:
                subprocess.run([*fetch, _MOTO, "--dest", made], check=True, capture_output=True, timeout=400)
            except subprocess.SubprocessError as error:
                pytest.skip(f"the package registry does not give moto's sdist: {error}")
            (sdist,) = Path(made).glob("*.tar.gz")
            with tarfile.open(sdist) as archive:
                for one in archive.getmembers():
                    one.name = one.name.partition("/")[2]
                    if one.name.startswith(_PARTS):
                        archive.extract(one, f"{made}/suite", filter="data")
            if not folder.exists():  # another worker may have been faster
                Path(made, "suite").rename(folder)
    return folder


def test_motos_suite(suite):
    with running(fresh_memory(), account=ACCOUNT, public_url=_WHERE_MOTO_IS) as served:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *_OPTIONS, "--rootdir", suite, *_FILES],
            cwd=suite,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHONDONTWRITEBYTECODE": "1",
                "AWS_ACCESS_KEY_ID": "x",
                "AWS_SECRET_ACCESS_KEY": "x",
                "AWS_DEFAULT_REGION": "us-east-1",
                "TEST_SERVER_MODE": "true",
                "TEST_SERVER_MODE_ENDPOINT": f"http://localhost:{served.gateway.port}",
                "MOTO_CALL_RESET_API": "false",
            },
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout
