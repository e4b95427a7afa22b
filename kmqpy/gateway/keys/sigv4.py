"""AWS's signatures, version 4, in a header or in the query of a URL. Pure: no I/O.

The secret of a key is made of the operator's own key and what is stored of the client's: no secret is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from urllib.parse import quote, unquote

from kmqpy.errors import KmqError

ALGORITHM = "AWS4-HMAC-SHA256"
_SKEW_S = 900
_MAX_EXPIRES_S = 7 * 86_400
_TIME = "%Y%m%dT%H%M%SZ"
_FIELD = re.compile(r"(Credential|SignedHeaders|Signature)=([^\s,]*)")
_SPACES = re.compile(r"\s+")
_KEPT = 4_096
"""So many of what signatures need are kept: secrets, keys of a day, times."""
MIN_OPERATOR_KEY_BYTES = 32


class BadSignature(KmqError):
    """A signature is incomplete (then `is_incomplete`), or not that of the request."""

    def __init__(self, message: str, *, is_incomplete: bool = False) -> None:
        super().__init__(message)
        self.is_incomplete = is_incomplete


@lru_cache(_KEPT)
def secret_of(operator_key: bytes, key_id: str, nonce: str) -> str:
    """The secret access key of a client's key; `nonce` is what is stored of it."""
    digest = hmac.digest(operator_key, f"kmq aws secret\n{key_id}\n{nonce}".encode(), "sha256")
    return base64.b64encode(digest).decode().rstrip("=")


@lru_cache(_KEPT)
def _moment(time: str) -> datetime:
    """Kept: parsing costs as much as a signature, and many requests have the same second."""
    return datetime.strptime(time, _TIME).replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Signature:
    """What a request says of its signature.

    scope      day, region, service and `aws4_request`
    time       as it is signed
    expires_s  of a URL that was signed: seconds for which it is good; None: the signature is in a header
    """

    key_id: str
    scope: Sequence[str]
    headers: Sequence[str]
    signature: str
    time: str
    expires_s: int | None = None

    def check_time(self, now: datetime) -> None:
        """Raise BadSignature if it was made too long ago, or is one of the future."""
        try:
            made = _moment(self.time)
        except ValueError:
            raise _incomplete("Date must be in ISO-8601 'basic format'") from None
        if self.time[:8] != self.scope[0]:
            raise BadSignature(
                "Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date"
            )
        age_s = (now - made).total_seconds()
        if age_s > (_SKEW_S if self.expires_s is None else self.expires_s):
            raise BadSignature(f"Signature expired: {self.time} is too long before {now:{_TIME}}")
        if age_s < -_SKEW_S:
            raise BadSignature(f"Signature not yet current: {self.time} is still later than {now:{_TIME}}")

    def check(self, secret: str, text: str) -> bool:
        """True if it is that of the canonical request `text` by this secret."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        to_sign = f"{ALGORITHM}\n{self.time}\n{'/'.join(self.scope)}\n{digest}"
        made = hmac.new(_day_key(secret, *self.scope[:3]), to_sign.encode(), "sha256").hexdigest()
        return hmac.compare_digest(made.encode(), self.signature.encode())


@lru_cache(_KEPT)
def _day_key(secret: str, day: str, region: str, service: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def signature_of(
    header: Callable[[str], str], parameters: Mapping[str, str], service: str
) -> Signature | None:
    """The signature of a request; None if it has none. Raises BadSignature for half a one."""
    authorization = header("authorization")
    if authorization:
        algorithm, _, rest = authorization.partition(" ")
        found = dict(_FIELD.findall(rest))
        time, expires_s = header("x-amz-date"), None
    elif "X-Amz-Signature" in parameters:
        algorithm = parameters.get("X-Amz-Algorithm", "")
        found = {
            name: parameters.get(f"X-Amz-{name}", "") for name in ("Credential", "SignedHeaders", "Signature")
        }
        time = parameters.get("X-Amz-Date", "")
        expires = parameters.get("X-Amz-Expires", "")
        is_number = expires.isascii() and expires.isdecimal() and len(expires) <= len(str(_MAX_EXPIRES_S))
        if not (is_number and 1 <= int(expires) <= _MAX_EXPIRES_S):
            raise _incomplete("X-Amz-Expires must be a number of seconds, at most 604800")
        expires_s = int(expires)
    else:
        return None
    if algorithm != ALGORITHM:
        raise _incomplete(f"the algorithm must be {ALGORITHM}")
    for name in ("Credential", "SignedHeaders", "Signature"):
        if not found.get(name):
            raise _incomplete(f"Authorization header requires '{name}' parameter.")
    key_id, *scope = found["Credential"].split("/")
    if len(scope) != 4 or scope[2:] != [service, "aws4_request"]:
        raise _incomplete(f"Credential must be KEY/DATE/REGION/{service}/aws4_request")
    signed = found["SignedHeaders"].split(";")
    needed = {"host", *(name for name in ("x-amz-target", "x-amz-date") if header(name))}
    if expires_s is None and not header("x-amz-date"):
        raise _incomplete("Authorization header requires existence of 'X-Amz-Date'.")
    if not needed.issubset(signed):
        raise _incomplete(f"these headers must be signed: {', '.join(sorted(needed))}")
    return Signature(key_id, scope, signed, found["Signature"], time, expires_s)


def canonical_request(
    signature: Signature, method: str, path: str, query: str, header: Callable[[str], str], body: bytes
) -> str:
    """The text that is signed. `path` and `query` are as they were sent, escaped."""
    parts = [part.partition("=")[::2] for part in query.split("&") if part]
    pairs = sorted((_escaped(name), _escaped(value)) for name, value in parts)
    shown = "&".join(f"{name}={value}" for name, value in pairs if name != "X-Amz-Signature")
    headers = "".join(f"{name}:{_SPACES.sub(' ', header(name)).strip()}\n" for name in signature.headers)
    return "\n".join(
        [
            method,
            quote(path, safe="/~") or "/",
            shown,
            headers,
            ";".join(signature.headers),
            hashlib.sha256(body).hexdigest(),
        ]
    )


def _escaped(text: str) -> str:
    return quote(unquote(text, errors="surrogateescape"), safe="~", errors="surrogateescape")


def _incomplete(message: str) -> BadSignature:
    return BadSignature(message, is_incomplete=True)
