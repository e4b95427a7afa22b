"""Settings about security: where they may stand, and that they are not told."""

import logging
import pickle

import pytest
from kazoo.protocol.serialization import SASL, Auth
from kazoo.security import Permissions

from kmqpy.cli.app import run
from kmqpy.core import settings as settings_module
from kmqpy.core.environment import from_environment
from kmqpy.errors import ConfigError, MissingExtra
from kmqpy.kafka.librdkafka import new_consumer
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper import session
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity

CANARY = "canary-b2d1"


class TestZooKeeperSecurity:
    def test_nothing_is_set_by_default(self):
        security = ZooKeeperSecurity()
        assert not security.authenticated
        assert not security.encrypted
        assert session._settings(security) == {}

    @pytest.mark.parametrize("given", [{"ca": "a.pem"}, {"certificate": "c.pem"}, {"tls": True}])
    def test_a_file_means_tls(self, given):
        assert ZooKeeperSecurity(**given).encrypted

    @pytest.mark.parametrize(
        ("given", "named"),
        [
            ({"username": "me"}, "password: must not be empty"),
            ({"password": CANARY}, "username: must not be empty"),
            ({"scheme": "kerberos"}, "scheme: 'kerberos' is neither sasl nor digest"),
            ({"key": "k.pem"}, "certificate: must not be empty"),
            ({"acl": ("world:anyone:r",)}, "acl: needs a username"),
            ({"username": "me", "password": CANARY, "acl": (f"digest:you:{CANARY}",)}, "acl: write its"),
            ({"username": "me", "password": CANARY, "acl": ("world:anyone:x",)}, "acl: write its"),
        ],
    )
    def test_what_does_not_fit_is_named(self, given, named):
        with pytest.raises(ConfigError) as caught:
            ZooKeeperSecurity(**given)
        assert str(caught.value).startswith(named)
        assert CANARY not in str(caught.value)

    def test_znodes_are_the_creators_and_those_of_the_acl(self):
        security = ZooKeeperSecurity(
            username="me",
            password=CANARY,
            scheme="digest",
            acl=("world:anyone:r", "x509:CN=you,O=us:cdrwa"),
        )
        settings = session._settings(security)
        assert settings["auth_data"] == [("digest", f"me:{CANARY}")]
        creator, world, you = settings["default_acl"]
        assert (creator.id.scheme, creator.perms) == ("auth", Permissions.ALL)
        assert (*world.id, world.perms) == ("world", "anyone", Permissions.READ)
        assert (*you.id, you.perms) == ("x509", "CN=you,O=us", Permissions.ALL)

    def test_sasl_without_its_extra(self, monkeypatch):
        monkeypatch.setattr(session, "find_spec", lambda _: None)
        with pytest.raises(MissingExtra, match=r"kmqpy\[sasl\]"):
            session.new_client(
                ZooKeeperConnection(hosts="h:1", security=ZooKeeperSecurity(username="me", password=CANARY))
            )

    def test_a_client_tells_no_secret(self):
        security = ZooKeeperSecurity(username="me", password=CANARY, scheme="digest")
        client = session.new_client(ZooKeeperConnection(hosts="127.0.0.1:1", security=security))
        assert CANARY not in f"{security} {security!r} {client} {client!r} {session.address(client)}"


class TestKazoosLog:
    @pytest.fixture
    def shown(self, caplog):
        log = logging.getLogger("kmqpy.zookeeper.session.kazoo")
        caplog.set_level(1, logger=log.name)
        return lambda *record: (log.log(5, *record), caplog.text)[1]

    @pytest.mark.parametrize("request_", [Auth(0, "digest", f"me:{CANARY}"), SASL(CANARY.encode())])
    def test_passwords_are_left_out(self, shown, request_):
        text = shown("Sending request(xid=%s): %s", -4, request_)
        assert "Sending request(xid=-4): ***" in text
        assert CANARY not in text

    def test_and_what_resumes_a_session(self, shown):
        assert CANARY not in shown("    Using session_id: %r session_passwd: %s", 1, CANARY)


