"""Kafka and ZooKeeper with passwords, certificates and ACLs, for tests."""

import dataclasses
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives import serialization
from support import LiveQueue

from kmqpy.dev import Cluster
from kmqpy.dev.ports import free_ports
from kmqpy.kafka.settings import SETTINGS_TOPIC, KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection, ZooKeeperSecurity

CANARY = f"canary-{uuid.uuid4().hex}"
"""The one password of all users, so that it is easy to look for."""


@dataclasses.dataclass(frozen=True)
class Files:
    """PEM files: the authority's certificate, and one of a client (with its key) that it vouches for."""

    ca: str
    client: str
    server: str
    other_ca: str
    stranger: str


@dataclasses.dataclass(frozen=True)
class Secured:
    """Addresses of the listeners, and how to use them."""

    cluster: Cluster
    files: Files
    open_kafka: str
    sasl: str
    tls: str
    zookeeper: str
    zookeeper_tls: str

    def kafka(self, user: str, password: str = CANARY, ca: str | None = None) -> dict[str, str]:
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": user,
            "sasl.password": password,
            "ssl.ca.location": ca or self.files.ca,
        }

    def security(self, user: str = "kmq", password: str = CANARY, **more: Any) -> ZooKeeperSecurity:
        return ZooKeeperSecurity(**{"username": user, "password": password, "ca": self.files.ca, **more})

    @property
    def zookeeper_connection(self) -> ZooKeeperConnection:
        return ZooKeeperConnection(hosts=self.zookeeper_tls, security=self.security())

    def connection(self, user: str, **more: Any) -> KafkaConnection:
        return KafkaConnection(
            **{
                "bootstrap": self.sasl,
                "kafka": self.kafka(user),
                **more,
            }
        )


def _key(cert: trustme.LeafCert) -> bytes:
    """In the form that ZooKeeper can read."""
    key = serialization.load_pem_private_key(cert.private_key_pem.bytes(), None)
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _certificates(folder: Path) -> Files:
    made = {}
    for authority, names in {"ca": ("client", "server"), "other_ca": ("stranger",)}.items():
        ca = trustme.CA()
        made[authority] = ca.cert_pem.bytes()
        for name in names:
            cert = ca.issue_cert("127.0.0.1", "localhost", common_name=f"{name}-certificate")
            made[name] = _key(cert) + b"".join(blob.bytes() for blob in cert.cert_chain_pems)
    for name, data in made.items():
        (folder / f"{name}.pem").write_bytes(data)
    return Files(**{name: str(folder / f"{name}.pem") for name in made})


