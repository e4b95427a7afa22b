from collections.abc import Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from typing import Any

import pytest
from confluent_kafka import KafkaError

from kmqpy.core import settings as settings_module
from kmqpy.core.environment import from_environment
from kmqpy.errors import ConfigError
from kmqpy.kafka.admin.admin import Admin
from kmqpy.kafka.dead_letters import KafkaDeadLetters
from kmqpy.kafka.kafka_errors import translated
from kmqpy.kafka.kmq_client import KmqClient
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
@pytest.mark.parametrize("make", [KmqClient, KafkaDeadLetters])
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
        "http://h:9092",
        "://h:9092",
    ],
)
def test_of_the_issue_an_address_that_can_not_be_one_is_told(text):
    with pytest.raises(ConfigError, match=r"bootstrap: .* is not an address; write it as host:"):
        KafkaConnection(bootstrap=text)
    with pytest.raises(ConfigError, match=r"zookeeper: .* is not an address; write it as host:"):
        ZooKeeperConnection(hosts=text)


@pytest.mark.parametrize("text", ["", " ", ",", " , "])
def test_a_bootstrap_without_an_address_is_told(text):
    with pytest.raises(ConfigError, match="bootstrap: must not be empty"):
        KafkaConnection(bootstrap=text)


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
        "plaintext://h",
        "größe:1",
    ],
)
def test_an_address_that_can_be_one_is_taken(text):
    assert KafkaConnection(bootstrap=text).bootstrap == text


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("h", "h:9092"),
        ("h:1", "h:1"),
        ("h, SASL_SSL://g,[::1]:2,", "h:9092,SASL_SSL://g:9092,[::1]:2"),
        ("::1,[fe80::1%eth0]", "[::1]:9092,[fe80::1%eth0]:9092"),
    ],
)
def test_errors_name_the_port_that_was_tried(text, address):
    problem = translated(KafkaError(KafkaError._TRANSPORT), "send", KafkaConnection(bootstrap=text))
    assert str(problem).startswith(f"send: Kafka at {address} does not answer")


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
        connection = KafkaConnection(
            bootstrap="h:1", kafka={"client.id": "me", "bootstrap.servers": "other:9"}
        )
        assert connection.kafka_settings({"acks": "all", "client.id": "kmq"}) == {
            "acks": "all",
            "client.id": "me",
            "bootstrap.servers": "h:1",
        }

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("acks", 1),
            ("request.required.acks", "0"),
            ("enable.idempotence", False),
            ("enable.auto.commit", "true"),
            ("auto.offset.reset", "latest"),
            ("isolation.level", "read_uncommitted"),
            ("group.id", "mine"),
            ("group.instance.id", "mine"),
            ("allow.auto.create.topics", "true"),
            ("partition.assignment.strategy", "range"),
            ("topic.acks", "1"),
            ("topic.auto.offset.reset", "latest"),
            ("default.topic.config", {"acks": 1}),
        ],
    )
    def test_settings_with_which_promises_would_not_hold_are_refused(self, name, value):
        with pytest.raises(ConfigError, match=f"kafka: kmqpy sets {name} itself"):
            KafkaConnection(kafka={name: value})
        KafkaConnection(kafka={"acks": "all", "enable.idempotence": True, "enable.auto.commit": False})
        KafkaConnection(kafka={"topic.acks": -1, "enable.idempotence": "t", "enable.auto.commit": 0})

    def test_an_empty_bootstrap(self):
        with pytest.raises(ConfigError, match="bootstrap: must not be empty"):
            KafkaConnection(bootstrap="")

    @pytest.mark.parametrize("root", ["", "/", "kmq", "/kmq/"])
    def test_root(self, root):
        with pytest.raises(ConfigError, match="root"):
            KafkaConnection(root=root)
