"""`make chaos` with --gateways and --sqs in small."""

import uuid

import pytest

from . import gateways, sqs

pytestmark = pytest.mark.breadth


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("chaos", "count"), [(gateways, 800), (sqs, 300)])
def test_killed_gateways_lose_nothing(database_url, tmp_path, chaos, count):
    """One of two is killed, and all connections to the database are cut, while clients send and receive."""
    database = database_url("postgresql")
    url = f"{database}?prefix=chaos_{uuid.uuid4().hex[:8]}_"
    told = []
    cuts = []

    def cut() -> None:
        gateways.cut_connections(database)
        cuts.append(1)

    problems = chaos.run_on(url, cut, count, 1, tmp_path, told.append, gateways.SMALL)
    assert problems == [], "\n".join(told)
    assert cuts
