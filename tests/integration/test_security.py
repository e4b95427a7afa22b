"""Kafka and ZooKeeper with passwords, certificates and ACLs; what is refused, and that no secret is told."""

import contextlib
import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka.admin import ResourceType
from kazoo.exceptions import NoAuthError
from security_support import (
    CANARY,
    Secured,
    client_acls,
    grant,
    page_block,
    producer_acls,
    tracker_acls,
)
from support import LiveQueue, until, value

from kmqpy.core import logs
from kmqpy.dev.ports import free_ports
from kmqpy.errors import AccessDenied, ConfigError, Unavailable
from kmqpy.kafka import librdkafka, settings_mirror
from kmqpy.kafka.admin.registry import Registry
from kmqpy.kafka.admin.registry_entries import StoredOffset
from kmqpy.kafka.admin.znode_paths import ZnodePaths
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.kafka.settings import KafkaConnection, QueueSettings
from kmqpy.kafka.settings_mirror import SettingsMirror, settings_of
from kmqpy.kafka.topics import Topics
from kmqpy.zookeeper import session
from kmqpy.zookeeper.session import connect
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity
from tests.chaos.served_page import page_of
from tracker.settings import TrackerSettings
from tracker.tracker import Tracker

QUICK_S = 30.0
"""Seconds, on a busy machine too; alone it takes about 1.4."""


