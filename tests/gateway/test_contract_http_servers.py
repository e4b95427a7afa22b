"""The contract of all storages through a gateway over servers, whose clocks nobody moves."""

import pytest
from gateway_support import Served, threads_of_clients

from kmqpy.queue import storage_for
from kmqpy.testing.contract import *  # noqa: F403
from kmqpy.testing.contract import Target, counting, leases

_ALWAYS = (
    leases.test_a_message_is_redelivered_when_its_lease_is_over,
    counting.test_purge_removes_all_but_dead_letters,
    counting.test_dead_letters_are_redriven_as_new,
    counting.test_orphans_are_all_that_is_taken_and_not_finished,
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marks = () if metafunc.function in _ALWAYS else pytest.mark.breadth
    kinds = [pytest.param("postgresql", marks=marks), pytest.param("kafka", marks=pytest.mark.breadth)]
    metafunc.definition.add_marker(pytest.mark.parametrize("served", kinds, indirect=True))


@pytest.fixture
def kmq_target(served: Served) -> Target:
    return Target(open=lambda: storage_for(served.gateway.url), threads=threads_of_clients)