def page_block(name: str) -> str:
    """A block of docs/security.md, by the comment above it."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    (found,) = re.findall(rf"<!-- certificates: {re.escape(name)} -->\n```\w+\n(.*?)```", page, re.DOTALL)
    return found


def _check_page(name: str, settings: dict[str, str]) -> None:
    """The page tells of servers with these settings, but for the places of files and the port."""
    told = dict(line.split("=", 1) for line in page_block(name).splitlines())
    for key, text in told.items():
        assert key.lower().endswith(("location", "port")) or settings[key] == text, key
    assert told.keys() <= settings.keys()


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """Kafka with an open listener for administration, SCRAM over TLS and client certificates; ZooKeeper
    that takes SASL, digest and certificates, with and without TLS. ACLs are in force."""
    folder = tmp_path_factory.mktemp("secrets")
    files = _certificates(folder)
    jaas = folder / "jaas.conf"
    jaas.write_text(
        "Server { org.apache.zookeeper.server.auth.DigestLoginModule required "
        f'user_kmq="{CANARY}" user_other="{CANARY}"; }};\n'
    )
    plain, sasl, tls, controller, zk_tls = free_ports(5)
    store = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": files.server,
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": files.ca,
    }
    broker_settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{sasl},"
        f"SSL://127.0.0.1:{tls},CONTROLLER://127.0.0.1:{controller}",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": (
            "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL,SSL:SSL"
        ),
        "inter.broker.listener.name": "PLAINTEXT",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:client-certificate",
        "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/",
        "listener.name.ssl.ssl.client.auth": "required",
        "listener.name.sasl_ssl.sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        **store,
    }
    zookeeper_settings = {
        "secureClientPort": str(zk_tls),
        "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
        "authProvider.1": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
        "ssl.clientAuth": "want",
        "ssl.keyStore.location": files.server,
        "ssl.keyStore.type": "PEM",
        "ssl.trustStore.location": files.ca,
        "ssl.trustStore.type": "PEM",
    }
    _check_page("server.properties", broker_settings)
    _check_page("zoo.cfg", {**zookeeper_settings, "ssl.clientAuth": "need"})
    with Cluster(
        broker_settings=broker_settings,
        zookeeper_settings=zookeeper_settings,
        jvm_options=[f"-Djava.security.auth.login.config={jaas}"],
    ) as cluster:
        addresses = [f"127.0.0.1:{port}" for port in (plain, sasl, tls)]
        made = Secured(cluster, files, *addresses, cluster.zookeeper, f"127.0.0.1:{zk_tls}")
        admin = AdminClient({"bootstrap.servers": made.open_kafka})
        scram = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
        users = [
            UserScramCredentialUpsertion(user, scram, CANARY.encode())
            for user in ("client", "sender", "tracker", "nobody")
        ]
        for future in admin.alter_user_scram_credentials(users).values():
            future.result(60)
        yield made


@pytest.fixture
def live(secured, queue_name):
    """A queue made by an administrator: Kafka's super user, with the tracker's ZooKeeper user."""
    connection = secured.connection("admin", bootstrap=secured.open_kafka, kafka={})
    with LiveQueue(connection, secured.zookeeper_connection, queue_name) as queue:
        yield queue


def grant(secured: Secured, user: str, *allowed: tuple[ResourceType, str, str]) -> None:
    """Let `user` do it: (kind, name, operations); a name that ends with * is a prefix."""
    admin = AdminClient({"bootstrap.servers": secured.open_kafka})
    bindings = [
        AclBinding(
            kind,
            name.rstrip("*"),
            ResourcePatternType.PREFIXED if name.endswith("*") else ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation[operation],
            AclPermissionType.ALLOW,
        )
        for kind, name, operation in dict.fromkeys(
            (kind, name, operation) for kind, name, operations in allowed for operation in operations.split()
        )
    ]
    for future in admin.create_acls(bindings).values():
        future.result(60)


def client_acls(queue: str) -> list[tuple[ResourceType, str, str]]:
    """What docs/security.md says of clients that take messages."""
    return [
        (ResourceType.TOPIC, queue, "READ"),
        (ResourceType.TOPIC, f"{queue}__markers", "READ WRITE"),
        (ResourceType.TOPIC, f"{queue}__undelivered", "DESCRIBE"),
        (ResourceType.TOPIC, SETTINGS_TOPIC, "READ"),
        (ResourceType.GROUP, f"kmq-{queue}", "READ"),
        (ResourceType.GROUP, "kmq-none", "DESCRIBE"),
    ]


def producer_acls(queue: str) -> list[tuple[ResourceType, str, str]]:
    """What docs/security.md says of producers."""
    return [
        (ResourceType.TOPIC, queue, "WRITE"),
        (ResourceType.TOPIC, f"{queue}__markers", "DESCRIBE"),
        (ResourceType.TOPIC, f"{queue}__undelivered", "DESCRIBE"),
        (ResourceType.TOPIC, SETTINGS_TOPIC, "READ"),
        (ResourceType.GROUP, "kmq-none", "DESCRIBE"),
    ]


def tracker_acls(queue: str) -> list[tuple[ResourceType, str, str]]:
    """What docs/security.md says of trackers."""
    return [
        (ResourceType.TOPIC, queue, "READ WRITE"),
        (ResourceType.TOPIC, f"{queue}__markers", "READ WRITE"),
        (ResourceType.TOPIC, f"{queue}__undelivered", "READ WRITE"),
        (ResourceType.TOPIC, SETTINGS_TOPIC, "READ WRITE CREATE"),
        (ResourceType.TRANSACTIONAL_ID, f"kmq-tracker-{queue}-*", "WRITE"),
        (ResourceType.GROUP, "kmq-none", "DESCRIBE"),
    ]
