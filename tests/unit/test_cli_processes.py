"""The command line in a process of its own: closed streams, missing extras."""

import subprocess
import sys

import pytest

from kmqpy.cli import output
from kmqpy.errors import MissingExtra

pytestmark = pytest.mark.usefixtures("own_environment")


class TestClosedStreams:
    @staticmethod
    def with_closed(stream, *args):
        main = [sys.executable, "-c", "from kmqpy.cli import main; main()", *args]
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {stream}', "sh", *main], capture_output=True, text=True, check=False
        )

    @pytest.mark.parametrize(
        "command", ["send q", "ack", "nack", "extend --lease 5s", "dead-letter", "queue delete q"]
    )
    def test_of_the_issue_stdin(self, command):
        done = self.with_closed("<&-", *command.split())
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith("kmq: error: ")
        assert done.stderr.count("\n") == 1

    def test_of_the_issue_stdout(self):
        assert self.with_closed(">&-", "--version").returncode == 0
        done = self.with_closed(">&-", "receive", "q")
        assert done.returncode == 2
        assert done.stderr.startswith("kmq: error: standard output is closed")

    def test_stderr(self):
        done = self.with_closed("2>&-", "ack", "zzz")
        assert (done.returncode, done.stdout, done.stderr) == (2, "", "")

    def test_connections_do_not_get_their_numbers(self):
        code = """if True:
            import os, sys
            import kmqpy.cli
            sys.argv = ["kmq", "--version"]
            try:
                kmqpy.cli.main()
            finally:
                sys.exit(0 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)"""
        shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
        assert subprocess.run(shell, check=False).returncode == 0

    def test_a_table_without_stdout(self, monkeypatch):
        monkeypatch.setattr("sys.stdout", None)
        output.replace_closed_streams()
        output.print_table(["a"], [[1]])
        output.print_json({})
        sys.stdout.close()


class TestWithoutTheExtra:
    @pytest.mark.parametrize("missing", ["click", "rich"])
    def test_it_says_the_one_line_to_run(self, missing):
        code = f"import sys; sys.modules['{missing}'] = None; from kmqpy.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr == f"kmq: error: {MissingExtra('cli', 'kmq')}\n"
        assert 'pip install "kmqpy[cli]"' in done.stderr

    @pytest.mark.parametrize(
        "command",
        [
            ["pipeline", "q", "--out", "o", "--schema", "id long"],
            ["spark-jars"],
            ["spark-state", "q", "--table", "t"],
            ["spark-tracker", "--queue", "q"],
        ],
    )
    def test_of_spark(self, command):
        code = (
            "import importlib.util, sys; importlib.util.find_spec = lambda name: None;"
            f"sys.argv[1:] = {command}; from kmqpy.cli import main; main()"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stdout == ""
        assert 'run: pip install "kmqpy[spark]"' in done.stderr
        assert done.stderr.count("\n") == 1
