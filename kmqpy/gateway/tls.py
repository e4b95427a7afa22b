"""Checks the files of TLS, so that an error names the one that is wrong."""

from __future__ import annotations

import ssl
from pathlib import Path

from kmqpy.errors import ConfigError


def check_tls(cert: Path, key: Path) -> None:
    """Raise ConfigError unless these are a certificate and its key, both PEM, and the key has no password."""
    for name, path, needed in (
        ("tls_cert", cert, b"CERTIFICATE-----"),
        ("tls_key", key, b"PRIVATE KEY-----"),
    ):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{name}: {path} can't be read: {error.strerror}") from None
        if needed not in content:
            what = needed.decode().strip("-").lower()
            raise ConfigError(f"{name}: {path} holds no {what}; give a file in PEM")
    if b"ENCRYPTED" in content:
        raise ConfigError(f"tls_key: {key} has a password; take that away: openssl pkey -in {key} -out NEW")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"tls_key: {key} is not the key of the certificate in {cert}") from None
        raise ConfigError(f"tls_cert, tls_key: {cert} or {key} is damaged: {error.reason}") from None
