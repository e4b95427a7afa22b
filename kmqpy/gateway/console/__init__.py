"""The gateway's own pages, below /console: for people who look after queues.

The pages are files without secrets. What they show and do, they ask of the native calls and of the few calls
here, with the key that was typed in, in the header Authorization: the browser sends nothing by itself, so no
other page can use it (no cookie, no CSRF). They write text as text only; the policy allows nothing else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from importlib.resources import files
from typing import Any

import msgspec
from starlette.responses import StreamingResponse

from kmqpy.errors import ConfigError, KmqError, NotSupported, Unavailable
from kmqpy.gateway.console.sampler import Sampler
from kmqpy.gateway.dialects.native import bearer
from kmqpy.gateway.dialects.native.problems import Refused, problem, problem_of
from kmqpy.gateway.http import Call, Response, json_response
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.keyring import ApiKey, Principal, new_key
from kmqpy.gateway.keys.permissions import ACTIONS, ROLES, permits_something
from kmqpy.gateway.keys.stores import KEYS_QUEUE, KeyStore
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.queue import Storage

__all__ = ["BASE", "Console", "Entry", "OneKey"]

BASE = "/console"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_CHECK_S = 4.0
"""A tab's key is looked at again after so many seconds, so that a revoked one ends within 10."""
_DOCTOR_S = 60.0
_TOKEN_BYTES = 32


