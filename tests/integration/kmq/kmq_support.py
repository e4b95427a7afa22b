"""Runs the command `kmq` for tests."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

from kmqpy.cli.app import run

KMQ = str(Path(sys.executable).with_name("kmq"))
NOWHERE = "127.0.0.1:1"


class Kmq:
    """Runs `kmq` in this process; `process` runs it in one of its own."""

    def __init__(self, environment, capsys, monkeypatch):
        self.environment = environment
        self.capsys = capsys
        self.monkeypatch = monkeypatch

    def __call__(self, *args, stdin=None, code=0):
        """Standard output of a command that ends with `code`."""
        out, err = self.both(*args, stdin=stdin, code=code)
        if code == 0:
            assert err == ""
        return out

    def both(self, *args, stdin=None, code=0):
        if stdin is not None:
            data = stdin.encode() if isinstance(stdin, str) else stdin
            self.monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
        found = run([str(arg) for arg in args])
        shown = self.capsys.readouterr()
        assert found == code, shown
        return shown.out, shown.err

    def json(self, *args, **more):
        return json.loads(self(*args, "-o", "json", **more))

    def lines(self, *args, **more):
        return [json.loads(line) for line in self(*args, **more).splitlines()]

    def error(self, *args, stdin=None, code=2):
        """The one line on standard error of a command that fails."""
        out, err = self.both(*args, stdin=stdin, code=code)
        assert not out
        assert err.startswith("kmq: error: ")
        assert err.count("\n") == 1, err
        return err

    def process(self, *args, **more):
        return subprocess.Popen(
            [KMQ, *args],
            env={**os.environ, **self.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.PIPE,
            text=True,
            **more,
        )
