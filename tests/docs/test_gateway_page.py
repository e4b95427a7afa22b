"""The calls that docs/gateway.md lists, on a gateway."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kmqpy.gateway.dialects.emodb import EmoDialect

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "gateway"))
from gateway_support import running  # noqa: E402

from kmqpy.testing import memory_storage  # noqa: E402

_PAGE = (ROOT / "docs" / "gateway.md").read_text()
_CALLS = re.findall(r"^\| .* \| `(curl .*)` \|$", _PAGE, re.MULTILINE)


@pytest.mark.parametrize("optional", [False, True], ids=["short", "long"])
def test_each_call_works_as_it_is_written(optional):
    with running(memory_storage()) as served:
        names = {
            "Q": f"localhost:{served.gateway.port}/queue/1",
            "J": "-HContent-Type:application/json",
            "ID": "",
            "MOVE": "",
        }
        for call in _CALLS:
            line = re.sub(r"\[(\?.*?)\]", r"\1" if optional else "", call)
            setting = "; ".join(f"{name}='{value}'" for name, value in names.items())
            done = subprocess.run(
                ["bash", "-c", f"{setting}; {line.replace('curl', 'curl -sS --fail-with-body', 1)}"],
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)
            if "/poll" in line:
                shown = json.loads(done.stdout)
                assert len(shown) == 5
                names["ID"] = shown[0]["id"]
            if "_move?" in line:
                names["MOVE"] = json.loads(done.stdout)["id"]


def test_all_calls_are_there():
    with running(memory_storage()) as served:
        dialect = served.gateway._app._dialects["/queue/1/"][2].__self__
        assert isinstance(dialect, EmoDialect)
        known = {*dialect._of_queue} - {""} | {"_sendbatch", "_move", "ping"}
    listed = {call for line in _CALLS for call in re.findall(r"\$Q/(?:jobs/)?(\w+)", line)}
    assert listed == known | {"mails"}
