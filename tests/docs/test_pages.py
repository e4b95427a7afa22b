"""Every code block of the README and the docs runs as its page says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import RUN, blocks

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.is_run for one in blocks(page.read_text()))],
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
        "PYTHONPATH": str(ROOT),
    }
    try:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests/docs/pages.py"), str(page)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
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
