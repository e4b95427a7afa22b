"""Settings: where ZooKeeper is, and how ZooKeeper and its clients prove to each other who they are."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Self, cast

from kmqpy.core.environment import config_file, from_environment
from kmqpy.core.settings import build, check_addresses, keyed, keys
from kmqpy.errors import ConfigError

_ACL = re.compile(r"[a-z0-9]+:.+:[cdrwa]+")


@dataclass(frozen=True, kw_only=True)
class ZooKeeperSecurity:
    """How ZooKeeper and kmqpy prove to each other who they are; by default neither does.

    Args:
        username: Of kmqpy at ZooKeeper; only this user (and `acl`) may use znodes that kmqpy makes.
        password: That of this user.
        scheme: How kmqpy proves to be this user: "sasl" (DIGEST-MD5; ZooKeeper checks the password; needs the
            extra kmqpy[sasl]) or "digest" (sends the password as it is, so only with TLS; ZooKeeper takes any
            password, and the ACLs of znodes decide).
        tls: Whether to encrypt; implied when `ca` or `certificate` is given.
        ca: PEM file of the authorities to trust; default: the system's.
        certificate: PEM file of kmqpy's own certificate, where ZooKeeper wants one; only its owner (and
            `acl`) may use znodes that kmqpy makes.
        key: PEM file of the key of this certificate; default: the same file.
        key_password: The password of an encrypted key.
        check_hostname: Whether ZooKeeper's certificate must name the host that kmqpy connects to.
        acl: Who else may do what with znodes that kmqpy makes, as scheme:id:cdrwa, for example
            sasl:admin:cdrwa or world:anyone:r.
    """

    username: str = ""
    password: str = field(default="", repr=False)
    scheme: str = "sasl"
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    key_password: str = field(default="", repr=False)
    check_hostname: bool = True
    acl: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.scheme not in ("sasl", "digest"):
            raise ConfigError(f"scheme: {self.scheme!r} is neither sasl nor digest")
        if bool(self.username) != bool(self.password):
            missing = "password" if self.username else "username"
            raise ConfigError(f"{missing}: must not be empty where the other of the two is given")
        if self.key and not self.certificate:
            raise ConfigError("certificate: must not be empty where a key is given")
        for entry in self.acl:
            if not _ACL.fullmatch(entry):  # not shown: of scheme digest it holds a password's hash
                raise ConfigError("acl: write its entries like sasl:admin:cdrwa or world:anyone:r")
        if self.acl and not self.authenticated:
            raise ConfigError("acl: needs a username or a certificate, else everybody may do everything")

    @property
    def authenticated(self) -> bool:
        """True when the connection authenticates, so that znodes can belong to its user."""
        return bool(self.username or self.certificate)

    @property
    def encrypted(self) -> bool:
        """True when the connection uses TLS."""
        return self.tls or bool(self.ca or self.certificate)


@dataclass(frozen=True, kw_only=True)
class ZooKeeperConnection:
    """Where ZooKeeper is, for administration, trackers and queues in ZooKeeper.

    Clients of queues on Kafka connect to Kafka only.

    Files, the environment and options call these settings `zookeeper` and `zookeeper_security`. The root
    znode of kmqpy is a setting of KafkaConnection only, so that clients and trackers can't disagree about it.

    Args:
        hosts: `host:port[,host:port]`, maybe with the path of a znode at the end; empty: there is no
            ZooKeeper.
        security: How ZooKeeper and kmqpy prove to each other who they are, and TLS.
    """

    hosts: str = field(default="127.0.0.1:2181", metadata=keyed("zookeeper"))
    security: ZooKeeperSecurity = field(
        default_factory=ZooKeeperSecurity, metadata=keyed("zookeeper_security")
    )

    def __post_init__(self) -> None:
        check_addresses(self.hosts.partition("/")[0], "zookeeper", "host:2181")

    @classmethod
    def from_environment(cls) -> Self:
        """Read the settings from the file KMQ_CONFIG; environment variables override it.

        The variables are KMQ_ZOOKEEPER, which `kmq dev up` prints, KMQ_ZOOKEEPER_SECURITY_PASSWORD and the
        like.

        Raises:
            ConfigError: An argument or setting is invalid.
        """
        own = {key: value for key, value in config_file().items() if key in keys(cls)}
        return build(cls, own, from_environment(cls, os.environ))


def check_zookeeper(value: object) -> ZooKeeperConnection:
    """Return `value`; raise ConfigError if it is no ZooKeeperConnection, an address as text for example."""
    if hasattr(value, "hosts"):  # so that tests can give a connection of their own
        return cast("ZooKeeperConnection", value)
    shown = repr(value) if isinstance(value, str) else f"an object of type {type(value).__name__}"
    raise ConfigError(
        f"zookeeper: {shown} is not a ZooKeeperConnection; "
        "write it as ZooKeeperConnection(hosts='host:2181'), or ZooKeeperConnection.from_environment()"
    )


NO_ZOOKEEPER = ZooKeeperConnection(hosts="")
"""The settings of an administration without ZooKeeper, and so without the registry."""
