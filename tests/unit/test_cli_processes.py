"""The command line in a process of its own: closed streams, missing extras."""

import re
import subprocess
import sys

import pytest

from kmqpy.cli import output
from kmqpy.errors import MissingExtra

pytestmark = pytest.mark.usefixtures("own_environment")


def one_after_another(lines):
    """A program that is `kmq` with each of these arguments, and prints the exit codes to stderr."""
    return f"""if True:
        import sys
        from kmqpy.cli import main
        for line in {lines}:
            sys.argv[1:] = line.split()
            try:
                main()
            except SystemExit as end:
                print("exit code", end.code, file=sys.stderr)"""


class TestClosedStreams:
    @staticmethod
    def with_closed(stream, *args):
        main = [sys.executable, "-c", "from kmqpy.cli import main; main()", *args]
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {stream}', "sh", *main], capture_output=True, text=True, check=False
        )

    def test_of_the_issue_stdin(self):
        lines = ["send q", "ack", "nack", "extend --lease 5s", "dead-letter", "queue delete q"]
        kmq = [sys.executable, "-c", one_after_another(lines)]
        shell = ["sh", "-c", 'exec "$@" <&-', "sh", *kmq]
        done = subprocess.run(shell, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        assert re.fullmatch(r"(kmq: error: .+\nexit code 2\n){6}", done.stderr), done.stderr

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

    def test_of_spark(self):
        lines = [
            "pipeline q --out o --schema id",
            "spark-jars",
            "spark-state q --table t",
            "spark-tracker --queue q",
        ]
        without_spark = "import importlib.util; importlib.util.find_spec = lambda name: None"
        code = f"{without_spark}\n{one_after_another(lines)}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.stdout == ""
        told = r'kmq: error: .+run: pip install "kmqpy\[spark\]".*\nexit code 2\n'
        assert re.fullmatch(f"({told}){{4}}", done.stderr), done.stderr
