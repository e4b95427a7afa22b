"""The targets of tests/fuzz with hypothesis' input; and inputs that once broke one."""

import sys
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kmqpy.core.durations import parse_duration_ms

sys.path.insert(0, str(Path(__file__).parents[2]))

from kmqpy.core import settings as settings_module
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin import registry_entries
from kmqpy.kafka.client.offset_commits import Commit, commit_of
from kmqpy.kafka.topic_identity import TopicIds
from tests.fuzz.targets import SEEDS, TARGETS, WORDS


@st.composite
def mutated(draw, name):
    """A good input of which a part was replaced by bytes, or by words that mean something there."""
    seed = draw(st.sampled_from([*SEEDS[name], b""]))
    begin = draw(st.integers(0, len(seed)))
    end = draw(st.integers(begin, min(len(seed), begin + 8)))
    words = [word.encode() for word in WORDS.get(name, [])]
    odd = [b"", b"\x00", b"\xff", b"\xed\xa0\x80", "²".encode(), b"-1", b"1" * 40, b'"', b"[", b"{}", b"="]
    middle = draw(st.binary(max_size=12) | st.sampled_from([*words, *odd]))
    return seed[:begin] + middle + seed[end:]


@pytest.mark.parametrize("name", TARGETS)
def test_good_input_is_taken(name):
    for seed in SEEDS[name]:
        TARGETS[name](seed)


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks_a_promise(name):
    @given(mutated(name) | st.binary(max_size=200))
    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    def check(data):
        TARGETS[name](data)

    check()


HOSTILE = {
    "deep JSON": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "a long number": b'{"offset": ' + b"9" * 100_000 + b"}",
    "long text": b'{"name": "' + b"x" * 1_000_000 + b'"}',
    "deep TOML": b"a=" + b"[" * 100_000,
    "long key": b"a." * 500 + b"b=1",  # quadratic in tomllib; a config file is the user's own
    "zeros": bytes(1_000_000),
    "ones": b"\x04" + b"\xff" * 1_000_000,
    "digits": b"9" * 2_000_000 + b"d",
}


@pytest.mark.timeout(60)  # it takes milliseconds; what is quadratic would take minutes
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_large_hostile_input_takes_no_time(name, data):
    TARGETS[name](data)


class TestOnceBroken:
    """Inputs that raised something else than a KmqError, or took for ever."""

    @pytest.mark.parametrize("text", ["kmq1:²", "kmq1:٣", "kmq1:" + "9" * 5_000, "kmq1:9223372036854775808"])
    def test_metadata_of_a_commit_that_is_not_ours(self, text):
        assert commit_of(TopicPartition("q", 0, 5, text), TopicIds("Q", "M")) == Commit(5, None)

    def test_metadata_of_a_commit_that_is_ours(self):
        at = TopicPartition("q", 0, 5, "kmq2:9223372036854775807:Q:M")
        assert commit_of(at, TopicIds("Q", "M")) == Commit(5, 2**63 - 1)

    @pytest.mark.parametrize("decode_it", [registry_entries.decode_queue, registry_entries.decode_tracker])
    def test_znodes_with_deep_json(self, decode_it):
        with pytest.raises(ConfigError, match="not JSON"):
            decode_it("q", b"[" * 200_000)

    def test_a_stored_offset_with_deep_json_is_as_if_absent(self):
        assert registry_entries.decode_offset("q", b"[" * 200_000) is None

    def test_a_file_with_deep_toml(self):
        with pytest.raises(ConfigError, match=r"config file 'kmq\.toml'"):
            settings_module.parse_file(b"a=" + b"[" * 100_000, "kmq.toml")

    def test_a_duration_of_two_million_digits(self):
        with pytest.raises(ConfigError, match="is not a duration"):
            parse_duration_ms("9" * 2_000_000 + "d")
