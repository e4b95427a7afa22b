import contextlib
import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core.durations import duration_ms, parse_duration_ms
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError


class TestParseDuration:
    @pytest.mark.parametrize(
        ("text", "ms"),
        [
            ("500ms", 500),
            ("30s", 30_000),
            ("5m", 300_000),
            ("1h", 3_600_000),
            ("7d", 604_800_000),
            ("0s", 0),
            ("1.5s", 1_500),
            ("0.07s", 70),
            (" 30 s ", 30_000),
            ("0.1ms", 1),
            ("1.0001s", 1_001),
        ],
    )
    def test_good(self, text, ms):
        assert parse_duration_ms(text) == ms

    @pytest.mark.parametrize(
        "text", ["", "30", "s", "-5s", "1e3s", "30 sec", "5M", "1.s", ".5s", "nan", "infs"]
    )
    def test_bad(self, text):
        with pytest.raises(ConfigError) as caught:
            parse_duration_ms(text, "lease")
        assert str(caught.value).startswith(f"lease: {text!r} is not a duration")

    @pytest.mark.parametrize("text", ["9223372036854775808ms", "106751991168d", "9" * 400 + "d"])
    def test_too_long(self, text):
        with pytest.raises(ConfigError, match="longer than"):
            parse_duration_ms(text)

    def test_the_longest(self):
        assert parse_duration_ms("9223372036854775807ms") == INT64_MAX

    @given(st.text())
    def test_any_text(self, text):
        with contextlib.suppress(ConfigError):
            assert parse_duration_ms(text) >= 0


class TestDuration:
    @pytest.mark.parametrize(
        ("value", "ms"),
        [
            (0, 0),
            (30, 30_000),
            (1.5, 1_500),
            (0.0001, 1),
            (1e-12, 1),
            (5e-324, 1),
            (0.0014, 2),
            (0.07, 70),
            (0.55, 550),
            (-0.0, 0),
            (2**53 - 1, (2**53 - 1) * 1000),
            (timedelta(0), 0),
            (timedelta(minutes=1), 60_000),
            (timedelta(microseconds=1), 1),
            (timedelta(milliseconds=70), 70),
            (timedelta.max, 86_400_000_000_000_000),
        ],
    )
    def test_good(self, value, ms):
        assert duration_ms(value, "lease") == ms

    @pytest.mark.parametrize(
        "value",
        [
            -1,
            -0.001,
            math.nan,
            math.inf,
            -math.inf,
            2**53,
            10**400,
            timedelta(microseconds=-1),
            timedelta.min,
        ],
        ids=lambda value: repr(value)[:30],
    )
    def test_out_of_range(self, value):
        with pytest.raises(ConfigError, match=r"lease: .* must not be negative"):
            duration_ms(value, "lease")

    @pytest.mark.parametrize("value", [True, False, None, "30", "30s", b"30", [30], 1j])
    def test_other_types(self, value):
        with pytest.raises(ConfigError, match=r"lease: .* is neither seconds nor a timedelta"):
            duration_ms(value, "lease")

    @given(st.floats(0, 2**53, exclude_max=True))
    def test_it_fits_a_marker_and_is_never_shorter(self, seconds):
        ms = duration_ms(seconds, "lease")
        assert 0 <= ms <= INT64_MAX
        assert ms / 1000 >= seconds

    @given(st.integers(0, 10**9))
    def test_whole_milliseconds_stay_what_they_are(self, ms):
        assert duration_ms(ms / 1000, "lease") == ms
        assert duration_ms(timedelta(milliseconds=ms), "lease") == ms
