"""The order of messages with a key, and the waits of a worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_support import EXACT

from kmqpy.core.backoff import Backoff
from kmqpy.errors import ConfigError
from kmqpy.worker.keyed_fifo import KeyedFifo

pytestmark = pytest.mark.usefixtures("short_waits")


class TestKeyedFifo:
    @given(st.lists(st.one_of(st.none(), st.sampled_from([b"a", b"b", b"c"]))), st.randoms())
    def test_one_of_a_key_at_a_time_in_order_and_none_is_forgotten(self, keys, chance):
        lanes: KeyedFifo[tuple[bytes | None, int]] = KeyedFifo()
        todo = list(enumerate(keys))
        running: list[tuple[bytes | None, int]] = []
        started: list[tuple[bytes | None, int]] = []
        while todo or running or len(started) < len(keys):
            if todo and chance.random() < 0.5:
                number, key = todo.pop(0)
                lanes.add(key, (key, number))
            elif running and chance.random() < 0.5:
                lanes.done(running.pop(chance.randrange(len(running)))[0])
            elif (item := lanes.start()) is not None:
                running.append(item)
                started.append(item)
            busy = [key for key, _ in running if key is not None]
            assert len(busy) == len(set(busy))
        assert sorted(number for _, number in started) == list(range(len(keys)))
        for key in (b"a", b"b", b"c"):
            order = [number for one, number in started if one == key]
            assert order == sorted(order)

    def test_an_item_of_another_key_is_not_held_up(self):
        lanes: KeyedFifo[int] = KeyedFifo()
        for key, item in ((b"a", 1), (b"a", 2), (b"b", 3)):
            lanes.add(key, item)
        assert (lanes.start(), lanes.start(), lanes.start()) == (1, 3, None)
        lanes.done(b"a")
        assert lanes.start() == 2

    def test_cut_returns_the_last_and_leaves_the_first(self):
        lanes: KeyedFifo[int] = KeyedFifo()
        assert (lanes.first(), lanes.cut(1)) == (None, [])
        for item in range(5):
            lanes.add(None, item)
        assert (lanes.count(), lanes.first()) == (5, 0)
        assert (lanes.cut(2), lanes.cut(2), lanes.count()) == ([4, 3, 2], [], 2)
        assert (lanes.start(), lanes.start(), lanes.start()) == (0, 1, None)

    def test_clear_returns_what_was_not_started(self):
        lanes: KeyedFifo[int] = KeyedFifo()
        for key, item in ((b"a", 1), (b"a", 2), (b"b", 3), (b"b", 4), (None, 5)):
            lanes.add(key, item)
        assert lanes.start() == 1
        assert sorted(lanes.clear()) == [2, 3, 4, 5]
        lanes.done(b"a")
        lanes.add(b"a", 6)
        lanes.add(b"b", 7)
        assert (lanes.start(), lanes.start(), lanes.start()) == (6, 7, None)


class TestBackoff:
    def test_it_grows_up_to_its_maximum(self):
        assert [EXACT.delay(attempts) for attempts in (1, 2, 3, 4, 5, 10**6)] == [0.5, 1, 2, 4, 4, 4]

    @given(st.integers(1, 100), st.floats(0, 1))
    def test_jitter_stays_around_it_and_below_the_maximum(self, attempts, jitter):
        plain = EXACT.delay(attempts)
        delay = Backoff(0.5, 2, 4, jitter).delay(attempts)
        assert plain * (1 - jitter) <= delay <= min(4, plain * (1 + jitter))

    @pytest.mark.parametrize(
        "bad", [{"first": -1}, {"maximum": -1}, {"factor": 0.5}, {"factor": float("nan")}, {"jitter": 2}]
    )
    def test_bad_numbers_are_refused_by_name(self, bad):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Backoff(**bad)
