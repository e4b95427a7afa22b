"""Runs the code blocks of a page, in their order, as a reader would who pastes them one after the other.

    python tests/docs/pages.py PAGE

Blocks of `sh` run in bash, those of `python` in this process, with the names of the blocks before them.
Blocks of other languages are not run. A comment before a block says how it is treated:

    <!-- run: not, because … -->
    <!-- run: in the background -->           until the page ends
    <!-- run: for 3 s -->                     then Ctrl-C
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = re.compile(
    r"^(?:<!-- run: (?P<how>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FOR = re.compile(r"for (\d+) s")
RUN = ("sh", "python")


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page.

    line  its first line in the page
    how   the comment before it
    """

    line: int
    language: str
    code: str
    how: str

    @property
    def is_run(self) -> bool:
        """True unless the comment, or the language, says otherwise."""
        return self.language in RUN and not self.how.startswith("not, because ")


def blocks(page: str) -> Iterator[Block]:
    """The code blocks of a page; raises ValueError for a comment that says nothing known."""
    for found in _BLOCK.finditer(page):
        line, how = page.count("\n", 0, found.start("code")) + 1, found["how"] or ""
        known = (
            not how or how == "in the background" or how.startswith("not, because ") or _FOR.fullmatch(how)
        )
        if not known:
            raise ValueError(f"line {line}: run: {how}")
        yield Block(line, found["language"], found["code"], how)


def run(page: Path) -> None:
    """Run the blocks of a page; raises what the first one raises that fails."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as background:
        for block in blocks(page.read_text()):
            if not block.is_run:
                continue
            print(f"--- {page.name}, line {block.line}", flush=True)
            if block.language == "python":
                _run_python(block, page, names)
            elif block.how == "in the background":
                background.callback(_end, _start(block))
            else:
                _run_shell(block)


def _run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    code = compile("\n" * (block.line - 1) + block.code, page.name, "exec")
    seconds = _seconds(block)
    if seconds is None:
        exec(code, names)
        return
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        exec(code, names)
    except KeyboardInterrupt:
        pass
    finally:
        timer.cancel()


def _run_shell(block: Block) -> None:
    process = _start(block)
    try:
        code = process.wait(_seconds(block))
    except subprocess.TimeoutExpired:
        _end(process)
        return
    if code:
        raise SystemExit(f"line {block.line}: exit code {code}")


def _start(block: Block) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(["bash", "-euo", "pipefail", "-c", block.code], start_new_session=True)


def _end(process: "subprocess.Popen[bytes]") -> None:
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)


def _seconds(block: Block) -> int | None:
    found = _FOR.fullmatch(block.how)
    return int(found[1]) if found else None


if __name__ == "__main__":
    run(Path(sys.argv[1]))
