"""TLS to a database: the settings of urls, the same for all of them, and the errors that it makes."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from kmqpy.core.settings import convert
from kmqpy.errors import ConfigError
from kmqpy.queue import QueueUrl

_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
TLS_SETTINGS = (*_FILES, "ssl_verify")
_REFUSALS = (
    "certificate verify failed",
    "does not match host name",
    "doesn't match",
    "hostname mismatch",
    "ip address mismatch",
    "certificate required",
    "requires a valid client certificate",
    "unknown ca",
    "does not support ssl",
    "server doesn't support it",
    "no encryption",
    "private key file",
)


@dataclass(frozen=True, slots=True)
class Tls:
    """How to connect by TLS.

    ca_certs           a PEM file with the authorities to trust; None: those that the system trusts
    certfile, keyfile  PEM files of the client's certificate and key (None: the key is in `certfile`)
    verify             False: encrypt only; whoever is in between can pose as the server
    """

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None
    verify: bool = True

    def context(self) -> ssl.SSLContext:
        """The same for drivers in Python. Raises ConfigError for files that are no certificates or keys."""
        try:
            made = ssl.create_default_context(cafile=self.ca_certs)
            if self.certfile is not None:
                made.load_cert_chain(self.certfile, self.keyfile, password=lambda: "")  # never ask a terminal
        except (OSError, ValueError) as error:
            raise ConfigError(f"{', '.join(_FILES)}: these files can't be used: {error}") from None
        if not self.verify:
            made.check_hostname = False
            made.verify_mode = ssl.CERT_NONE
        return made


def tls_of(url: QueueUrl, *, wanted: bool = False) -> Tls | None:
    """The TLS that a url asks for; None: no setting of it is there, and it is not `wanted` otherwise.

    Raises ConfigError for a file that can't be read, and for settings that contradict each other.
    """
    given = {name: url.settings[name] for name in TLS_SETTINGS if name in url.settings}
    if not (given or wanted):
        return None
    verify: bool = convert("ssl_verify", given.pop("ssl_verify", True), bool)
    for name, path in given.items():
        try:
            Path(path).open("rb").close()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{name}: the file {path!r} can't be read: {reason}") from None
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError("ssl_keyfile: is of no use without its certificate; give it as ssl_certfile")
    if "ssl_ca_certs" in given and not verify:
        raise ConfigError("ssl_verify: false trusts every certificate, so leave out ssl_ca_certs, or it")
    ca_certs, certfile, keyfile = (given.get(name) for name in _FILES)
    return Tls(ca_certs, certfile, keyfile, verify)


def is_refusal(error: BaseException) -> bool:
    """True if the error of a driver means that TLS was refused, by one end: another attempt is no use."""
    text = str(error).lower()
    return any(one in text for one in _REFUSALS)