class TestWhereTheyStand:
    def test_environment(self):
        environ = {
            "KMQ_BOOTSTRAP": "h:1",
            "KMQ_KAFKA_SASL_PASSWORD": CANARY,
            "KMQ_KAFKA_SSL_CA_LOCATION": "ca.pem",
            "KMQ_KAFKA_SERVICE_HOST": "10.0.0.1",  # these three are Kubernetes'
            "KMQ_KAFKA_PORT": "tcp://10.0.0.1:9092",
            "KMQ_KAFKA_PORT_9092_TCP_ADDR": "10.0.0.1",
            "KMQ_ZOOKEEPER_SECURITY_USERNAME": "me",
            "KMQ_ZOOKEEPER_SECURITY_PASSWORD": CANARY,
            "KMQ_ZOOKEEPER_SECURITY_CHECK_HOSTNAME": "no",
            "KMQ_ZOOKEEPER_SECURITY_ACL": "world:anyone:r, sasl:you:cdrwa",
        }
        connection, zookeeper = (
            settings_module.build(cls, from_environment(cls, environ))
            for cls in (KafkaConnection, ZooKeeperConnection)
        )
        assert connection.kafka == {"sasl.password": CANARY, "ssl.ca.location": "ca.pem"}
        assert zookeeper.security == ZooKeeperSecurity(
            username="me",
            password=CANARY,
            check_hostname=False,
            acl=("world:anyone:r", "sasl:you:cdrwa"),
        )
        assert CANARY not in repr((connection, zookeeper))

    def test_a_file_that_is_not_there_is_named(self):
        kafka = {"security.protocol": "SSL", "ssl.ca.location": "/nothing/ca.pem"}
        with pytest.raises(ConfigError, match=r"ssl\.ca\.location: there is no '/nothing/ca\.pem'"):
            new_consumer(KafkaConnection(bootstrap="h:1", kafka=kafka), {})

    def test_a_misspelt_variable_is_refused(self):
        environ = {"KMQ_ZOOKEEPER_SECURITY_PASWORD": CANARY}
        with pytest.raises(ConfigError) as caught:
            settings_module.build(ZooKeeperConnection, from_environment(ZooKeeperConnection, environ))
        assert str(caught.value) == "zookeeper_security.pasword: unknown setting; did you mean password?"

    def test_the_environment_goes_into_the_tables_of_the_file(self, tmp_path, monkeypatch):
        file = tmp_path / "kmq.toml"
        file.write_text(
            '[kafka]\nsasl.username = "me"\nsasl.password = "old"\n'
            '[zookeeper_security]\nusername = "me"\nscheme = "digest"\n[tracker]\nworkers = 3\n'
        )
        monkeypatch.setenv("KMQ_CONFIG", str(file))
        monkeypatch.setenv("KMQ_KAFKA_SASL_PASSWORD", CANARY)
        monkeypatch.setenv("KMQ_ZOOKEEPER_SECURITY_PASSWORD", CANARY)
        connection = KafkaConnection.from_environment()
        assert connection.kafka == {"sasl.username": "me", "sasl.password": CANARY}
        expected = ZooKeeperSecurity(username="me", password=CANARY, scheme="digest")
        assert ZooKeeperConnection.from_environment().security == expected

    @pytest.mark.parametrize("value", ["x", ["x"], 5, None])
    def test_only_a_table(self, value):
        with pytest.raises(ConfigError, match="zookeeper_security: expected a table"):
            settings_module.build(ZooKeeperConnection, {"zookeeper_security": value})

    def test_an_object_goes_through_and_survives_pickling(self):
        security = ZooKeeperSecurity(username="me", password=CANARY)
        built = settings_module.build(ZooKeeperConnection, {"zookeeper_security": security})
        assert pickle.loads(pickle.dumps(built)) == built
        assert built.security is security


@pytest.mark.parametrize(
    "arguments",
    [
        ["-X", f"sasl.password={CANARY}"],
        ["-X", f"sasl.password:{CANARY}"],
        ["-X", f"sasl.oauthbearer.client.secret={CANARY}"],
        ["-X", f"sasl.pasword={CANARY}"],
        ["-Z", f"password={CANARY}"],
        ["-Z", f"key_password={CANARY}"],
        ["-Z", f"password:{CANARY}"],
        ["-Z", f"pasword={CANARY}"],
        [f"--password={CANARY}"],
    ],
)
def test_the_command_line_is_no_place_for_secrets(arguments, capsys):
    assert run(["receive", "jobs", *arguments]) == 2
    shown = "".join(capsys.readouterr())
    assert shown.startswith("kmq: error: ")
    assert CANARY not in shown


def test_where_a_secret_belongs(capsys):
    run(["receive", "jobs", "-X", f"sasl.password={CANARY}"])
    assert "KMQ_KAFKA_SASL_PASSWORD, or in the table [kafka] of a file" in capsys.readouterr().err
    run(["receive", "jobs", "-Z", f"key_password={CANARY}"])
    assert "KMQ_ZOOKEEPER_SECURITY_KEY_PASSWORD, or in the table [zookeeper_sec" in capsys.readouterr().err
