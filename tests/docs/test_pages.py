"""Every code block of the README and the docs runs as its page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import RUN, Block, blocks, prompt_error
from tests.spark.sessions import CHEAP_QUERIES, SMALL

ROOT = Path(__file__).parents[2]
SLOW = {ROOT / "docs/spark.md"}
"""Pages that take minutes: `make test-docs` runs their blocks, CI too."""
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
UNTIL_A_CHILD_ENDS = "import os\nos.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)\n"
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if any(one.is_run for one in blocks(page.read_text()))
        and (page not in SLOW or "KMQ_TEST_SLOW_PAGES" in os.environ)
    ],
    ids=lambda p: p.stem,
)
def test_the_blocks_of_a_page(cluster, zookeeper, queue_name, tmp_path, page: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "KMQ_BOOTSTRAP": cluster.bootstrap,
        "KMQ_ZOOKEEPER": zookeeper.hosts,
        "KMQ_ROOT": f"/kmq-{queue_name}",
        "KMQ_TRACKER_HTTP_PORT": "0",
        "XDG_DATA_HOME": str(tmp_path),
        "PYTHONPATH": str(ROOT),
        "SPARK_CONF_DIR": str(tmp_path),
    }
    # Of use to the page about Spark only.
    small = "".join(f"{name} {value}\n" for name, value in {**SMALL, **CHEAP_QUERIES}.items())
    (tmp_path / "spark-defaults.conf").write_text(small)
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/docs/pages.py"), str(page)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
    finally:
        delete = [str(Path(sys.executable).with_name("kmq")), "queue", "delete", "jobs", "--yes"]
        subprocess.run(delete, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_is_not_run_says_why(page: Path) -> None:
    for block in blocks(page.read_text()):
        if block.language in RUN and not block.is_run:
            assert len(block.how) > len("not, because it"), f"line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_of_the_issue_each_block_can_be_pasted_at_pythons_prompt(page: Path) -> None:
    pasted = [one for one in blocks(page.read_text()) if one.language == "python"]
    assert [error for error in map(prompt_error, pasted) if error] == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("with a:\n    b()\n\n    c()\n", "line 8: unexpected indent:     c()"),
        ("with a:\n    b()\nc()\n", "line 7: invalid syntax: c()"),
        ("with a:\n    b()\n\n\nc()\n", None),
        ("with a:\n    b()\n", None),
    ],
)
def test_pythons_prompt_ends_a_statement_at_a_blank_line(code: str, error: str | None) -> None:
    assert prompt_error(Block(5, "python", code, "")) == error


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for link in _LINK.findall(re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in {_anchor(title) for title in _HEADING.findall(target.read_text())}, link


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")


def test_the_readme_is_short() -> None:
    assert len(PAGES[0].read_text().split()) <= 1_500


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("```sh\nfalse | true\n```\n", "line 2: exit code 1"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ('<!-- run: until "b" -->\n```python\nprint("a")\n```\n', "line 3: ended without printing b"),
        (
            f"<!-- run: in the background -->\n```sh\nexit 3\n```\n\n```python\n{UNTIL_A_CHILD_ENDS}```\n",
            "line 3: ended by itself, exit code 3",
        ),
        (
            '<!-- run: in the background once it prints "b" -->\n```sh\necho a\n```\n',
            "line 3: ended without printing b",
        ),
        ("<!-- run: perhaps -->\n```sh\ntrue\n```\n", "line 3: run: perhaps"),
    ],
)
def test_what_fails_is_named(tmp_path, page: str, problem: str) -> None:
    (tmp_path / "page.md").write_text(page)
    command = [sys.executable, str(ROOT / "tests/docs/pages.py"), str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert problem in done.stderr


def test_what_follows_waits_for_what_a_block_prints(tmp_path) -> None:
    background = (
        '<!-- run: in the background once it prints "made" -->\n```sh\ntouch a; echo made; sleep 50\n```\n'
    )
    (tmp_path / "page.md").write_text(f"{background}\n```sh\ntest -e a\n```\n")
    command = [sys.executable, str(ROOT / "tests/docs/pages.py"), str(tmp_path / "page.md")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=40, check=False)
    assert done.returncode == 0, done.stderr


def test_a_block_ends_by_ctrl_c_when_it_has_printed_its_text(tmp_path) -> None:
    code = "import time\nprint('a b')\ntime.sleep(50)\n"
    (tmp_path / "page.md").write_text(f'<!-- run: until "a b" -->\n```python\n{code}```\n')
    command = [sys.executable, str(ROOT / "tests/docs/pages.py"), str(tmp_path / "page.md")]
    assert subprocess.run(command, capture_output=True, timeout=40, check=False).returncode == 0
