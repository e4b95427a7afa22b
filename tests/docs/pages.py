"""Runs the code blocks of a page, in their order, as a reader would who pastes them one after the other.

    python tests/docs/pages.py PAGE

Blocks of `sh` run in bash, those of `python` in this process, with the names of the blocks before them.
Blocks of other languages are not run. A comment before a block says how it is treated:

    <!-- run: not, because … -->
    <!-- run: in the background -->           until the page ends
    <!-- run: in the background once it prints "hello" -->   what follows waits for that
    <!-- run: until "hello" -->               of `python`: Ctrl-C when it has printed that
"""

import codeop
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kmqpy.dev.ports import free_ports

_BLOCK = re.compile(
    r"^(?:<!-- run: (?P<how>.*?) -->\n+)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
_UNTIL = re.compile(r'until "(.+)"')
_BACKGROUND = re.compile(r'in the background(?: once it prints "(.+)")?')
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
            not how or how.startswith("not, because ") or _BACKGROUND.fullmatch(how) or _UNTIL.fullmatch(how)
        )
        if not known:
            raise ValueError(f"line {line}: run: {how}")
        yield Block(line, found["language"], found["code"], how)


def prompt_error(block: Block) -> str | None:
    """The error of a reader who pastes the block at Python's prompt, where a blank line ends a statement."""
    compiler = codeop.CommandCompiler()
    statement = ""
    for number, line in enumerate([*block.code.splitlines(), ""], block.line):
        statement += f"{line}\n"
        try:
            complete = compiler(statement.removesuffix("\n"), symbol="single")
        except SyntaxError as error:
            return f"line {number}: {error.msg}: {line}"
        if complete:
            statement = ""
    return None


def run(page: Path) -> None:
    """Run the blocks of a page; raises what the first one raises that fails."""
    names: dict[str, Any] = {"__name__": "__main__"}
    with ExitStack() as background:
        for block in blocks(_on_a_free_port(page.read_text())):
            if not block.is_run:
                continue
            print(f"--- {page.name}, line {block.line}", flush=True)
            if block.language == "python":
                _run_python(block, page, names)
            elif found := _BACKGROUND.fullmatch(block.how):
                process = _start(block)
                _wait_for(found[1], block, process)
                background.callback(_end, block, process)
            else:
                _run_shell(block)


def _on_a_free_port(text: str) -> str:
    """The page with another port for the gateway: something else may have the usual one."""
    (port,) = free_ports(1)
    text = text.replace("\nkmq gateway\n", f"\nkmq gateway --port {port} --admin-port 0\n")
    return text.replace("localhost:8080", f"localhost:{port}")


def _run_python(block: Block, page: Path, names: dict[str, Any]) -> None:
    code = compile("\n" * (block.line - 1) + block.code, page.name, "exec")
    until = _UNTIL.fullmatch(block.how)
    if until is None:
        exec(code, names)
        return
    output = _Watched(until[1])
    with redirect_stdout(output), suppress(KeyboardInterrupt):  # type: ignore[type-var]
        exec(code, names)
    if not output.found:
        raise SystemExit(f"line {block.line}: ended without printing {until[1]}")


class _Watched:
    """Standard output; the first time a text is printed, the main thread gets a Ctrl-C."""

    def __init__(self, text: str) -> None:
        self.found = False
        self._text = text
        self._printed = ""

    def write(self, text: str) -> int:
        self._printed += text
        if not self.found and self._text in self._printed:
            self.found = True
            os.kill(os.getpid(), signal.SIGINT)
        return sys.__stdout__.write(text)  # type: ignore[union-attr]

    def flush(self) -> None:
        sys.__stdout__.flush()  # type: ignore[union-attr]


def _run_shell(block: Block) -> None:
    if code := _start(block).wait():
        raise SystemExit(f"line {block.line}: exit code {code}")


def _start(block: Block) -> "subprocess.Popen[bytes]":
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    in_background = _BACKGROUND.fullmatch(block.how)
    output = subprocess.PIPE if in_background and in_background[1] else None
    return subprocess.Popen(command, start_new_session=True, stdout=output)


def _wait_for(text: str | None, block: Block, process: "subprocess.Popen[bytes]") -> None:
    """Return when the process has printed the text; what it prints then is dropped."""
    if text is None:
        return
    assert process.stdout is not None
    for line in process.stdout:
        print(line.decode(), end="", flush=True)
        if text in line.decode():
            threading.Thread(target=process.stdout.read, daemon=True).start()
            return
    raise SystemExit(f"line {block.line}: ended without printing {text}")


def _end(block: Block, process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is not None:
        raise SystemExit(f"line {block.line}: ended by itself, exit code {process.returncode}")
    os.killpg(process.pid, signal.SIGINT)
    process.wait(60)


if __name__ == "__main__":
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # else ignored where the tests run in the background
    run(Path(sys.argv[1]))
