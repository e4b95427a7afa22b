"""How long a queue holds back what failed: by the settings, and by whom it is tried again."""

import pytest

from kmqpy.core.retries import Retries, normal
from kmqpy.errors import ConfigError
from kmqpy.storages.settings import StoredQueueSettings
from kmqpy.testing import ManualClock, memory_storage


def test_the_last_delay_goes_for_all_that_follow():
    retries = Retries.of(["0s", "500ms", "1m"], None, 0, 10**9)
    assert [retries.delay_ms(requeues) for requeues in range(5)] == [0, 500, 60_000, 60_000, 60_000]
    assert Retries.of([], None, 0, 10**9).delay_ms(3) == 0


def test_with_a_maximum_delays_grow_up_to_it():
    retries = Retries.of(["1s", "3s"], 20_000, 0, 10**9)
    assert [retries.delay_ms(requeues) for requeues in range(7)] == [
        *(1_000, 3_000, 6_000, 12_000, 20_000, 20_000, 20_000)
    ]


def test_jitter_only_shortens():
    found = [Retries.of(["10s"], None, 0.5, 10**9).delay_ms(0) for _ in range(200)]
    assert 5_000 <= min(found) < 6_500 < 8_500 < max(found) <= 10_000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((["1s"], None, 1.1, 10**9), "retry_jitter"),
        ((["soon"], None, 0, 10**9), "retry_delays"),
        ((["2s"], None, 0, 1_000), "max_delay_ms"),
        (([], 1_000, 0, 10**9), "retry_max_ms"),
        ((["0s"], 1_000, 0, 10**9), "retry_max_ms"),
        ((["400d"], None, 0, 2**62), "retry_delays"),
    ],
)
def test_wrong_ones_are_refused_by_name(arguments, named):
    with pytest.raises(ConfigError, match=named):
        Retries.of(*arguments)


def test_settings_say_the_same_however_they_are_written():
    assert normal(["1000ms", "60s", "1.5s", "0m", "48h"]) == ("1s", "1m", "1500ms", "0s", "2d")
    made = StoredQueueSettings.of("q", {"retry_delays": "60s, 1h"})
    assert StoredQueueSettings.from_json(made.to_json(), "q") == made


def test_an_ended_lease_is_followed_by_a_delay():
    clock = ManualClock()
    with memory_storage(clock) as storage:
        storage.create("q", lease_ms=1_000, retry_delays=["1m"])
        queue = storage.open("q")
        queue.send("x")
        queue.receive()
        clock.advance(2)
        assert queue.receive(wait=0) == []
        clock.advance(60)
        assert queue.receive()[0].attempts == 2
