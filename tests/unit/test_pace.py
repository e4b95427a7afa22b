"""When handlers may start, by rate and breaker; the times are made up."""

import math

import pytest

from kmqpy.errors import ConfigError
from kmqpy.worker.pace import Breaker, Pace, rate_of


def begun(pace, until, step=0.001):
    """How many handlers start from 0 to `until`, if somebody looks each `step`."""
    count = 0
    for tick in range(round(until / step)):
        while pace.wait_s(tick * step) == 0:
            pace.begin(f"m{count}")
            count += 1
    return count


class TestRate:
    @pytest.mark.parametrize(
        ("text", "per_s"),
        [("100/s", 100), ("30/min", 0.5), ("36/h", 0.01), ("0.5/s", 0.5), (7, 7), (0.25, 0.25)],
    )
    def test_it_is_written_so(self, text, per_s):
        assert rate_of(text) == pytest.approx(per_s)

    @pytest.mark.parametrize(
        "wrong",
        ["", "100", "0/s", "-1/s", "1/day", "1e3/s", 0, -1, True, math.inf, 10**400, math.nan, None, b"1/s"],
    )
    def test_anything_else_is_refused(self, wrong):
        with pytest.raises(ConfigError, match=r"^rate: .*100/s"):
            rate_of(wrong)

    @pytest.mark.parametrize(("rate", "seconds"), [(1, 30), (100, 10), (1000, 3), (0.1, 60)])
    @pytest.mark.parametrize("step", [0.001, 0.02])
    def test_so_many_start_and_no_more(self, rate, seconds, step):
        burst = max(1, rate * 0.05)
        assert (
            rate * seconds * 0.99 - 1 <= begun(Pace(rate, None, 0), seconds, step) <= rate * seconds + burst
        )

    def test_what_nobody_used_is_not_saved_up(self):
        pace = Pace(10, None, 0)
        assert pace.wait_s(1000) == 0
        pace.begin("m")
        assert pace.wait_s(1000) == pytest.approx(0.1)

    def test_no_more_wait_than_start_in_a_second(self):
        assert Pace(5, None, 0).room(100, 2, 0) == 3
        assert Pace(0.1, None, 0).room(100, 1, 0) == 0
        slow = Pace(0.1, None, 0)
        slow.begin("m")
        assert [slow.room(100, 0, now) for now in (0, 8.9, 9.1)] == [0, 0, 1]
        assert Pace(None, Breaker(), 0).room(100, 50, 0) == 100


class TestBreaker:
    def opened(self, now=0.0, **settings):
        pace = Pace(None, Breaker(failures=3, **settings), now)
        for number in range(3):
            assert not pace.is_open
            assert pace.end(f"m{number}", OSError(), now) is None
        assert pace.is_open
        return pace

    def test_it_opens_when_different_messages_fail_in_a_row(self):
        self.opened()

    def test_one_message_that_fails_does_not_open_it(self):
        pace = Pace(None, Breaker(failures=3), 0)
        for _ in range(50):
            pace.end("poison", OSError(), 0)
        assert not pace.is_open

    def test_between_failures_it_does_not_open(self):
        pace = Pace(None, Breaker(failures=3, on=OSError), 0)
        for number in range(50):
            pace.end(
                f"m{number}", (None if number % 4 == 0 else ValueError()) if number % 2 else OSError(), 0
            )
        assert not pace.is_open

    def test_while_it_is_open_one_message_is_tried_after_each_pause(self):
        pace = self.opened(pause=1, max_pause=3)
        now, tries = 0.0, []
        for number in range(6):
            assert pace.room(50, 0, now + 0.01) == 0
            now += pace.wait_s(now)
            tries.append(now)
            assert pace.room(50, 0, now) == 1
            assert pace.room(50, 1, now) == 0
            pace.begin(f"t{number}")
            assert pace.wait_s(now) == math.inf
            assert pace.room(50, 0, now) == 0
            assert pace.end(f"t{number}", OSError(), now) == 1 + (2 if number == 0 else 3)
        assert tries == [1, 3, 6, 9, 12, 15]

    def test_what_was_tried_before_does_not_keep_others_away(self):
        pace = self.opened(pause=1, max_pause=3)
        held = []
        for message_id, others in (("a", True), ("b", True), ("a", True), ("a", False), ("a", True)):
            if not others:
                pace.nothing_came()
            pace.begin(message_id)
            held.append(pace.end(message_id, OSError(), 0))
        assert held == [2 + 1, 3 + 1, 12 * 3, 3 + 1, 12 * 3]

    def test_what_was_tried_in_an_outage_of_weeks_is_forgotten(self):
        pace = self.opened()
        for number in range(20_001):
            pace.begin(f"t{number}")
            pace.end(f"t{number}", OSError(), 0)
        assert pace._tried_before == {"t20000"}

    def test_what_does_not_fail_closes_it_at_once(self):
        pace = self.opened()
        pace.wait_s(1)
        pace.begin("t")
        assert pace.end("t", None, 1) is None
        assert not pace.is_open
        assert (pace.wait_s(1), pace.room(50, 9, 1)) == (0, 50)
        assert pace.end("one", OSError(), 2) is None  # it takes three again
        assert not pace.is_open

    def test_handlers_that_began_before_decide_nothing(self):
        pace = self.opened()
        assert pace.end("slow", None, 0.1) is None
        assert pace.is_open
        assert pace.end("slow, too", OSError(), 0.1) == 0
        assert pace.wait_s(0.1) == pytest.approx(0.4)

    def test_a_try_that_did_not_run_is_made_again(self):
        pace = self.opened()
        pace.begin("t")
        pace.drop("t")
        assert pace.wait_s(1) == 0

    def test_after_a_long_time_it_looks_every_five_seconds(self):
        pace, now = self.opened(), 0.0
        for number in range(100):
            before, now = now, now + pace.wait_s(now)
            assert now - before <= 5
            pace.begin(f"t{number}")
            pace.end(f"t{number}", OSError(), now)

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"failures": 0}, "failures"),
            ({"failures": 1.5}, "failures"),
            ({"on": "OSError"}, "on"),
            ({"on": ()}, "on"),
            ({"on": (OSError, KeyboardInterrupt)}, "on"),
            ({"pause": 0}, "pause"),
            ({"pause": 9}, "pause"),
            ({"max_pause": "soon"}, "max_pause"),
        ],
    )
    def test_wrong_settings_are_refused(self, wrong, named):
        with pytest.raises(ConfigError, match=f"breaker: {named}"):
            Breaker(**wrong)
