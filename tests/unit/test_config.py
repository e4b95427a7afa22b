import contextlib
import copy
import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kmqpy.core import settings as settings_module
from kmqpy.core.durations import duration_ms, parse_duration_ms
from kmqpy.core.environment import from_environment
from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.admin.registry_entries import decode_queue
from kmqpy.kafka.client.client import KmqClient
from kmqpy.kafka.client.producer import KmqProducer
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.queue import KafkaQueue
from kmqpy.kafka.settings import KafkaConnection, QueueSettings, is_secret, redacted
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper.settings import NO_ZOOKEEPER, ZooKeeperConnection
from tracker.tracker import Tracker


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One field of every kind that settings have."""

    name: str
    count: int = 1
    limit: int | None = 3
    wait_ms: int = 50
    factor: float = 1.5
    enabled: bool = False
    queues: tuple[str, ...] = ()
    kafka: Mapping[str, Any] = field(default_factory=dict)
    api_token: str = ""
    secret_port: int = 0
    secrets: tuple[str, ...] = ()


def sample(**values: Any) -> Sample:
    return settings_module.build(Sample, {"name": "n", **values})


@pytest.mark.parametrize("given", ["host:9092", None, {"bootstrap": "host:9092"}])
@pytest.mark.parametrize("make", [KmqClient, KmqProducer, KafkaQueue, KafkaDeadLetters])
def test_of_the_issue_a_connection_that_is_none_is_named(make, given):
    with pytest.raises(
        ConfigError, match=r"connection: .* is not a KafkaConnection; write it as KafkaConnection"
    ):
        make(QueueSettings(name="q"), given)


@pytest.mark.parametrize(
    "text",
    [
        "ho st:x",
        "::",
        "[::]:9092",
        "h:x",
        "h:0",
        "h:70000",
        "h:1:2",
        ":9092",
        "a:1,b c:2",
        "h\x1b:1",
        "[x]:1",
    ],
)
def test_of_the_issue_an_address_that_can_not_be_one_is_told(text):
    with pytest.raises(ConfigError, match=r"bootstrap: .* is no address; write it as host:"):
        KafkaConnection(bootstrap=text)
    with pytest.raises(ConfigError, match=r"zookeeper: .* is no address; write it as host:"):
        ZooKeeperConnection(hosts=text)


def test_an_address_that_may_hold_a_password_is_not_shown():
    with pytest.raises(ConfigError) as caught:
        KafkaConnection(bootstrap="me:hunter2@host:9092")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "h",
        "h:9092",
        "h-1.b_c:1, 10.0.0.1:2,",
        "[::1]:9092",
        "::1",
        "[fe80::1%eth0]:1",
        "SSL://h:9093",
        "größe:1",
    ],
)
def test_an_address_that_can_be_one_is_taken(text):
    assert KafkaConnection(bootstrap=text).bootstrap == text


@pytest.mark.parametrize(
    "make", [partial(Admin, zookeeper=NO_ZOOKEEPER), partial(Tracker, zookeeper=NO_ZOOKEEPER), Topics]
)
def test_of_the_issue_so_is_an_address_for_administration_and_trackers(make):
    with pytest.raises(ConfigError, match="connection: 'host:9092' is not a KafkaConnection"):
        make("host:9092")


@pytest.mark.parametrize("given", ["zk:2181", None, KafkaConnection(), {"hosts": "zk:2181"}])
@pytest.mark.parametrize("make", [Admin, Tracker])
def test_a_zookeeper_that_is_none_is_named(make, given):
    with pytest.raises(
        ConfigError, match=r"zookeeper: .* is not a ZooKeeperConnection; write it as ZooKeeperConnection"
    ):
        make(KafkaConnection(), given)


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


class TestBuild:
    def test_defaults(self):
        assert sample() == Sample(name="n")

    def test_later_layers_win(self):
        built = settings_module.build(Sample, {"name": "a", "count": 2}, {"count": 3}, {"name": "b"})
        assert (built.name, built.count) == ("b", 3)

    def test_an_unknown_key_comes_with_the_nearest_name(self):
        with pytest.raises(ConfigError) as caught:
            sample(waitms=5)
        assert str(caught.value) == "waitms: unknown setting; did you mean wait_ms?"

    def test_an_unknown_key_that_is_near_to_none(self):
        with pytest.raises(ConfigError) as caught:
            sample(zzz=5)
        assert str(caught.value) == "zzz: unknown setting"

    def test_a_missing_setting(self):
        with pytest.raises(ConfigError, match=r"Sample.*'name'"):
            settings_module.build(Sample, {})

    @pytest.mark.parametrize(
        ("key", "value", "converted"),
        [
            ("count", "7", 7),
            ("count", "-7", -7),
            ("limit", "5", 5),
            ("limit", None, None),
            ("limit", "none", None),
            ("wait_ms", 70, 70),
            ("wait_ms", "70", 70),
            ("wait_ms", " 70 ", 70),
            ("wait_ms", "70ms", 70),
            ("wait_ms", "1.5s", 1_500),
            ("factor", "2.5", 2.5),
            ("factor", 2, 2.0),
            ("enabled", True, True),
            ("enabled", "true", True),
            ("enabled", "YES", True),
            ("enabled", "1", True),
            ("enabled", "No", False),
            ("enabled", "0", False),
            ("enabled", "false", False),
            ("queues", "a, b,,c ", ("a", "b", "c")),
            ("queues", "", ()),
            ("queues", ["a", "b"], ("a", "b")),
            ("queues", ("a",), ("a",)),
            ("kafka", {"client.id": "x"}, {"client.id": "x"}),
            ("kafka", {"sasl": {"password": "x"}, "acks": -1}, {"sasl.password": "x", "acks": -1}),
            ("name", "none", "none"),
        ],
    )
    def test_conversion(self, key, value, converted):
        result = getattr(sample(**{key: value}), key)
        assert result == converted
        assert type(result) is type(converted)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("name", 5),
            ("name", None),
            ("count", 1.0),
            ("count", True),
            ("count", "x"),
            ("count", "1.5"),
            ("count", "30s"),
            ("count", None),
            ("limit", True),
            ("limit", "nothing"),
            ("limit", ""),
            ("wait_ms", 1.5),
            ("wait_ms", "1.5"),
            ("wait_ms", "5 parsecs"),
            ("wait_ms", "-5s"),
            ("wait_ms", "²"),
            ("wait_ms", "--5"),
            ("factor", "x"),
            ("factor", True),
            ("factor", None),
            ("factor", [1]),
            ("enabled", 1),
            ("enabled", "maybe"),
            ("enabled", None),
            ("queues", 5),
            ("queues", ["a", 5]),
            ("kafka", "a=b"),
            ("kafka", [("a", "b")]),
        ],
    )
    def test_a_value_that_does_not_fit_is_named(self, key, value):
        with pytest.raises(ConfigError) as caught:
            sample(**{key: value})
        assert str(caught.value).startswith(f"{key}: ")
        assert key == "kafka" or repr(value) in str(caught.value)

    def test_it_is_frozen_and_its_table_a_copy(self):
        table = {"acks": "all"}
        built = sample(kafka=table)
        table["acks"] = "0"
        assert built.kafka == {"acks": "all"}
        with pytest.raises(FrozenInstanceError):
            built.count = 5


class TestEnvironment:
    def test_only_fields_of_the_class(self):
        environ = {"KMQ_NAME": "n", "KMQ_WAIT_MS": "2s", "KMQ_OTHER": "x", "NAME": "y", "kmq_count": "9"}
        values = from_environment(Sample, environ)
        assert values == {"name": "n", "wait_ms": "2s"}
        assert settings_module.build(Sample, values) == Sample(name="n", wait_ms=2_000)

    def test_another_prefix(self):
        assert from_environment(Sample, {"X_NAME": "n", "KMQ_NAME": "m"}, "X_") == {"name": "n"}


class TestReadFile:
    def test_toml(self, tmp_path):
        path = tmp_path / "kmq.toml"
        path.write_text('bootstrap = "h:1"\n[kafka]\nsasl.password = "hunter2"\n"client.id" = "x"\n')
        built = settings_module.build(KafkaConnection, settings_module.read_file(path))
        assert built.bootstrap == "h:1"
        assert built.kafka == {"sasl.password": "hunter2", "client.id": "x"}
        assert "hunter2" not in repr(built)

    def test_missing(self, tmp_path):
        with pytest.raises(ConfigError, match=r"config file .*none\.toml': No such file"):
            settings_module.read_file(tmp_path / "none.toml")

    def test_a_directory(self, tmp_path):
        with pytest.raises(ConfigError, match="config file"):
            settings_module.read_file(str(tmp_path))

    @pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"a = 1\na = 2\n"])
    def test_not_toml(self, tmp_path, content):
        path = tmp_path / "kmq.toml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"config file .*kmq\.toml"):
            settings_module.read_file(path)


class TestSecrets:
    @pytest.mark.parametrize(
        "name",
        [
            "sasl.password",
            "ssl.key.password",
            "ssl.keystore.password",
            "ssl.key.pem",
            "ssl.key",
            "sasl.oauthbearer.client.secret",
            "sasl.oauthbearer.config",
            "sasl.oauthbearer.assertion.private.key.pem",
            "sasl.oauthbearer.assertion.private.key.passphrase",
            "sasl.jaas.config",
            "SASL.PASSWORD",
        ],
    )
    def test_secret_names(self, name):
        assert is_secret(name)
        assert redacted({name: "hunter2"}) == {name: "***"}

    @pytest.mark.parametrize(
        "name", ["sasl.username", "bootstrap.servers", "ssl.ca.location", "acks", "ssl.certificate.pem"]
    )
    def test_other_names(self, name):
        assert redacted({name: "x"}) == {name: "x"}

    def test_nested_tables(self):
        assert redacted({"sasl": {"password": "hunter2"}}) == {"sasl.password": "***"}

    @pytest.mark.parametrize("kafka", [{"sasl.password": "hunter2"}, {"sasl": {"password": "hunter2"}}])
    def test_connection(self, kafka):
        connection = KafkaConnection(bootstrap="h:1", kafka=kafka)
        for shown in (repr(connection), str(connection), f"{connection}"):
            assert "hunter2" not in shown
            assert "***" in shown
            assert "h:1" in shown

    def test_settings_that_extend_connection(self):
        @dataclass(frozen=True, kw_only=True)
        class Extended(KafkaConnection):
            more: int = 1

        assert "hunter2" not in repr(Extended(kafka={"sasl.password": "hunter2"}))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("api_token", b"hunter2"),
            ("api_token", ["hunter2"]),
            ("secret_port", "hunter2"),
            ("secret_port", ["hunter2"]),
            ("secrets", {"hunter2": 1}),
            ("kafka", "sasl.password=hunter2"),
            ("kafka", ["sasl.password=hunter2"]),
        ],
    )
    def test_no_error_shows_one(self, key, value):
        with pytest.raises(ConfigError) as caught:
            sample(**{key: value})
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


class TestConnection:
    def test_settings_for_a_librdkafka_client(self):
        connection = KafkaConnection(bootstrap="h:1", kafka={"acks": "1", "bootstrap.servers": "other:9"})
        assert connection.kafka_settings({"acks": "all", "enable.idempotence": True}) == {
            "acks": "1",
            "enable.idempotence": True,
            "bootstrap.servers": "h:1",
        }

    def test_an_empty_bootstrap(self):
        with pytest.raises(ConfigError, match="bootstrap: must not be empty"):
            KafkaConnection(bootstrap="")

    @pytest.mark.parametrize("root", ["", "/", "kmq", "/kmq/"])
    def test_root(self, root):
        with pytest.raises(ConfigError, match="root"):
            KafkaConnection(root=root)


class TestQueueSettings:
    def test_names_follow_the_queue(self):
        settings = QueueSettings(name="jobs")
        assert settings.markers_topic == "jobs__markers"
        assert settings.dead_letter_topic == "jobs__undelivered"
        assert settings.consumer_group == "kmq-jobs"

    def test_defaults_of_the_design(self):
        settings = QueueSettings(name="jobs")
        assert settings.max_redeliveries == 3
        assert settings.redeliver_after_ms == 30_000
        assert settings.redelivery_count_header == "kmq-redelivery-count"
        assert settings.max_delay_ms == settings.max_hold_ms == 7 * 86_400_000

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
            redeliver_after_ms=st.integers(100, INT64_MAX),
            max_hold_ms=st.integers(100, INT64_MAX),
        )
    )
    def test_json_round_trip(self, settings):
        assert QueueSettings.from_json(settings.to_json()) == settings

    def test_json_may_name_the_queue_only(self):
        assert QueueSettings.from_json(b'{"name": "jobs"}') == QueueSettings(name="jobs")

    def test_it_is_known_what_was_said_and_what_was_left_open(self):
        assert QueueSettings(name="q").given_fields == {"name"}
        assert QueueSettings(name="q", markers_topic="", max_redeliveries=3).given_fields == {
            "name",
            "max_redeliveries",
        }
        assert QueueSettings(name="q", max_redeliveries=3) == QueueSettings(name="q")
        settings = QueueSettings(name="q", max_hold_ms=500)
        for same in (copy.copy(settings), copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):
            assert (same, same.given_fields) == (settings, {"name", "max_hold_ms"})
        assert settings_module.build(QueueSettings, {"name": "q"}, {"max_delay_ms": "5s"}).given_fields == {
            "name",
            "max_delay_ms",
        }
        stored = QueueSettings.from_json(settings.to_json())
        assert stored.given_fields is None
        assert pickle.loads(pickle.dumps(stored)).given_fields is None
        assert "given_fields" not in repr(stored)

    def test_unknown_settings_of_a_newer_version_can_be_left_out(self):
        data = b'{"name": "q", "max_hold_ms": 500, "colour": {"a": 1}}'
        with pytest.raises(ConfigError, match="colour"):
            QueueSettings.from_json(data)
        assert QueueSettings.from_json(data, newer=True) == QueueSettings(name="q", max_hold_ms=500)

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
            (b'{"name": "a b"}', "name: 'a b' is no topic name"),
            (b'{"name": "q", "max_redelivery": 3}', "did you mean max_redeliveries"),
            (b'{"name": "q", "max_redeliveries": 3.5}', "max_redeliveries: 3.5"),
            (b'{"name": "q", "redeliver_after_ms": NaN}', "redeliver_after_ms: nan"),
        ],
        ids=lambda part: repr(part[:30]),
    )
    def test_bad_json(self, data, message):
        with pytest.raises(ConfigError, match=message):
            QueueSettings.from_json(data)

    @given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists))
    def test_any_value_of_any_field(self, value):
        for name in ("name", "markers_topic", "max_redeliveries", "redeliver_after_ms"):
            with contextlib.suppress(ConfigError):
                QueueSettings.from_json(json.dumps({"name": "q", name: value}).encode())

    @pytest.mark.parametrize("name", [".", "..", "a/b", "a b", "ü", "a\n", "x" * 250, 5])
    @pytest.mark.parametrize("field_name", ["name", "markers_topic", "dead_letter_topic"])
    def test_bad_names(self, field_name, name):
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: name})

    @pytest.mark.parametrize("name", ["", None])
    def test_no_name(self, name):
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
    @pytest.mark.parametrize(
        "field_name", ["max_redeliveries", "redeliver_after_ms", "max_delay_ms", "max_hold_ms"]
    )
    def test_numbers_out_of_range(self, field_name, value):
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: value})

    @pytest.mark.parametrize("field_name", ["redeliver_after_ms", "max_delay_ms", "max_hold_ms"])
    def test_only_redeliveries_may_be_without_limit(self, field_name):
        assert QueueSettings(name="q", max_redeliveries=None).max_redeliveries is None
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings(**{"name": "q", field_name: None})

    @pytest.mark.parametrize("made", [QueueSettings(name="q"), KafkaConnection()])
    def test_frozen(self, made):
        with pytest.raises(FrozenInstanceError):
            made.name = made.root = "x"

    def test_the_largest_is_fine(self):
        assert QueueSettings(name="q", max_hold_ms=INT64_MAX).max_hold_ms == INT64_MAX

    def test_the_stored_form_stays_as_it_is(self):
        assert QueueSettings(name="q").to_json() == (
            b'{"consumer_group": "kmq-q", "dead_letter_topic": "q__undelivered", '
            b'"markers_topic": "q__markers", '
            b'"max_delay_ms": 604800000, "max_hold_ms": 604800000, "max_redeliveries": 3, "name": "q", '
            b'"redeliver_after_ms": 30000, "redelivery_count_header": "kmq-redelivery-count"}'
        )

    def test_claims_are_stored_where_they_are_off(self):
        settings = QueueSettings(name="q", claims=False)
        assert b'"claims": false' in settings.to_json()
        assert QueueSettings.from_json(settings.to_json()) == settings
        assert QueueSettings.from_json(QueueSettings(name="q").to_json()).claims is True
        with pytest.raises(ConfigError, match="claims"):
            QueueSettings.from_json(b'{"name": "q", "claims": 1}')

    def test_late_acks_need_claims(self):
        settings = QueueSettings(name="q", late_acks=True)
        assert QueueSettings.from_json(settings.to_json()) == settings
        with pytest.raises(ConfigError, match="late_acks: needs claims"):
            QueueSettings(name="q", claims=False, late_acks=True)

    def test_zero_is_fine(self):
        settings = QueueSettings(name="q", max_redeliveries=0, max_delay_ms=0)
        assert settings.max_redeliveries == settings.max_delay_ms == 0

    @pytest.mark.parametrize(
        "stored",
        [
            {"\x1b[2J": 1},
            {"x" * 900_000: 1},
            {"markers_topic": "x" * 900_000},
            {"redeliver_after_ms": "1" * 900_000},
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

    @pytest.mark.parametrize("field_name", ["redeliver_after_ms", "max_hold_ms"])
    def test_leases_have_a_least_length(self, field_name):
        assert getattr(QueueSettings(**{"name": "q", field_name: 100}), field_name) == 100
        for too_short in (0, 99):
            with pytest.raises(ConfigError, match=f"{field_name}: {too_short} ms .* least, 100 ms"):
                QueueSettings(**{"name": "q", field_name: too_short})

    @pytest.mark.parametrize("field_name", ["redeliver_after_ms", "max_hold_ms"])
    @pytest.mark.parametrize("value", [0, 99, "7", "7ms"])
    def test_a_queue_that_was_stored_with_shorter_leases_can_still_be_read(self, field_name, value):
        data = json.dumps({"name": "q", "max_redeliveries": 7, field_name: value}).encode()
        settings = QueueSettings.from_json(data)
        assert (getattr(settings, field_name), settings.max_redeliveries) == (100, 7)
        assert decode_queue("q", data) == (settings, False)
        with pytest.raises(ConfigError, match=field_name):
            QueueSettings.from_json(data.replace(json.dumps(value).encode(), b"-1"))
