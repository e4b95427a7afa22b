"""A database of each kind, and a queue in it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sql_support import Place

from kmqpy.queue import Queue


@pytest.fixture(params=["sqlite", "postgresql", "mariadb", pytest.param("mysql", marks=pytest.mark.breadth)])
def place(
    request: pytest.FixtureRequest, database_url: Callable[[str], str], tmp_path: Path
) -> Iterator[Place]:
    name = request.param
    made = Place(name, f"sqlite:///{tmp_path}/queues.db" if name == "sqlite" else database_url(name))
    yield made
    made.drop()


@pytest.fixture
def queue(place: Place) -> Iterator[Queue]:
    with place.queue() as made:
        yield made
