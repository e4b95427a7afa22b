"""The keyring of a gateway: finds out who sends a request, by its API key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import msgspec

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import ConfigError, KmqError, Unavailable
from kmqpy.gateway.keys.permissions import Permission, parse_permission, permissions_of
from kmqpy.gateway.keys.sigv4 import secret_of

_log = logging.getLogger(__name__)

_CACHED_S = 4.0
"""Keys are read again by the first request after this time, in seconds, so a revoked key ends within 5 s."""
_OLD_S = 5.0
"""So old, in seconds, keys decide only while the store does not answer."""
_AGAIN_S = 1.0
"""Seconds after a failure until they are read again; without keys, the next request tries."""
_PATIENCE_S = 0.1
"""Seconds that requests wait for what is read again; then the keys known so far decide."""
_LONG_PATIENCE_S = 0.3
"""The same for old keys, or none, unless the last try has failed; EmoDB's clients give up after 500 ms."""
_SECRET_BYTES = 32
_ID_BYTES = 6
_NONCE_BYTES = 16
_AWS_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
_AWS_ID_LETTERS = 16


@dataclass(frozen=True, kw_only=True)
class ApiKey:
    """A key as it is stored. Its secret is not: only the SHA-256 digests of the secrets that are valid.

    A secret has 32 random bytes, so nobody finds it by its digest, and no slower digest is needed.

    id              names the key in lists and logs
    title           whose key it is, for people
    digests         hexadecimal; two for a while after a rotation
    roles           names in ROLES
    permissions     texts of further permissions
    nonces          of a key for AWS's signatures: what its secrets are made of, with the operator's key
    created_ms      when it was made or changed last (ms since 1970); of two with one id, the later one counts
    requests_per_s  more requests of this key are refused for a moment; None: no limit
    bytes_per_s     the same for bytes of bodies, in and out
    """

    id: str
    title: str = ""
    digests: tuple[str, ...]
    roles: tuple[str, ...] = ()
    permissions: tuple[str, ...] = ()
    nonces: tuple[str, ...] = ()
    created_ms: int = 0
    requests_per_s: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        permissions_of(self.roles, self.permissions)
        for key in ("requests_per_s", "bytes_per_s"):
            value = getattr(self, key)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{key}: {value!r} must be more than 0")

    def to_json(self) -> bytes:
        """The form in which a store keeps it."""
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, text: bytes) -> ApiKey:
        """The reverse of to_json(); raises ConfigError."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"key: what is stored lacks fields, or they are wrong: {error}") from None
        except (ValueError, RecursionError):
            raise ConfigError("key: what is stored is not JSON") from None


@dataclass(frozen=True, slots=True)
class Principal:
    """Who sends a request.

    key  None if the gateway asks for no keys
    """

    key: ApiKey | None
    permissions: tuple[Permission, ...] = field(repr=False)

    @property
    def id(self) -> str:
        """For logs."""
        return "-" if self.key is None else self.key.id

    def permits(self, action: str, queue: str) -> bool:
        """True if the sender may do `action` with the queue that it calls so."""
        return any(one.permits(action, queue) for one in self.permissions)


ANYBODY = Principal(None, (parse_permission("*"),))
"""Everybody, at a gateway that asks for no keys."""


def new_key(
    title: str,
    roles: Sequence[str],
    permissions: Sequence[str],
    *,
    operator_key: bytes | None = None,
    **limits: float | None,
) -> tuple[ApiKey, str]:
    """A new key, and its secret, which is shown once and not stored.

    operator_key  makes a key for AWS's signatures
    """
    key_id = secrets.token_hex(_ID_BYTES)
    nonces: tuple[str, ...] = ()
    if operator_key is not None:
        key_id = "AKIA" + "".join(secrets.choice(_AWS_LETTERS) for _ in range(_AWS_ID_LETTERS))
        nonces = (secrets.token_hex(_NONCE_BYTES),)
    secret = _new_secret(key_id, nonces, operator_key)
    key = ApiKey(
        id=key_id,
        title=title,
        digests=(digest_of(secret),),
        nonces=nonces,
        roles=tuple(roles),
        permissions=tuple(permissions),
        created_ms=SYSTEM_CLOCK.wall_ms(),
        **limits,
    )
    return key, secret


def rotated(key: ApiKey, *, keep_old: bool, operator_key: bytes | None = None) -> tuple[ApiKey, str]:
    """The key with a new secret, and that; the last one stays valid, too, with `keep_old`.

    operator_key  for a key for AWS's signatures, else ConfigError is raised
    """
    nonces: tuple[str, ...] = ()
    if key.nonces:
        if operator_key is None:
            raise ConfigError(
                f"key: {key.id} is one of AWS's signatures; give --aws-key, as the gateway has it"
            )
        nonces = (secrets.token_hex(_NONCE_BYTES), *key.nonces[: int(keep_old)])
    secret = _new_secret(key.id, nonces, operator_key)
    digests = (digest_of(secret), *key.digests[: int(keep_old)])
    created_ms = max(SYSTEM_CLOCK.wall_ms(), key.created_ms + 1)
    return replace(key, digests=digests, nonces=nonces, created_ms=created_ms), secret


def _new_secret(key_id: str, nonces: Sequence[str], operator_key: bytes | None) -> str:
    if nonces and operator_key is not None:
        return secret_of(operator_key, key_id, nonces[0])
    return secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> str:
    """The SHA-256 of a secret, in hexadecimal."""
    return hashlib.sha256(secret.encode(errors="surrogatepass")).hexdigest()


class Keyring:
    """Knows the keys that are valid; read again by `read` when they are older than _CACHED_S.

    While the store does not answer, the keys that were read last stay valid, and nobody waits for long.

    may_be_open  whether everybody may do everything as long as no key was ever made
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[ApiKey] | None]],
        *,
        may_be_open: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._read = read
        self._may_be_open = may_be_open
        self._is_open = False
        self._clock = clock
        self._by_digest: dict[str, Principal] = {}
        self._by_id: dict[str, Principal] = {}
        self._read_s: float | None = None  # when the keys that are known were read; None: none are known
        self._read_next_s = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._reading_since_s = 0.0
        self._has_failed = False

    async def of_id(self, key_id: str | None) -> Principal | None:
        """Who has the key of this id; None for nobody. Raises Unavailable as who()."""
        if self._clock.monotonic() >= self._read_next_s:
            await self._refresh()
        return ANYBODY if self._is_open else self._by_id.get(key_id or "")

    async def who(self, secret: str | None) -> Principal | None:
        """Who has this secret; None for nobody. Raises Unavailable if keys could never be read."""
        if self._clock.monotonic() >= self._read_next_s:
            await self._refresh()
        if self._is_open:
            return ANYBODY
        if not secret:
            return None
        return self._by_digest.get(digest_of(secret))  # how long this takes tells nothing of a secret

    async def _refresh(self) -> None:
        now_s = self._clock.monotonic()
        if self._reading is None or self._reading.done():
            self._reading = asyncio.ensure_future(self._read_again())
            self._reading.add_done_callback(_note_error)
            self._reading_since_s = now_s
        is_old = self._read_s is None or now_s - self._read_s > _OLD_S
        patience_s = _LONG_PATIENCE_S if is_old and not self._has_failed else _PATIENCE_S
        await asyncio.wait([self._reading], timeout=max(0, self._reading_since_s + patience_s - now_s))
        if self._reading.done():
            self._reading.result()
        elif self._read_s is None:
            raise Unavailable("the keys could not be read in time")

    async def _read_again(self) -> None:
        now_s = self._clock.monotonic()
        try:
            keys = await self._read()
        except Exception as error:
            self._has_failed = True
            if self._read_s is None:
                raise Unavailable(f"keys: they can't be read: {error}") from error
            _log.warning(
                "the keys could not be read; those known stay valid",
                extra={"error": str(error)},
                exc_info=not isinstance(error, KmqError),
            )
            self._read_next_s = self._clock.monotonic() + _AGAIN_S
            return
        self._has_failed = False
        self._is_open = self._may_be_open and keys is None
        self._by_id = {
            key.id: Principal(key, permissions_of(key.roles, key.permissions)) for key in keys or ()
        }
        self._by_digest = {digest: self._by_id[key.id] for key in keys or () for digest in key.digests}
        self._read_s = now_s
        self._read_next_s = now_s + _CACHED_S


def _note_error(reading: asyncio.Task[None]) -> None:
    """Take the error of a reading for which nobody waits any more; else asyncio logs it as forgotten."""
    if not reading.cancelled():
        reading.exception()
