"""The wheel and the image in environments of their own: far from the clone, and without one extra or all."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from tests.packaging.release import FOR_DEVELOPERS, check_wheel

pytestmark = pytest.mark.breadth

ROOT = Path(__file__).parents[2]

EACH_MODULE = """
import importlib, pkgutil, kmqpy, tracker
from kmqpy.errors import MissingExtra
for package in (kmqpy, tracker):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + ".", onerror=lambda name: None):
        try:
            importlib.import_module(module.name)
        except MissingExtra:
            pass
        except ImportError as error:
            print(module.name, error.name)
"""
"""Prints each module that can't be imported, and the package that it lacks, if it names no extra."""

MAY_LACK = {
    "django": ("kmqpy.contrib.django",),
    "click": ("kmqpy.cli.", "tracker.command", "tracker.spark.command"),
    "pyarrow": ("tracker.spark.",),
    "pytest": ("kmqpy.testing.", "kmqpy.pytest_plugin"),
    "redis": ("kmqpy.storages.redis.",),
    "sqlalchemy": ("kmqpy.storages.sql.",),
    "psycopg": ("kmqpy.storages.sql.",),
    "pymysql": ("kmqpy.storages.sql.",),
    **dict.fromkeys(("httptools", "starlette", "uvicorn", "uvloop"), ("kmqpy.gateway.",)),
    "msgspec": ("kmqpy.gateway.", "kmqpy.queue.shapes", "kmqpy.storages.http."),
}
"""Modules that are imported only once the package is known to be there."""

SASL = """
from kmqpy import ZooKeeperConnection
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperSecurity
security = ZooKeeperSecurity(username="u", password="p", scheme="sasl")
connect(ZooKeeperConnection(hosts="127.0.0.1:1", security=security)).__enter__()
"""

NEEDING_AN_EXTRA = {
    "sql": "kmqpy.queue_for('sqlite:///jobs.db?queue=jobs')",
    "redis": "kmqpy.queue_for('redis://localhost/0?queue=jobs')",
    "http": "kmqpy.queue_for('http://localhost:8080?queue=jobs')",
    "sasl": SASL,
    "spark": "import kmqpy.spark",
    "otel": "import kmqpy.telemetry.opentelemetry",
    "dev": "from kmqpy.dev import Cluster; Cluster().__enter__()",
}


class Environment:
    """A new virtual environment with the wheel, used from a folder with a `tracker.py` of the user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "project"
        self.folder.mkdir()
        (self.folder / "tracker.py").write_text("raise SystemExit('the tracker.py of the user')\n")
        venv.create(folder / "venv", symlinks=True)
        self._programs = folder / "venv" / "bin"

    @property
    def interpreter(self) -> Path:
        return self._programs / "python"

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._run("python", "-W", "error", "-c", code)

    def kmq(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run("kmq", *arguments)

    def _run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "COV_"))}
        return subprocess.run(
            [self._programs / program, *arguments],
            cwd=self.folder,
            # Neither Java nor jars that were fetched before.
            env={
                **kept,
                "PYTHONPATH": str(self.folder),
                "PATH": str(self._programs),
                "KMQ_CACHE": str(self.folder),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip("wheel", ROOT, "--no-deps", "--no-build-isolation", "--wheel-dir", folder)
    (made,) = folder.glob("kmqpy-*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Environment:
    """Has the wheel without extras."""
    made = Environment(tmp_path_factory.mktemp("bare"))
    pip("--python", made.interpreter, "install", wheel)
    return made


class Image(Environment):
    """Has what the steps of the Dockerfile install, run without an engine of containers."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.application = folder / "app"
        self.application.mkdir()
        pip = self._programs / "pip"  # ours, installing there: quicker than another one
        pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {self.interpreter} "$@"\n')
        pip.chmod(0o755)
        text = re.sub(r"\\\n", "", (ROOT / "Dockerfile").read_text())
        steps = [line.split(" ", 1) for line in text.splitlines() if re.match("[A-Z]+ ", line)]
        self.last = dict(steps)
        """The last of each kind of instruction."""
        for instruction, what in steps:
            if instruction == "COPY":
                self._copy(*what.split())
            elif instruction == "RUN":
                self._step(what)

    def _copy(self, *places: str) -> None:
        *sources, target = places
        for source in sources:
            if (ROOT / source).is_dir():
                compiled = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, self.application / target, ignore=compiled)
            else:
                shutil.copy(ROOT / source, self.application / target)

    def _step(self, command: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("KMQ_", "PYTHON"))}
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=self.application,
            env={**kept, "PATH": f"{self._programs}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def with_cli(wheel, tmp_path_factory) -> Environment:
    """Has the wheel with the extra cli."""
    made = Environment(tmp_path_factory.mktemp("with-cli"))
    pip("--python", made.interpreter, "install", f"{wheel}[cli]")
    return made


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Image:
    return Image(tmp_path_factory.mktemp("image"))


def test_every_public_name_can_be_imported_without_extras(bare, wheel):
    done = bare.python("from kmqpy import *; import kmqpy; print(kmqpy.__version__, kmqpy.__file__)")
    version, file = done.stdout.split()
    assert version == wheel.name.split("-")[1]
    assert not Path(file).is_relative_to(ROOT)


def metadata(wheel: Path) -> Message:
    with ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel):
    files = [path for name in ("kmqpy", "tracker") for path in (ROOT / name).rglob("*") if path.is_file()]
    ours = [str(path.relative_to(ROOT)) for path in files if "__pycache__" not in path.parts]
    check_wheel(wheel, ours)
    assert {"kmqpy/py.typed", "kmqpy/storages/redis/functions.lua", "kmqpy/dev/jars.json"} <= {*ours}


