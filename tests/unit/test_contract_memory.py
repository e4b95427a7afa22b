"""The contract of all storages, on memory with a clock that the tests move."""

import dataclasses

import pytest

from kmqpy.queue import Capabilities
from kmqpy.storages.memory import MemoryEngine
from kmqpy.storages.stored_storage import StoredStorage
from kmqpy.testing import ManualClock
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target

ALL = MemoryEngine().capabilities
BARE = Capabilities(**dict.fromkeys((field.name for field in dataclasses.fields(Capabilities)), False))


@pytest.fixture(params=["all", "bare"])
def kmq_target(request) -> Target:
    """Memory, and a storage that can do nothing beyond what all must."""
    clock = ManualClock()
    can = ALL if request.param == "all" else dataclasses.replace(BARE, max_body_bytes=2**20)
    engine = MemoryEngine(clock, patience=0.02, capabilities=can)
    return Target(
        open=lambda: StoredStorage(engine, clock=clock),
        pass_time=clock.advance,
        real_time=False,
        open_with_clock=lambda other: StoredStorage(engine, clock=other),
    )
