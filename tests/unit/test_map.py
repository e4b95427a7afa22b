"""docs/map.md names files and folders that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "map.md").read_text()


def of_the_tree():
    """Paths of files and folders of kmqpy and tracker, from the root."""
    return [
        "/" + str(path.relative_to(ROOT))
        for room in ("kmqpy", "tracker")
        for path in (ROOT / room).rglob("*")
    ]


def test_every_room_and_file_of_the_map_exists():
    named = set(re.findall(r"`([a-z_/]+\.(?:py|lua))`", TEXT)) | set(
        re.findall(r"`((?:kmqpy|tracker)/[a-z_/]+)`", TEXT)
    )
    named |= set(re.findall(r"`([a-z_]+/[a-z_/]*)`", TEXT))
    assert len(named) > 60
    tree = of_the_tree()
    assert [
        name for name in sorted(named) if not any(path.endswith("/" + name.strip("/")) for path in tree)
    ] == []