class Log(logging.Handler):
    """All that is logged below WARNING and above, as it would be shown."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(logs.TextFormatter())
        self.lines: list[str] = []
        self.loud: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = self.format(record)
        self.lines.append(line)
        if record.levelno >= logging.ERROR:
            self.loud.append(line)


@pytest.fixture
def everything_logged():
    """Every log line of every library, at DEBUG; librdkafka's and kazoo's, too."""
    log = Log()
    root, ours = logging.getLogger(), logging.getLogger("kmqpy.zookeeper.session.kazoo")
    filters, librdkafka._log.filters = librdkafka._log.filters, []
    levels = root.level, ours.level
    root.addHandler(log)
    root.setLevel(1)
    ours.setLevel(1)
    yield log
    root.removeHandler(log)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    librdkafka._log.filters = filters


@contextlib.contextmanager
def refused(match: str):
    """The block raises AccessDenied soon, says this, names what to check and keeps the secret."""
    started = time.monotonic()
    with pytest.raises(AccessDenied, match=match) as caught:
        yield
    assert time.monotonic() - started < QUICK_S
    assert "check" in str(caught.value)
    assert CANARY not in str(caught.value)


# --- what works ---------------------------------------------------------------------------------------


def test_without_the_right_to_read_the_settings_of_queues_they_are_as_given(
    secured, live, caplog, monkeypatch
):
    topic = f"mirror-{live.name}"
    monkeypatch.setattr(settings_mirror, "SETTINGS_TOPIC", topic)
    SettingsMirror(live.connection).write([live.settings])
    sender = secured.connection("sender", root=live.connection.root)
    rights = producer_acls(live.name)[:3]  # but for that
    grant(secured, "sender", *rights)
    with caplog.at_level(logging.WARNING, "kmqpy.kafka.settings_mirror"):
        for _ in range(2):
            with KmqClient(live.settings, sender) as producer:
                producer.send("as before")
        assert settings_of(live.name, sender) == QueueSettings(name=live.name, markers="jvm")
    assert [one.getMessage().partition(";")[0] for one in caplog.records] == [f"topic {topic} can't be read"]
    grant(secured, "sender", *rights, (ResourceType.TOPIC, topic, "READ"), producer_acls(live.name)[-1])
    until(lambda: settings_of(live.name, sender) == live.settings)
    with pytest.raises(AccessDenied, match=f"write to {topic}"):
        SettingsMirror(sender).write([dataclasses.replace(live.settings, max_redeliveries=9)])


def test_minimal_acls_are_enough(secured, live):
    grant(secured, "client", *client_acls(live.name))
    grant(secured, "sender", *producer_acls(live.name))
    grant(secured, "tracker", *tracker_acls(live.name))
    here = {"root": live.connection.root}
    settings = TrackerSettings(http_port=0, session_timeout_ms=2_000, offset_interval_ms=200)
    with Tracker(secured.connection("tracker", **here), secured.zookeeper_connection, settings) as tracker:
        with KmqClient(live.settings, secured.connection("sender", **here)) as producer:
            producer.send("good")
            producer.send("bad")
            producer.send("late", delay=0.2)
        attempts: dict[str, int] = {}
        with KmqClient(live.settings, secured.connection("client", **here)) as client:

            def all_came() -> bool:
                for message in client.receive(10, wait=0.2, lease=0.5):
                    attempts[message.body.decode()] = message.attempts
                    if message.body == b"bad":
                        client.dead_letter(message, reason="bad")
                    elif message.attempts == 1:
                        client.nack(message)
                    else:
                        client.ack(message, confirmed=True)
                return attempts == {"good": 2, "bad": 1, "late": 2}

            until(all_came, what=lambda: (attempts, tracker.problems()))
        until(lambda: value(tracker, live.name, "dead_lettered"), what=tracker.problems)
        for user in ("client", "sender"):  # the tracker tells them
            mirror = SettingsMirror(secured.connection(user, **here))
            until(lambda mirror=mirror: mirror.find(live.name) == live.settings)
        # What was asked before the broker knew of the rights is asked again.
        until(lambda: tracker.problems() == [], what=tracker.problems)
    assert [record.value() for record in live.dead_letters()] == [b"bad"]


@pytest.mark.parametrize("missing", ["topic", "group", "transactional id"])
def test_an_acl_that_is_missing_is_named(secured, live, missing):
    user = {"transactional id": "tracker"}.get(missing, "client")
    acls = client_acls(live.name) if user == "client" else tracker_acls(live.name)
    kind = ResourceType[missing.upper().replace(" ", "_")]
    grant(secured, user, *(acl for acl in acls if acl[0] != kind))
    connection = secured.connection(user, root=live.connection.root)
    if user == "tracker":
        settings = TrackerSettings(http_port=-1, session_timeout_ms=2_000)
        with Tracker(connection, secured.zookeeper_connection, settings) as tracker:
            until(lambda: "not allow" in str(tracker.problems()), what=tracker.problems)
        return
    with (
        pytest.raises(AccessDenied, match=r"does not allow it.*security"),
        KmqClient(live.settings, connection) as client,
    ):
        client.receive(wait=QUICK_S)


def test_certificates_do_instead_of_passwords(secured, queue_name):
    connection = secured.connection(
        "",
        bootstrap=secured.tls,
        kafka={
            "security.protocol": "SSL",
            "ssl.ca.location": secured.files.ca,
            "ssl.certificate.location": secured.files.client,
            "ssl.key.location": secured.files.client,
        },
    )
    security = ZooKeeperSecurity(ca=secured.files.ca, certificate=secured.files.client)
    zookeeper = ZooKeeperConnection(hosts=secured.zookeeper_tls, security=security)
    with LiveQueue(connection, zookeeper, queue_name) as queue:
        queue.tracker()
        with queue.registry() as registry:
            assert registry.get(queue_name).partitions == 1
        with connect(ZooKeeperConnection(hosts=zookeeper.hosts, security=security)) as zk:
            acls = zk.get_acls(ZnodePaths(queue.connection.root).queue(queue_name))[0]
        assert [(acl.id.scheme, acl.acl_list) for acl in acls] == [("x509", ["ALL"])]


def test_the_file_of_the_page_is_enough_for_certificates_on_both_sides(
    secured, queue_name, tmp_path, monkeypatch
):
    files = tmp_path / "etc"
    files.mkdir()
    (files / "ca.pem").write_text(Path(secured.files.ca).read_text())
    key, begin, certificates = Path(secured.files.client).read_text().partition("-----BEGIN CERTIFICATE")
    (files / "client.key").write_text(key)
    (files / "client.pem").write_text(begin + certificates)
    text = page_block("kmq.toml").replace("/etc/kmq", str(files))
    text = text.replace("kafka1:9093,kafka2:9093", secured.tls).replace(
        "zk1:2281,zk2:2281", secured.zookeeper_tls
    )
    (tmp_path / "kmq.toml").write_text(text)
    monkeypatch.setenv("KMQ_CONFIG", str(tmp_path / "kmq.toml"))
    connection = KafkaConnection.from_environment()
    with LiveQueue(connection, ZooKeeperConnection.from_environment(), queue_name) as queue:
        queue.tracker()
        queue.send("one")
        client = queue.client()
        assert [message.attempts for message in client.receive(wait=30, lease=0.2)] == [1]
        assert [message.attempts for message in client.receive(wait=30)] == [2], "a tracker redelivered it"
    without = text.replace("ssl.certificate.location", "#").replace("ssl.key.location", "#")
    (tmp_path / "kmq.toml").write_text(without)
    with pytest.raises(Unavailable):
        KmqClient(queue.settings, KafkaConnection.from_environment()).send("no certificate")


# --- what is refused ----------------------------------------------------------------------------------


def _open_client(connection: KafkaConnection, _zookeeper: ZooKeeperConnection) -> None:
    KmqClient("jobs", connection)


def _open_tracker(connection: KafkaConnection, zookeeper: ZooKeeperConnection) -> None:
    Tracker(connection, zookeeper, TrackerSettings(http_port=0, session_timeout_ms=2_000)).start()


ANYBODY = pytest.mark.parametrize("opened", [_open_client, _open_tracker])


@ANYBODY
def test_a_wrong_kafka_password_is_told(secured, opened, caplog):
    wrong = secured.connection("client", kafka=secured.kafka("client", CANARY + "x"))
    with refused("do not accept each other.*Authentication failed.*sasl.password"):
        opened(wrong, secured.zookeeper_connection)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3


def test_a_kafka_that_is_not_the_right_one(secured):
    wrong = secured.connection("client", kafka=secured.kafka("client", ca=secured.files.other_ca))
    with refused("certificate verify failed.*ssl.ca.location"):
        KmqClient("jobs", wrong)


def test_a_missing_certificate_is_told(secured):
    tls = {"security.protocol": "SSL", "ssl.ca.location": secured.files.ca}
    with refused("ssl.certificate.location"):
        KmqClient("jobs", KafkaConnection(bootstrap=secured.tls, kafka=tls))


def test_kafka_does_not_know_the_certificate(secured):
    stranger = secured.files.stranger
    tls = {
        "security.protocol": "SSL",
        "ssl.ca.location": secured.files.ca,
        "ssl.certificate.location": stranger,
        "ssl.key.location": stranger,
    }
    with refused("ssl.certificate.location"):
        KmqClient("jobs", KafkaConnection(bootstrap=secured.tls, kafka=tls))


def test_without_encryption_where_kafka_wants_it(secured):
    with pytest.raises(Unavailable, match=r"security\.protocol"):  # librdkafka tells nothing
        Topics(KafkaConnection(bootstrap=secured.sasl), timeout_s=1).brokers()


def test_with_encryption_where_kafka_has_none(secured):
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"SSL.* closed by peer.*security\.protocol"):
        Topics(
            KafkaConnection(bootstrap=secured.open_kafka, kafka={"security.protocol": "SSL"}), 90
        ).brokers()
    assert time.monotonic() - started < 90  # said as soon as it is clear


def test_who_may_do_nothing_in_kafka(secured, live):
    with pytest.raises(AccessDenied, match=r"describe topic .* does not allow it"):
        KmqClient(live.settings, secured.connection("nobody"))


def test_who_may_write_nothing_in_kafka_is_told_each_time(secured, live):
    """Kafka gives such a producer no id, which ends it for good."""
    grant(secured, "nobody", *_without_write(producer_acls(live.name)))
    with KmqClient(live.settings, secured.connection("nobody")) as producer:
        for _ in range(2):
            with pytest.raises(AccessDenied, match=r"does not allow it .*Cluster authorization.*security"):
                producer.send("m")


def test_a_client_that_may_write_nothing_in_kafka_says_why(secured, live, caplog):
    grant(secured, "nobody", *_without_write(client_acls(live.name)))
    live.send("m")
    with KmqClient(live.settings, secured.connection("nobody")) as client:
        until(lambda: client.partitions or client.receive(wait=0.1) or _warned(caplog, "a partition can't"))
        assert client.receive(wait=0.1) == []
        assert client._consumer.current._topics.writer._thread.is_alive()
        until(lambda: _warned(caplog, "markers"))
    assert {warning.error for warning in _warned(caplog, "markers")} == {"CLUSTER_AUTHORIZATION_FAILED"}


def _without_write(acls: list[tuple[ResourceType, str, str]]) -> list[tuple[ResourceType, str, str]]:
    return [(kind, name, operations.replace("WRITE", "DESCRIBE")) for kind, name, operations in acls]


def _warned(caplog, text: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith(text)]


@pytest.mark.parametrize(
    ("address", "more", "match"),
    [
        ("zookeeper", {"password": "wrong", "ca": ""}, "does not accept the username or password"),
        ("zookeeper_tls", {"password": "wrong"}, "does not accept the username or password"),
        ("zookeeper_tls", {"ca": "other_ca"}, "certificate is not accepted.*zookeeper_security.ca"),
        ("zookeeper_tls", {"certificate": "stranger"}, "TLS failed.*zookeeper_security.certificate"),
    ],
)
@pytest.mark.parametrize("who", ["registry", "tracker"])
def test_a_wrong_password_or_certificate_of_zookeeper(secured, who, address, more, match, caplog):
    files = dataclasses.asdict(secured.files)
    security = secured.security(**{key: files.get(text, text) for key, text in more.items()})
    hosts = getattr(secured, address)
    with refused(match):
        if who == "registry":
            with connect(ZooKeeperConnection(hosts=hosts, security=security)) as zk:
                Registry(zk).queues()
        else:
            here = KafkaConnection(bootstrap=secured.open_kafka, root="/tried")
            _open_tracker(here, ZooKeeperConnection(hosts=hosts, security=security))
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) <= 3


def _names_tls(hosts: str, security: ZooKeeperSecurity) -> bool:
    """Whether the error of a connection asks if the address is one for TLS."""
    with (
        pytest.raises(Unavailable) as refusal,
        connect(ZooKeeperConnection(hosts=hosts, security=security), timeout=0.5),
    ):
        pass
    return "check whether the address is one for TLS" in str(refusal.value)


def test_tls_and_no_tls_of_zookeeper(secured):
    for hosts, security in (
        (secured.zookeeper, secured.security()),
        (secured.zookeeper_tls, ZooKeeperSecurity()),
    ):
        # A busy machine may not have spoken with it within half a second.
        until(partial(_names_tls, hosts, security))


@pytest.mark.parametrize(
    "stranger",
    [
        {},
        {"username": "other", "password": CANARY},
        {"username": "kmq", "password": CANARY, "scheme": "digest"},
    ],
    ids=["nobody", "another user", "another scheme"],
)
def test_strangers_read_and_write_nothing_in_zookeeper(secured, live, stranger):
    paths = ZnodePaths(live.connection.root)
    live.tracker(tracker_id="one")
    with live.registry() as registry:
        until(lambda: registry.offsets(live.name))
    with connect(ZooKeeperConnection(hosts=secured.zookeeper, security=ZooKeeperSecurity(**stranger))) as zk:
        known = [
            paths.queues,
            paths.queue(live.name),
            paths.partitions(live.name),
            paths.partition(live.name, 0),
            paths.leader(live.name, 0),
            paths.offset(live.name, 0),
            paths.trackers,
            paths.tracker("one"),
        ]
        for path in [live.connection.root, *known]:
            for forbidden in (zk.get, zk.get_children, zk.delete):
                if forbidden == zk.delete and path == live.connection.root:
                    continue  # the ACL of its parent decides, which is not ours
                with pytest.raises(NoAuthError):
                    forbidden(path)
            with pytest.raises(NoAuthError):
                zk.set(path, StoredOffset(10**9, "x", 0).to_json())
            if path not in (paths.leader(live.name, 0), paths.tracker("one")):
                with pytest.raises(NoAuthError):
                    zk.create(f"{path}/intruder", b"")
        with pytest.raises(AccessDenied, match=r"this user may not do that.*ACLs"):
            Registry(zk, live.connection.root).get(live.name)


def test_others_may_do_what_the_acl_says(secured, queue_name):
    security = secured.security(acl=("world:anyone:r", "sasl:other:cdrwa"))
    connection = secured.connection("", bootstrap=secured.open_kafka, kafka={})
    zookeeper = ZooKeeperConnection(hosts=secured.zookeeper_tls, security=security)
    with LiveQueue(connection, zookeeper, queue_name) as queue:
        root = queue.connection.root
        with connect(ZooKeeperConnection(hosts=secured.zookeeper)) as zk:
            assert Registry(zk, root).get(queue_name).partitions == 1
            with pytest.raises(AccessDenied):
                Registry(zk, root).register(queue.settings, 2)
        with connect(
            ZooKeeperConnection(hosts=secured.zookeeper, security=secured.security("other", ca=""))
        ) as zk:
            Registry(zk, root).register(queue.settings, 2)


def test_digest_takes_any_password_and_the_acls_decide(secured):
    root = f"/digest-{uuid.uuid4().hex}"
    security = secured.security(scheme="digest")
    with connect(ZooKeeperConnection(hosts=secured.zookeeper_tls, security=security)) as zk:
        zk.create(root, b"")
    with connect(ZooKeeperConnection(hosts=secured.zookeeper_tls, security=security)) as zk:
        assert zk.get(root)[0] == b""
    wrong = secured.security(scheme="digest", password="wrong")
    with (
        refused("this user may not do that"),
        connect(ZooKeeperConnection(hosts=secured.zookeeper_tls, security=wrong)) as zk,
        session.unavailable(zk),
    ):
        zk.get(root)


@pytest.mark.parametrize(
    "field", ["ca", *(pytest.param(one, marks=pytest.mark.breadth) for one in ("certificate", "key"))]
)
def test_files_of_zookeeper_that_can_not_be_used(secured, field):
    security = ZooKeeperSecurity(**{"certificate": secured.files.client, field: "/nowhere.pem"})
    with pytest.raises(
        ConfigError, match=r"zookeeper_security\.(ca|certificate): .*nowhere.pem.*No such file"
    ):
        session.new_client(ZooKeeperConnection(hosts="127.0.0.1:1", security=security))


# --- no secret is told --------------------------------------------------------------------------------


def test_no_log_of_any_library_tells_a_secret(secured, live, everything_logged):
    grant(secured, "client", *client_acls(live.name), *producer_acls(live.name), *tracker_acls(live.name))
    kafka_settings = {**secured.kafka("client"), "debug": "all"}
    for scheme in ("sasl", "digest"):
        root = f"{live.connection.root}-{scheme}"
        security = secured.security(scheme=scheme, certificate=secured.files.client)
        connection = secured.connection("client", root=root, kafka=kafka_settings)
        zookeeper = ZooKeeperConnection(hosts=secured.zookeeper_tls, security=security)
        logging.getLogger("test").info("%s %r %s", connection, connection, zookeeper)
        with connect(ZooKeeperConnection(hosts=zookeeper.hosts, security=security)) as zk:
            Registry(zk, root).register(live.settings, 1)
    live.send("one")
    with Tracker(connection, zookeeper, TrackerSettings(http_port=-1, session_timeout_ms=2_000)) as tracker:
        until(tracker.owned, what=tracker.problems)
        with KmqClient(live.settings, connection) as client:
            until(lambda: [client.ack(message, confirmed=True) for message in client.receive()])
    wrong = dataclasses.replace(connection, kafka={**kafka_settings, "sasl.password": f"{CANARY}-wrong"})
    with pytest.raises(AccessDenied):
        KmqClient(live.settings, wrong)
    told = "\n".join(everything_logged.lines)
    assert "kmqpy.zookeeper.session.kazoo" in told
    assert "SCRAM" in told  # they did talk of it
    assert "Sending request(xid=-4): ***" in told  # kazoo's Auth
    assert CANARY not in told


def _environment(secured: Secured, user: str, root: str, **more: str) -> dict[str, str]:
    settings = {
        "BOOTSTRAP": secured.sasl,
        "ZOOKEEPER": secured.zookeeper_tls,
        "ROOT": root,
        "ZOOKEEPER_SECURITY_USERNAME": "kmq",
        "ZOOKEEPER_SECURITY_PASSWORD": CANARY,
        "ZOOKEEPER_SECURITY_CA": secured.files.ca,
        **{f"KAFKA_{key.upper().replace('.', '_')}": text for key, text in secured.kafka(user).items()},
        **more,
    }
    return {**os.environ, **{f"KMQ_{key}": text for key, text in settings.items()}}


def _kmq(*arguments: str, env: dict[str, str]) -> tuple[int, str]:
    run = subprocess.run(
        [sys.executable, "-c", "from kmqpy.cli import main; main()", *arguments],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


def test_commands_take_secrets_from_environment_and_file_and_tell_none(secured, live, tmp_path):
    grant(
        secured,
        "client",
        (ResourceType.TOPIC, f"{live.name}*", "ALL"),
        (ResourceType.GROUP, "kmq-*", "ALL"),
    )
    root = live.connection.root
    env = _environment(secured, "client", root)
    live.send("one", "two")
    code, shown = _kmq("receive", live.name, "--ack", "-v", env=env)
    assert (code, CANARY in shown) == (0, False), shown

    file = tmp_path / "kmq.toml"
    table = "\n".join(f"{key} = {json.dumps(text)}" for key, text in secured.kafka("client").items())
    file.write_text(
        f'bootstrap = "{secured.sasl}"\nzookeeper = "{secured.zookeeper_tls}"\nroot = "{root}"\n'
        f"[kafka]\n{table}\n[zookeeper_security]\n"
        f'username = "kmq"\npassword = "{CANARY}"\nca = "{secured.files.ca}"\n'
    )
    code, shown = _kmq("-o", "json", "stats", live.name, "--config", str(file), env={**os.environ})
    assert (code, CANARY in shown) == (0, False), shown

    for wrong in ("KAFKA_SASL_PASSWORD", "ZOOKEEPER_SECURITY_PASSWORD"):
        env = _environment(secured, "client", root, **{wrong: f"{CANARY}-wrong"})
        started = time.monotonic()
        code, shown = _kmq("stats", live.name, env=env)
        assert (code, CANARY in shown) == (2, False), shown
        assert re.fullmatch(r"kmq: error: .* accept .*check .*\n", shown), shown
        assert time.monotonic() - started < 2 * QUICK_S  # with the start of Python on a busy machine


def test_a_tracker_process_tells_no_secret(secured, live):
    grant(secured, "tracker", *tracker_acls(live.name))
    (port,) = free_ports(1)
    env = _environment(
        secured, "tracker", live.connection.root, TRACKER_HTTP_PORT=str(port), KAFKA_DEBUG="security,broker"
    )
    command = [sys.executable, "-m", "tracker", "--log-level", "DEBUG", "--session-timeout", "2s"]

    def page(path: str) -> str:
        return page_of(port, path)[1]

    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        try:
            until(lambda: '"ready": true' in page("/readyz"))
            until(lambda: "kmq_owned_partitions{" in page("/metrics"))
            told = page("/readyz") + page("/metrics") + page("/livez")
            for pid in (process.pid, secured.cluster.broker().pid, secured.cluster.zookeeper_server().pid):
                told += Path(f"/proc/{pid}/cmdline").read_text() if Path("/proc").exists() else ""
        finally:
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=60)[0].decode()
    assert "tracker started" in output
    assert CANARY not in told + output
