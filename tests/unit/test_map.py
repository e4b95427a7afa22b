"""docs/map.md names files and folders that exist, and every room."""

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


def test_every_room_is_on_the_map():
    rooms = {path.rpartition("/")[0] for path in of_the_tree() if path.endswith(".py")} - {"/kmqpy"}
    tables = TEXT.partition("## Rooms")[2].partition("## Which file")[0]
    named = {name.rpartition("/")[2] for name in re.findall(r"`([a-z_/]+)`", tables)}
    assert len(rooms) > 20
    assert [room for room in sorted(rooms) if room.rpartition("/")[2] not in named] == []