class _NewKey(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    title: str = ""
    roles: list[str] = []
    permissions: list[str] = []


class _Token(msgspec.Struct, forbid_unknown_fields=True):
    token: str


class Entry:
    """Lets in who has a token that is good once, instead of a key; for `kmq console`.

    secret    what the token is changed for
    on_token  gets each new token: the first one, and the next when one was used
    """

    def __init__(self, secret: str, on_token: Callable[[str], None]) -> None:
        self._secret = secret
        self._on_token = on_token
        self._token = ""

    def renew(self) -> None:
        """Make a token, which ends the one before."""
        self._token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._on_token(self._token)

    def change(self, token: str) -> str | None:
        """The secret, for the token; None for another one."""
        if not self._token or not secrets.compare_digest(token.encode(), self._token.encode()):
            return None
        self.renew()
        return self._secret


class OneKey:
    """A store of one key, in memory; for `kmq console`."""

    def __init__(self, key: ApiKey) -> None:
        self._key = key

    def read(self) -> Sequence[ApiKey]:
        """See KeyStore.read."""
        return [self._key]

    def put(self, key: ApiKey) -> None:
        raise NotSupported(f"key {key.id}: keys are not kept here")

    def replace(self, key: ApiKey) -> bool:
        raise NotSupported(f"key {key.id}: keys are not kept here")

    def remove(self, key_id: str) -> bool:
        raise NotSupported(f"key {key_id}: keys are not kept here")


class Console:
    """Answers requests below BASE.

    keys      where keys are kept; None: they can't be made here
    storages  by name, as the hub has them
    problems  what operators should know of the gateway
    entry     None: people sign in with a key
    """

    def __init__(
        self,
        hub: Hub,
        authenticate: Access,
        sampler: Sampler,
        *,
        keys: KeyStore | None,
        storages: Mapping[str, Storage],
        threads: Executor,
        problems: Callable[[], list[str]],
        entry: Entry | None = None,
    ) -> None:
        self._hub = hub
        self._authenticate = authenticate
        self._sampler = sampler
        self._keys = keys
        self._storages = storages
        self._threads = threads
        self._problems = problems
        self._entry = entry
        self._files = {
            one.name: (one.read_bytes(), _TYPES[one.name.rpartition(".")[2]])
            for one in files(__package__).joinpath("pages").iterdir()
        }

    async def answer(self, call: Call, base: str) -> Response:
        """Answer a request below `base`."""
        try:
            answer = await self._answer(call, call.segments(base) or [])
        except KmqError as error:
            call.refused = getattr(error, "why", "")
            answer = problem_of(error, {})
        for name, value in _HEADERS.items():
            answer.headers.setdefault(name, value)
        return answer

    async def _answer(self, call: Call, path: list[str]) -> Response:
        method = "GET" if call.request.method == "HEAD" else call.request.method
        match method, path:
            case "GET", []:
                return self._file(call, "index.html")
            case "GET", [name] if name in self._files:
                return self._file(call, name)
            case "POST", ["enter"]:
                return await self._enter(call)
        call.verb = "-".join(path[:1]) if path[:1] in (["me"], ["live"], ["keys"], ["findings"]) else "page"
        match method, path:
            case "GET", ["me"]:
                return _json(self._me(await self._sender(call)))
            case "GET", ["live"]:
                return await self._live(call)
            case "GET", ["findings"]:
                return _json({"findings": await self._findings(await self._sender(call))})
            case "GET", ["keys"]:
                return _json({"keys": await self._list_keys(await self._key_keeper(call))})
            case "POST", ["keys"]:
                return _json(await self._make_key(await self._key_keeper(call), await call.body()))
            case "DELETE", ["keys", key_id]:
                await self._key_keeper(call)
                if not await self._with_keys(lambda keys: keys.remove(key_id)):
                    raise ConfigError(f"key: there is none with the id {key_id[:40]!r}")
                return Response(status_code=204)
        raise Refused(problem("NotFound", 404, f"no such page; the console is at {BASE}/"))

    def _file(self, call: Call, name: str) -> Response:
        call.verb = "page"
        content, kind = self._files[name]
        return Response(content, 200, {"content-type": kind})

    async def _sender(self, call: Call) -> Principal:
        sender = await bearer(self._authenticate, call)
        call.key_id = sender.id
        return sender

    async def _enter(self, call: Call) -> Response:
        """Change a token for the secret of this console."""
        call.verb = "enter"
        secret = None
        if self._entry is not None:
            secret = self._entry.change(_decoded(await call.body(), _Token).token)
        if secret is None:
            text = "the address was used already; take the newest one that kmq console has printed"
            raise Refused(problem("AccessDenied", 401, text))
        return _json({"key": secret})

    def _me(self, sender: Principal) -> dict[str, Any]:
        """Who is signed in, and what the key may do."""
        return {
            "id": sender.id,
            "title": "" if sender.key is None else sender.key.title,
            "permissions": [one.text for one in sender.permissions],
            "roles": {role: [one.text for one in texts] for role, texts in ROLES.items()},
            "actions": ACTIONS,
            "keeps_keys": self._keys is not None and _may_keep_keys(sender),
            "storages": {
                name: dataclasses.asdict(one.capabilities)
                for name, one in self._storages.items()
                if not self._hub.is_silent(one)
            },
        }

    # --- live -------------------------------------------------------------------------------------

    async def _live(self, call: Call) -> Response:
        """Rows of queues, and what changes, as server-sent events."""
        sender = await self._sender(call)
        watched = call.parameters().get("queue", "")

        async def events() -> AsyncIterator[bytes]:
            checked_s = asyncio.get_running_loop().time()
            async with self._sampler.tab(watched) as tab:
                async for event in tab.events(sender):
                    yield event
                    if asyncio.get_running_loop().time() - checked_s > _CHECK_S:
                        checked_s += _CHECK_S
                        try:
                            await self._sender(call)
                        except Refused:
                            yield b"event: out\ndata: {}\n\n"
                            return
                        except KmqError:  # the keys can't be read now
                            continue

        return StreamingResponse(events(), 200, {"x-accel-buffering": "no"}, "text/event-stream")

    # --- what is wrong ----------------------------------------------------------------------------

    async def _findings(self, sender: Principal) -> list[dict[str, Any]]:
        """What is wrong with the gateway, and what the doctors of storages find."""
        found = [_finding("gateway", one, "") for one in self._problems()]
        for name, storage in {id(one): (name, one) for name, one in self._storages.items()}.values():
            if self._hub.is_silent(storage):
                continue
            prefix = f"{name}:" if name and storage is not self._storages[""] else ""
            found += await self._findings_of(sender, storage, prefix)
        return found

    async def _findings_of(self, sender: Principal, storage: Storage, prefix: str) -> list[dict[str, Any]]:
        capabilities = storage.capabilities
        found = []
        if not capabilities.durable:
            why = capabilities.lossy_setting or "it keeps messages in memory"
            found.append(
                _finding("storage", f"what it confirmed can be lost when its server dies: {why}", "")
            )
        doctor = getattr(storage, "doctor", None)
        if doctor is not None:
            try:
                of_doctor = await self._hub.administer(
                    QueueName(f"{prefix}x"), lambda *_: doctor(), patience_s=_DOCTOR_S
                )
            except Unavailable:
                return [*found, _finding("storage", "it does not answer the doctor", "look at its servers")]
            found += [
                {
                    "severity": str(one.severity),
                    "queue": prefix + one.queue,
                    "what": one.what,
                    "to_do": one.to_do or "",
                }
                for one in of_doctor
                if sender.permits("get_status", prefix + one.queue) and one.severity != "ok"
            ]
        return found

    # --- keys -------------------------------------------------------------------------------------

    async def _key_keeper(self, call: Call) -> Principal:
        sender = await self._sender(call)
        if not _may_keep_keys(sender):
            text = "the key needs the role queue_admin: who makes keys may do everything"
            raise Refused(problem("AccessDenied", 403, text))
        if self._keys is None:
            raise NotSupported("keys: they are not kept here; kmq key makes them")
        return sender

    async def _with_keys(self, use: Callable[[KeyStore], Any]) -> Any:
        assert self._keys is not None
        return await asyncio.wrap_future(self._threads.submit(use, self._keys))

    async def _list_keys(self, sender: Principal) -> list[dict[str, Any]]:
        keys = await self._with_keys(lambda store: store.read())
        return [
            {
                "id": one.id,
                "title": one.title,
                "roles": one.roles,
                "permissions": one.permissions,
                "created_ms": one.created_ms,
                "own": one.id == sender.id,
            }
            for one in sorted(keys or (), key=lambda one: one.created_ms)
        ]

    async def _make_key(self, _: Principal, body: bytes) -> dict[str, str]:
        given = _decoded(body, _NewKey)
        if not given.roles and not given.permissions:
            raise ConfigError("role: give a role or a permission: a key without them may do nothing")
        for text in given.permissions:
            if not permits_something(text):
                raise ConfigError(
                    f"permission: {text!r} permits nothing; write queue|ACTION|NAME, with one of the actions "
                    f"{', '.join(ACTIONS)}, or *"
                )
        made, secret = new_key(given.title, given.roles, given.permissions)
        await self._with_keys(lambda keys: keys.put(made))
        return {"id": made.id, "secret": secret}


def _may_keep_keys(sender: Principal) -> bool:
    """Who makes keys can give all rights, so it must have them."""
    return all(
        sender.permits(action, queue) for action in ACTIONS for queue in (KEYS_QUEUE, "__", "\N{BULLET}")
    )


def _finding(queue: str, what: str, to_do: str) -> dict[str, str]:
    return {"severity": "warning", "queue": queue, "what": what, "to_do": to_do}


def _decoded(body: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ConfigError(f"body: {error}") from None


def _json(value: Any) -> Response:
    return json_response(msgspec.json.encode(value), 200, {"cache-control": "no-store"})
