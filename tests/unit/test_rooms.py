"""Every room has tests that `make test-room` finds."""

import pytest

from tests import rooms


def test_each_room_has_tests_that_are_there():
    folders = {file.parent for top in ("kmqpy", "tracker") for file in (rooms.ROOT / top).rglob("*.py")}
    missing = [
        one
        for room in folders
        for one in rooms.tests_of(str(room.relative_to(rooms.ROOT)))
        if not (rooms.ROOT / one).exists()
    ]
    assert missing == []
    assert {room for room in rooms.IN_USE if not (rooms.ROOT / room).is_dir()} == set()


@pytest.mark.parametrize("room", ["", "foo", "kmqpy/nope", "tests/unit"])
def test_a_room_that_there_is_not_names_one(room, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["rooms", *room.split()])
    with pytest.raises(SystemExit):
        rooms.main()
    told = f"ROOM: {room!r} is not a folder of kmqpy or tracker: use for example kmqpy/"
    assert told in capsys.readouterr().err


def test_those_who_import_a_room_are_its_tests():
    found = rooms.tests_of("kmqpy/storages/sql")
    assert "tests/unit/test_sql_statements.py" in found
    assert "tests/integration/sql_storage/test_sql.py" in found
    assert "tests/unit/test_redis_rows.py" not in found
