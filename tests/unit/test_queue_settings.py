import contextlib
import copy
import json
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core import settings as settings_module
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.registry_entries import decode_queue, readable_part
from kmqpy.kafka.settings import KafkaConnection, QueueSettings


class TestQueueSettings:
    def test_names_follow_the_queue(self):
        settings = QueueSettings(name="jobs")
        assert settings.markers_topic == "jobs__markers"
        assert settings.dead_letter_topic == "jobs__undelivered"
        assert settings.consumer_group == "kmq-jobs"

    def test_defaults_of_the_design(self):
        settings = QueueSettings(name="jobs")
        assert settings.max_redeliveries == 3
        assert settings.lease_ms == 30_000
        assert settings.redelivery_count_header == "kmq-redelivery-count"
        assert settings.max_delay_ms == settings.max_lease_ms == 7 * 86_400_000

    def test_lanes_apart_know_no_others(self):
        settings = QueueSettings(name="q", markers_topic="m", retry_lane=True, priorities=2)
        apart = settings.lanes_apart()
        assert [(one.name, one.markers_topic, one.lane_ending) for one in apart] == [
            ("q__retry", "q__retry__markers", "retry"),
            ("q__priority1", "q__priority1__markers", "priority1"),
            ("q", "m", ""),
        ]
        assert all(one.lanes() == (one,) and one.copies_topic == "q__retry" for one in apart)
        assert apart[-1].lane_markers == settings.lane_markers
        assert {one.given_fields for one in apart} == {None}

    def test_the_share_of_lanes_is_stored_only_where_it_is_another(self):
        assert b"lane_share" not in QueueSettings(name="q").to_json()
        settings = QueueSettings(name="q", lane_share=0.5)
        assert QueueSettings.from_json(settings.to_json()) == settings

    def test_given_names_stay(self):
        settings = QueueSettings(name="q", markers_topic="m", dead_letter_topic="d", consumer_group="g")
        assert (settings.markers_topic, settings.dead_letter_topic, settings.consumer_group) == (
            "m",
            "d",
            "g",
        )

    @pytest.mark.parametrize("key", ["consumer_group", "redelivery_count_header"])
    def test_text_that_kafka_would_not_take_is_refused(self, key):
        with pytest.raises(ConfigError, match=f"{key}: .* can't be printed"):
            QueueSettings(name="q", **{key: "a\ud800"})

    @given(
        st.builds(
            QueueSettings,
            name=st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", fullmatch=True),
            consumer_group=st.text().filter(str.isprintable),
            redelivery_count_header=st.text(min_size=1).filter(str.isprintable),
            max_redeliveries=st.none() | st.integers(0, INT64_MAX),
            lease_ms=st.integers(100, INT64_MAX),
            max_lease_ms=st.integers(100, INT64_MAX),
        )
    )
    def test_json_round_trip(self, settings):
        assert QueueSettings.from_json(settings.to_json()) == settings

    def test_json_may_name_the_queue_only(self):
        assert QueueSettings.from_json(b'{"name": "jobs"}') == QueueSettings(name="jobs", markers="jvm")

    def test_it_is_known_what_was_said_and_what_was_left_open(self):
        assert QueueSettings(name="q").given_fields == {"name"}
        assert QueueSettings(name="q", markers_topic="", max_redeliveries=3).given_fields == {
            "name",
            "max_redeliveries",
        }
        assert QueueSettings(name="q", max_redeliveries=3) == QueueSettings(name="q")
        settings = QueueSettings(name="q", max_lease_ms=500)
        for same in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
            assert (same, same.given_fields) == (settings, {"name", "max_lease_ms"})
        assert settings_module.build(QueueSettings, {"name": "q"}, {"max_delay_ms": "5s"}).given_fields == {
            "name",
            "max_delay_ms",
        }
        stored = QueueSettings.from_json(settings.to_json())
        assert stored.given_fields is None
        assert pickle.loads(pickle.dumps(stored)).given_fields is None
        assert "given_fields" not in repr(stored)

    def test_unknown_settings_of_a_newer_version_can_be_left_out(self):
        data = b'{"name": "q", "max_lease_ms": 500, "colour": {"a": 1}}'
        with pytest.raises(ConfigError, match="colour"):
            QueueSettings.from_json(data)
        known = QueueSettings(name="q", max_lease_ms=500, markers="jvm")
        assert QueueSettings.from_json(data, newer=True) == known

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "not JSON"),
            (b"{", "not JSON"),
            (b"\xff\xff", "not JSON"),
            (b"[" * 100_000, "not JSON"),
            (b"[]", "expected a JSON object, found list"),
            (b"null", "expected a JSON object, found NoneType"),
            (b"{}", "name"),
            (b'{"name": 5}', "name: 5"),
            (b'{"name": "a b"}', "name: invalid topic name 'a b'"),
            (b'{"name": "q", "max_redelivery": 3}', "did you mean max_redeliveries"),
            (b'{"name": "q", "max_redeliveries": 3.5}', "max_redeliveries: 3.5"),
            (b'{"name": "q", "lease_ms": NaN}', "lease_ms: nan"),
        ],
        ids=lambda part: repr(part[:30]),
    )
    def test_bad_json(self, data, message):
        with pytest.raises(ConfigError, match=message):
            QueueSettings.from_json(data)

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
    def test_any_value_of_any_field(self, value):
        for name in ("name", "markers_topic", "max_redeliveries", "lease_ms"):
            with contextlib.suppress(ConfigError):
                QueueSettings.from_json(json.dumps({"name": "q", name: value}).encode())

    @pytest.mark.parametrize("name", [".", "..", "a/b", "a b", "ü", "a\n", "x" * 250, 5])
    @pytest.mark.parametrize("field_name", ["name", "markers_topic", "dead_letter_topic"])
    def test_bad_names(self, field_name, name):
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: name})

    @pytest.mark.parametrize("name", ["", None])
    def test_invalid_names_are_refused(self, name):
        with pytest.raises(ConfigError, match="name"):
            QueueSettings(name=name)

    def test_a_name_too_long_for_its_topics(self):
        QueueSettings(name="x" * (249 - len("__undelivered")))
        with pytest.raises(ConfigError, match="dead_letter_topic"):
            QueueSettings(name="x" * (250 - len("__undelivered")))

    @pytest.mark.parametrize(
        "names",
        [
            {"markers_topic": "q"},
            {"dead_letter_topic": "q"},
            {"markers_topic": "t", "dead_letter_topic": "t"},
        ],
    )
    def test_three_different_topics(self, names):
        with pytest.raises(ConfigError, match="different names"):
            QueueSettings(name="q", **names)

    def test_an_empty_count_header(self):
        with pytest.raises(ConfigError, match="redelivery_count_header"):
            QueueSettings(name="q", redelivery_count_header="")

    @pytest.mark.parametrize("value", [-1, INT64_MAX + 1, 1.5, True, "3"])
    @pytest.mark.parametrize("field_name", ["max_redeliveries", "lease_ms", "max_delay_ms", "max_lease_ms"])
    def test_numbers_out_of_range(self, field_name, value):
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: value})

    @pytest.mark.parametrize("field_name", ["lease_ms", "max_delay_ms", "max_lease_ms"])
    def test_only_redeliveries_may_be_without_limit(self, field_name):
        assert QueueSettings(name="q", max_redeliveries=None).max_redeliveries is None
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: None})

    @pytest.mark.parametrize("made", [QueueSettings(name="q"), KafkaConnection()])
    def test_frozen(self, made):
        with pytest.raises(FrozenInstanceError):
            made.name = made.root = "x"

    def test_the_largest_is_fine(self):
        assert QueueSettings(name="q", max_lease_ms=INT64_MAX).max_lease_ms == INT64_MAX

    def test_the_stored_form_stays_as_it_is(self):
        assert QueueSettings(name="q").to_json() == (
            b'{"consumer_group": "kmq-q", "dead_letter_topic": "q__undelivered", "lease_ms": 30000, '
            b'"markers": "range", "markers_topic": "q__markers", '
            b'"max_delay_ms": 604800000, "max_lease_ms": 604800000, "max_redeliveries": 3, "name": "q", '
            b'"redelivery_count_header": "kmq-redelivery-count"}'
        )

    def test_stored_settings_without_a_format_have_jvm_markers(self):
        assert QueueSettings(name="q").writes_ranges
        stored = json.loads(QueueSettings(name="q").to_json())
        del stored["markers"]
        assert not QueueSettings.stored(stored).writes_ranges
        assert not decode_queue("q", json.dumps(stored).encode())[0].writes_ranges
        for damaged in (b"\xff", json.dumps({**stored, "markers": "fast"}).encode()):
            assert not readable_part("q", damaged).writes_ranges

    def test_of_a_queue_that_nobody_registered_markers_are_those_of_the_jvm_unless_given(self):
        given = QueueSettings(name="q", lease_ms=500)
        assert given.unregistered() == replace(given, markers="jvm")
        assert given.unregistered().given_fields == given.given_fields == {"name", "lease_ms"}
        for markers in ("range", "jvm"):
            said = QueueSettings(name="q", markers=markers)
            assert said.unregistered() == said
        stored = QueueSettings.from_json(QueueSettings(name="q").to_json())
        assert stored.unregistered().writes_ranges

    @pytest.mark.parametrize("markers", ["fast", "JVM", "", None, 1])
    def test_there_are_two_formats_of_markers(self, markers):
        with pytest.raises(ConfigError, match=r"markers: .* is neither 'range' nor 'jvm'"):
            QueueSettings(name="q", markers=markers)

    def test_late_acks_are_stored_where_they_are_on(self):
        settings = QueueSettings(name="q", late_acks=True)
        assert b'"late_acks": true' in settings.to_json()
        assert QueueSettings.from_json(settings.to_json()) == settings

    @pytest.mark.parametrize("claims", ["true", "false", "1"])
    def test_what_an_earlier_version_stored_of_claims_is_ignored(self, claims):
        """It had them as a setting; now every redelivery has one."""
        data = b'{"claims": %s, "max_redeliveries": 7, "name": "q"}' % claims.encode()
        settings = QueueSettings(name="q", max_redeliveries=7, markers="jvm")
        assert QueueSettings.from_json(data) == QueueSettings.from_json(data, newer=True) == settings
        assert decode_queue("q", data) == (settings, False)
        with pytest.raises(ConfigError, match="claim"):
            QueueSettings.from_json(data.replace(b"claims", b"claim"))

    def test_zero_is_fine(self):
        settings = QueueSettings(name="q", max_redeliveries=0, max_delay_ms=0)
        assert settings.max_redeliveries == settings.max_delay_ms == 0

    @pytest.mark.parametrize(
        "stored",
        [
            {"\x1b[2J": 1},
            {"x" * 900_000: 1},
            {"markers_topic": "x" * 900_000},
            {"lease_ms": "1" * 900_000},
        ],
    )
    def test_what_stands_in_the_registry_fills_no_log_and_steers_no_terminal(self, stored):
        with pytest.raises(ConfigError) as raised:
            decode_queue("q", json.dumps({"name": "q", **stored}).encode())
        assert str(raised.value).isprintable()
        assert len(str(raised.value)) <= 300

    @pytest.mark.parametrize("data", [b"", b"\xff", b"{}", b"null", b'{"name": 5}', b'{"name": "p"}'])
    def test_settings_in_the_registry_that_can_not_be_read_name_their_queue(self, data):
        with pytest.raises(ConfigError, match=r"^queue 'q': "):
            decode_queue("q", data)

    @pytest.mark.parametrize("field_name", ["lease_ms", "max_lease_ms"])
    def test_leases_have_a_least_length(self, field_name):
        assert getattr(QueueSettings(**{"name": "q", field_name: 100}), field_name) == 100
        for too_short in (0, 99):
            with pytest.raises(ConfigError, match=f"{field_name}: {too_short} ms .* least, 100 ms"):
                QueueSettings(**{"name": "q", field_name: too_short})

    @pytest.mark.parametrize("field_name", ["lease_ms", "max_lease_ms"])
    @pytest.mark.parametrize("value", [0, 99, "7", "7ms"])
    def test_a_queue_that_was_stored_with_shorter_leases_can_still_be_read(self, field_name, value):
        data = json.dumps({"name": "q", "max_redeliveries": 7, field_name: value}).encode()
        settings = QueueSettings.from_json(data)
        assert (getattr(settings, field_name), settings.max_redeliveries) == (100, 7)
        assert decode_queue("q", data) == (settings, False)
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings.from_json(data.replace(json.dumps(value).encode(), b"-1"))
