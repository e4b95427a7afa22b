"""Many trackers' real leaderships on a ZooKeeper in memory: what each of them asks of it."""

import pytest

from benchmarks.scale import steps
from benchmarks.scale_worlds import Simulation

PARTITIONS, TRACKERS = 240, 12


@pytest.fixture(scope="module")
def world():
    world = Simulation(3, PARTITIONS)
    world.join(TRACKERS)
    world.settle()
    return world


def test_every_partition_has_one_owner(world):
    assert len(world.owners()) == PARTITIONS
    assert sum(len(member.snapshot().owned) for member in world.members.values()) == PARTITIONS


def test_a_tracker_watches_what_concerns_it(world):
    """Members, queues, and of the partitions its own and those it stands in for."""
    leaders = sum(len(watches) for path, watches in world.server.watches.items() if path.endswith("/leader"))
    assert leaders == 3 * PARTITIONS


def test_in_steady_state_a_session_is_verified_and_nothing_else_asked():
    found = steps(Simulation(3, PARTITIONS), TRACKERS, killed=2)
    steady = found["steady, without offsets"]
    assert steady["syncs"] == steady["reads"] == TRACKERS * steady["seconds"] / 1.5
    assert steady["writes"] == steady["multis"] == 0
    once = found["every offset once"]
    assert (once["multis"], once["writes in multis"]) == (TRACKERS, PARTITIONS + TRACKERS)
    assert found["2 die"]["moved"] >= found["2 die"]["must move"] > 0
