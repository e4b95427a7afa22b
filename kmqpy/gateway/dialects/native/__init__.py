"""The gateway's own calls, below /v1: those of `Queue` and `Storage`, as /v1/openapi.json describes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kmqpy.errors import AccessDenied, ConfigError, KmqError
from kmqpy.gateway.dialects.native.asked import Asked, Endpoint
from kmqpy.gateway.dialects.native.calls import Calls
from kmqpy.gateway.dialects.native.openapi import document
from kmqpy.gateway.dialects.native.problems import BUSY, Refused, problem, problem_of
from kmqpy.gateway.http import BodyTimeout, Call, ClientDisconnect, Response, json_response
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.limits import TooLarge
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.names import is_reserved
from kmqpy.gateway.service.polls import Polls
from kmqpy.queue.shapes import LATE_BODY

__all__ = ["BASE", "BUSY", "NativeDialect", "bearer"]

_log = logging.getLogger(__name__)

BASE = "/v1"
_DOCUMENT = "/openapi.json"
_REPEATED = "header"
"""The parameter that may be given more than once."""
_MAX_COMMAS = 1_000_000
"""A list of more values would take much more memory than its text."""
_MAX_FIELDS = 1_000
_WHERE = re.compile(r"(.*?)(?: - at `\$\.?(.*)`)?", re.DOTALL)


class NativeDialect:
    """Answers requests below BASE."""

    def __init__(self, hub: Hub, polls: Polls, authenticate: Access) -> None:
        self._hub = hub
        self._authenticate = authenticate
        endpoints = Calls(hub, polls).endpoints()
        self._document = msgspec.json.encode(document(endpoints))
        self._by_path: dict[str, dict[str, Endpoint]] = {}
        for one in endpoints:
            self._by_path.setdefault(one.path, {})[one.method] = one
        self._decoders = {
            one.name: msgspec.json.Decoder(one.body) for one in endpoints if one.body not in (None, bytes)
        }

    async def answer(self, call: Call, base: str) -> Response:
        """Answer a request below `base`."""
        given: dict[str, Any] = {}
        try:
            return await self._answer(call, base, given)
        except KmqError as error:
            call.refused = getattr(error, "why", "")
            return problem_of(error, given)
        except BodyTimeout:
            return problem(LATE_BODY, 408, "the body did not come in time", {"connection": "close"})
        except ClientDisconnect:
            raise
        except Exception:
            _log.exception("a request failed", extra={"call": call.verb, "queue": call.queue})
            return problem(KmqError.__name__, 500, "internal error; the gateway's log says more")

    async def _answer(self, call: Call, base: str, given: dict[str, Any]) -> Response:
        method = call.request.method
        path, queue = _path(call.segments(base) or [])
        if path == _DOCUMENT:
            call.verb = "openapi"
            return json_response(self._document)
        by_method = self._by_path.get(path, {})
        one = by_method.get("GET" if method == "HEAD" else method)
        if one is None:
            raise Refused(_no_such_call(method, by_method))
        call.verb, call.queue = one.name, queue
        sender = await bearer(self._authenticate, call)
        call.key_id = sender.id
        self._authenticate.count_held(sender, call.share, call.limits.max_key_bytes)
        if one.action is not None and not sender.permits(one.action, queue):
            text = f"the key needs the permission queue|{one.action}|{queue[:200]}"
            raise Refused(problem(AccessDenied.__name__, 403, text))
        if queue and is_reserved(self._hub.stored_name(QueueName(queue))):
            raise Refused(
                problem(AccessDenied.__name__, 403, "queue: names like KMQ.… are the gateway's own")
            )
        query = _query(call, one, given)
        asked = Asked(call, queue, sender, query, partial(self._authenticate.spend_bytes, sender), given)
        if one.body is not None:
            body = await call.body()
            asked.spend(len(body))
            asked.body = body if one.body is bytes else self._decoded(one, call, body)
            if one.body is not bytes:
                fields = msgspec.structs.asdict(asked.body)
                given.update(fields.get("settings", fields))
        answer = await one.do(asked)
        if answer is None:
            return Response(status_code=204)
        is_encoded = isinstance(answer, msgspec.Raw)
        return json_response(bytes(answer) if is_encoded else msgspec.json.encode(answer, enc_hook=str))

    def _decoded(self, one: Endpoint, call: Call, body: bytes) -> Any:
        if body.count(b",") > _MAX_COMMAS:
            raise TooLarge(f"the body has more than {_MAX_COMMAS} commas; send long texts as body_base64")
        kind = call.header("content-type").partition(";")[0].strip().lower()
        if body and kind != "application/json":
            raise Refused(
                problem("BadEncoding", 415, "send JSON, with the header Content-Type: application/json")
            )
        try:
            return self._decoders[one.name].decode(body or b"{}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _unreadable(error, "body") from None


async def bearer(authenticate: Access, call: Call) -> Principal:
    """The sender of a request, by its header Authorization; raises Refused and Overloaded."""
    scheme, _, secret = call.header("authorization").partition(" ")
    sender = await authenticate(secret.strip() if scheme.lower() == "bearer" else None)
    if sender is None:
        made = "one that `kmq key create` has made"
        text = f"no valid key; send {made} as Authorization: Bearer KEY (kmqpy: as KMQ_API_KEY)"
        raise Refused(problem(AccessDenied.__name__, 401, text, {"www-authenticate": "Bearer"}))
    if why := authenticate.objection(sender, call.header):
        raise Refused(problem(AccessDenied.__name__, 403, why))
    return sender


def _path(segments: list[str]) -> tuple[str, str]:
    """The path of a call, with {queue} in place of the name; and the name."""
    match segments:
        case ["queues", queue, *rest]:
            return "/".join(["/queues", "{queue}", *rest]), queue
        case _:
            return "/" + "/".join(segments), ""


def _no_such_call(method: str, by_method: Mapping[str, Endpoint]) -> Response:
    if not by_method:
        return problem("NotFound", 404, f"no such path; {BASE}{_DOCUMENT} lists all calls")
    text = ", ".join([*by_method, *(["HEAD"] if "GET" in by_method else []), "OPTIONS"])
    if method == "OPTIONS":
        return Response(status_code=204, headers={"allow": text})
    return problem("NotAllowed", 405, f"{method} does nothing here; use {text}", {"allow": text})


def _query(call: Call, one: Endpoint, found: dict[str, Any]) -> Any:
    """The parameters of a request, also as `found`; raises ConfigError that names the wrong one."""
    text = call.request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS)
    except ValueError:
        raise ConfigError("query: it can't be read; write all but letters and digits as %XX") from None
    for name, value in pairs:
        if name == _REPEATED:
            found.setdefault(name, []).append(value)
        elif name in found:
            raise ConfigError(f"{name[:40]}: it is given more than once")
        else:
            found[name] = value
    try:
        query = msgspec.convert(found, one.query, strict=False)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _unreadable(error, "query", found) from None
    found.update(msgspec.structs.asdict(query))
    return query


def _unreadable(error: Exception, what: str, given: Mapping[str, Any] | None = None) -> ConfigError:
    """An error that names the field, and the value where it is one of the query."""
    text = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
    found = _WHERE.fullmatch(text)
    why, where = (found[1], found[2]) if found else (text, None)
    value = (given or {}).get(where or "")
    shown = "" if value is None else f"{str(value)[:80]!r}: "
    return ConfigError(f"{where or what}: {shown}{why if why[1:2].isupper() else why[:1].lower() + why[1:]}")
