"""AWS's signatures, version 4, in a header or in the query of a URL. Pure: no I/O.

The secret of a key is made of the operator's own key and what is stored of the client's: no secret is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, unquote_plus

from kmqpy.errors import KmqError

ALGORITHM = "AWS4-HMAC-SHA256"
_SKEW_S = 900
_MAX_EXPIRES_S = 7 * 86_400
_TIME = "%Y%m%dT%H%M%SZ"
_FIELD = re.compile(r"(Credential|SignedHeaders)=([^\s,]*)")
_MAX_FIELDS = 2_000
"""Characters of what is kept before the signature is known to be good."""
_KEPT = 4_096
"""So many of what signatures need are kept: secrets, keys of a day, times, claims."""
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
def _moment_s(time: str) -> float:
    """Seconds since 1970. Kept: parsing costs as much as a signature, and many requests have one second."""
    return datetime.strptime(time, _TIME).replace(tzinfo=UTC).timestamp()


class Claim(NamedTuple):
    """What signatures of a client have in common: its key, what follows it in `Credential`, the headers."""

    key_id: str
    scope: str
    headers: Sequence[str]


class Signature(NamedTuple):
    """What a request says of its signature.

    time       as it is signed
    expires_s  of a URL that was signed: seconds for which it is good; None: the signature is in a header
    """

    claim: Claim
    signature: str
    time: str
    expires_s: int | None = None

    def check_time(self, now_s: float) -> None:
        """Raise BadSignature if it was made too long ago, or is one of the future; `now_s`: since 1970."""
        try:
            age_s = now_s - _moment_s(self.time)
        except ValueError:
            raise _incomplete("Date must be in ISO-8601 'basic format'") from None
        if not self.claim.scope.startswith(f"{self.time[:8]}/"):
            raise BadSignature(
                "Date in Credential scope does not match YYYYMMDD from ISO-8601 version of date"
            )
        if age_s > (_SKEW_S if self.expires_s is None else self.expires_s):
            raise BadSignature(f"Signature expired: {self.time} is too long before {_shown(now_s)}")
        if age_s < -_SKEW_S:
            raise BadSignature(f"Signature not yet current: {self.time} is still later than {_shown(now_s)}")

    def check(self, secret: str, text: str) -> bool:
        """True if it is that of the canonical request `text` by this secret."""
        scope = self.claim.scope
        digest = hashlib.sha256(text.encode()).hexdigest()
        to_sign = f"{ALGORITHM}\n{self.time}\n{scope}\n{digest}".encode()
        made = hmac.digest(_day_key(secret, scope), to_sign, "sha256").hex()
        return hmac.compare_digest(made.encode(), self.signature.encode())


@lru_cache(_KEPT)
def _day_key(secret: str, scope: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def signature_of(headers: Mapping[str, str], parameters: Mapping[str, str], service: str) -> Signature | None:
    """The signature of a request; None if it has none. Raises BadSignature for half a one."""
    authorization = headers.get("authorization")
    if authorization:
        before, _, rest = authorization.partition("Signature=")
        signature, _, behind = rest.partition(",")
        fields = before + behind
        time, expires_s = headers.get("x-amz-date", ""), None
        if not time:
            raise _incomplete("Authorization header requires existence of 'X-Amz-Date'.")
    elif "X-Amz-Signature" in parameters:
        algorithm, credential, signed, signature, time, expires = (
            parameters.get(f"X-Amz-{name}", "")
            for name in ("Algorithm", "Credential", "SignedHeaders", "Signature", "Date", "Expires")
        )
        fields = f"{algorithm} Credential={credential}, SignedHeaders={signed}"
        is_number = expires.isascii() and expires.isdecimal() and len(expires) <= len(str(_MAX_EXPIRES_S))
        if not (is_number and 1 <= int(expires) <= _MAX_EXPIRES_S):
            raise _incomplete("X-Amz-Expires must be a number of seconds, at most 604800")
        expires_s = int(expires)
    else:
        return None
    if len(fields) > _MAX_FIELDS:
        raise _incomplete(f"what is said of the signature has more than {_MAX_FIELDS} characters")
    claim = _claim(fields, service)
    if not signature:
        raise _incomplete("Authorization header requires 'Signature' parameter.")
    for name in ("x-amz-target", "x-amz-date"):
        if name not in claim.headers and headers.get(name):
            raise _incomplete(f"this header must be signed: {name}")
    return Signature(claim, signature.strip(), time, expires_s)


@lru_cache(_KEPT)
def _claim(fields: str, service: str) -> Claim:
    """The fields of a signature but itself; raises BadSignature."""
    algorithm, _, rest = fields.partition(" ")
    if algorithm != ALGORITHM:
        raise _incomplete(f"the algorithm must be {ALGORITHM}")
    found = dict(_FIELD.findall(rest))
    for name in ("Credential", "SignedHeaders"):
        if not found.get(name):
            raise _incomplete(f"Authorization header requires '{name}' parameter.")
    key_id, _, scope = found["Credential"].partition("/")
    if scope.count("/") != 3 or not scope.endswith(f"/{service}/aws4_request"):
        raise _incomplete(f"Credential must be KEY/DATE/REGION/{service}/aws4_request")
    headers = found["SignedHeaders"].split(";")
    if "host" not in headers:
        raise _incomplete("this header must be signed: host")
    return Claim(key_id, scope, headers)


def canonical_request(
    signature: Signature, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes
) -> str:
    """The text that is signed. `path` and `query` are as they were sent, escaped."""
    names = signature.claim.headers
    shown = ""
    if query:
        parts = [part.partition("=")[::2] for part in query.split("&") if part]
        pairs = sorted((_escaped(name), _escaped(value)) for name, value in parts)
        shown = "&".join(f"{name}={value}" for name, value in pairs if name != "X-Amz-Signature")
    signed = "".join([f"{name}:{' '.join(headers.get(name, '').split())}\n" for name in names])
    digest = hashlib.sha256(body).hexdigest()
    path = "/" if path == "/" else quote(path, safe="/~") or "/"
    return f"{method}\n{path}\n{shown}\n{signed}\n{';'.join(names)}\n{digest}"


def _escaped(text: str) -> str:
    """As it is signed; + is a space, as it is where parameters are read."""
    return quote(unquote_plus(text, errors="surrogateescape"), safe="~", errors="surrogateescape")


def _shown(time_s: float) -> str:
    return f"{datetime.fromtimestamp(time_s, UTC):{_TIME}}"


def _incomplete(message: str) -> BadSignature:
    return BadSignature(message, is_incomplete=True)