def test_the_wheel_says_what_it_is(wheel):
    about = metadata(wheel)
    assert about.get_all("Project-URL") == ["Protocol, https://github.com/softwaremill/kmq"]
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    assert about.get_payload(decode=True).decode() == (ROOT / "README.md").read_text()


def test_every_extra_that_users_need_has_a_test_without_it(wheel):
    # Below, and in tests/spark/test_iceberg.py: it needs the extra spark, too.
    elsewhere = {"cli", "gateway", "iceberg"}
    assert set(metadata(wheel).get_all("Provides-Extra")) - FOR_DEVELOPERS == {*NEEDING_AN_EXTRA, *elsewhere}


def test_the_extras_that_the_readme_installs_are_there(wheel):
    installed = re.findall(r'pip install -e "\.\[(.+)\]"', (ROOT / "README.md").read_text())
    extras = {extra for one in installed for extra in one.split(",")}
    assert {"cli", "dev", "sql"} <= extras <= set(metadata(wheel).get_all("Provides-Extra"))


def test_what_the_demo_installs_stays_when_the_rest_is_added():
    """Else `make test` would change the versions in the environment of `make demo`."""
    demo, whole = (
        {*re.findall(r"^\S+==\S+", (ROOT / f"requirements{which}.lock").read_text(), re.MULTILINE)}
        for which in ("-dev", "")
    )
    assert len(demo) > 20
    assert demo <= whole


def test_each_module_lacks_nothing_but_extras(bare):
    # Without the user's `tracker.py`, which a plain `import tracker` finds first.
    done = bare.python("import sys; del sys.path[:2]" + EACH_MODULE)  # '', PYTHONPATH
    lacking = [line.split() for line in done.stdout.splitlines()]
    assert [one for one in lacking if not one[0].startswith(MAY_LACK.get(one[1], "?"))] == [], done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("extra", NEEDING_AN_EXTRA)
def test_what_needs_an_extra_names_it(bare, extra):
    done = bare.python(f"import kmqpy; {NEEDING_AN_EXTRA[extra]}")
    last = done.stderr.strip().rpartition("\n")[2]
    assert last.startswith("kmqpy.errors.MissingExtra:"), done.stderr
    assert f'pip install "kmqpy[{extra}]"' in last


def test_a_queue_in_memory_needs_no_extra(bare):
    opened = "import kmqpy; queue = kmqpy.queue_for('memory:?queue=jobs'); "
    assert bare.python(opened + "queue.send(b'one'); print(queue.receive()[0].body)").stdout == "b'one'\n"


def test_the_command_names_its_extra(bare):
    done = bare.kmq("--help")
    assert done.returncode == 2
    assert done.stderr.startswith('kmq: error: kmq needs an extra; run: pip install "kmqpy[cli]"')


def test_the_commands_of_trackers_are_ours_beside_a_tracker_of_the_user(image):
    done = image.kmq("tracker", "--help")
    assert "how soon others replace a killed tracker" in " ".join(done.stdout.split()), done.stderr


@pytest.mark.parametrize(
    ("extra", "arguments"),
    [
        ("spark", ["spark-tracker", "--trackers", "1"]),
        ("spark", ["spark-jars"]),
        ("spark", ["pipeline", "jobs", "--schema", "id long", "--out", "rows"]),
        ("dev", ["dev", "up"]),
        ("dev", ["demo"]),
        ("sql", ["--queue-url", "sqlite:///jobs.db", "queue", "list"]),
        ("redis", ["--queue-url", "redis://127.0.0.1:1/0", "queue", "list"]),
        ("gateway", ["gateway"]),
        ("gateway", ["key", "list"]),
    ],
)
def test_a_command_that_needs_another_extra_names_it(with_cli, extra, arguments):
    done = with_cli.kmq(*arguments)
    assert done.returncode == 2
    assert f'pip install "kmqpy[{extra}]"' in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_dockerfile_runs_installs_a_tracker_and_a_gateway(image):
    (program,) = json.loads(image.last["ENTRYPOINT"])
    assert program == "kmq"
    assert "tracker" in image.kmq(*json.loads(image.last["CMD"])).stdout
    for file, option in (("trackers.yaml", "--http-host"), ("gateways/gateways.yaml", "--admin-port")):
        resources = yaml.safe_load_all((ROOT / "deploy/kubernetes" / file).read_text())
        (deployment,) = (one for one in resources if one["kind"] == "Deployment")
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert option in image.kmq(*container["args"], "--help").stdout
    imports = "import kmqpy.gateway.run, kmqpy.storages.redis, kmqpy.storages.sql"
    assert image.python(imports).returncode == 0
    assert (image.application / "keys").stat().st_mode & 0o1777 == 0o1777
    assert not (image.application / "constraints.txt").exists()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    if image.last["FROM"] == f"python:{version}-slim":  # else wheels of another Python were tried
        assert image.python("import puresasl, kazoo, confluent_kafka").returncode == 0
