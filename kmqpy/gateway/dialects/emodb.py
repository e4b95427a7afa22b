"""EmoDB's queues and dedup queues over HTTP, as EmoDB's published clients expect them.

Statuses, texts, headers and the order of checks are those of EmoDB 6.4.9, which its clients depend on: they
retry by status and `X-BV-Exception`, and refuse a field that they do not know.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import methodcaller
from typing import Any, TypeVar

import msgspec

from kmqpy.core.pieces import pieces
from kmqpy.errors import KmqError, NotSupported, Unavailable
from kmqpy.gateway.http import Call, Response, json_response, text_response
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.limits import BadEncoding, Overloaded, TooLarge
from kmqpy.gateway.service.hub import Hub, QueueName
from kmqpy.gateway.service.ids import InvalidChecksum, InvalidId, WireIds
from kmqpy.gateway.service.moves import Move, Moves, UnknownMove
from kmqpy.gateway.service.pulse import PATIENCE_S
from kmqpy.gateway.service.served_queue import ServedQueue, Taken

T = TypeVar("T")

BASES = {"/queue/1": "", "/dedupq/1": "DEDUP."}
"""The paths of the two services, and what the names of their queues begin with in the storage."""
_DEFAULT_LIMIT = 10
_MAX_LIMIT = 1_000
_DEFAULT_TTL_S = 30
_MAX_TTL_S = 3_600
_LONG_S = 60.0
"""Seconds that purge and unclaimall may take, which change very many messages."""
_NAME = re.compile(r"(?!_[^_]|_$|\.{1,2}$)[a-z0-9\-.:@_]{1,255}")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_SETTINGS: Mapping[str, Any] = {"max_redeliveries": None}
"""Settings of queues that are made for EmoDB's clients: EmoDB delivers a message until it is acknowledged."""

_EXCEPTION = "X-BV-Exception"
_ILLEGAL_ARGUMENT = "java.lang.IllegalArgumentException"
_UNAUTHORIZED = "com.bazaarvoice.emodb.common.api.UnauthorizedException"
_UNKNOWN_MOVE = "com.bazaarvoice.emodb.queue.api.UnknownMoveException"
_UNAVAILABLE = "com.bazaarvoice.emodb.common.api.ServiceUnavailableException"

_MAX_COMMAS = 1_000_000
"""A list of more values would take much more memory than its text."""
_PIECE = 1_000
"""Messages and ids of one request pass to the storage in pieces of this number: it must answer each in time,
and neither it nor the gateway is taken up by one request."""
_NOTE = "X-KMQ-Note"
"""A header for people, unknown to EmoDB's clients: why a poll may have missed messages, or what to send."""

_SUCCESS = b'{"success":true}'
_RAW_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_RAW = msgspec.json.Decoder(msgspec.Raw)
_RAW_BY_QUEUE = msgspec.json.Decoder(dict[str, list[msgspec.Raw]])


class _Refused(Exception):
    """A response that ends a request early."""

    def __init__(self, response: Response) -> None:
        super().__init__()
        self.response = response


@dataclass(frozen=True, slots=True)
class _Verb:
    """What a path and method ask for.

    action    the permission that it needs on the queue; None: any valid key, and the rest checks itself
    has_body  whether it takes JSON
    """

    name: str
    do: Callable[[_Request], Awaitable[Response]]
    action: str | None
    has_body: bool = False


@dataclass(slots=True)
class _Request:
    """A request whose method, path and sender are known; `spend` counts bytes for the sender's limit."""

    call: Call
    base: str
    segments: Sequence[str]
    sender: Principal
    parameters: Mapping[str, str]
    spend: Callable[[int], None]

    async def body(self) -> bytes:
        body = await self.call.body()
        self.spend(len(body))
        return body

    @property
    def name(self) -> str:
        return self.segments[0]


class EmoDialect:
    """Answers requests to `/queue/1` and `/dedupq/1`."""

    def __init__(self, hub: Hub, moves: Moves, authenticate: Access) -> None:
        self._hub = hub
        self._moves = moves
        self._authenticate = authenticate
        waiting = partial(self._count, methodcaller("size", None))
        claimed = partial(self._count, ServedQueue.in_flight)
        unclaim_all = partial(self._change_all, ServedQueue.release_all)
        purge = partial(self._change_all, ServedQueue.purge)
        self._of_queue = {
            "send": {"POST": _Verb("send", self._send, "post", has_body=True)},
            "sendbatch": {"POST": _Verb("sendbatch", self._send_batch, "post", has_body=True)},
            "size": {"GET": _Verb("size", self._size, "get_status")},
            "uncached_size": {"GET": _Verb("size", waiting, "get_status")},  # has no parameters
            "claimcount": {"GET": _Verb("claimcount", claimed, "get_status")},
            "peek": {"GET": _Verb("peek", self._peek, "poll")},
            "poll": {"GET": _Verb("poll", self._poll, "poll")},
            "renew": {"POST": _Verb("renew", self._renew, "poll", has_body=True)},
            "ack": {"POST": _Verb("ack", self._ack, "poll", has_body=True)},
            "unclaimall": {"POST": _Verb("unclaimall", unclaim_all, "poll")},
        }
        self._purge_verb = _Verb("purge", purge, "poll")
        self._send_batches_verb = _Verb("_sendbatch", self._send_batches, None, has_body=True)
        self._move_verb = _Verb("_move", self._start_move, None)
        self._move_status_verb = _Verb("_move", self._move_status, None)

    async def answer(self, call: Call, base: str) -> Response:
        """Answer a request below `base`, one of the paths of the two services."""
        try:
            return await self._answer(call, base)
        except _Refused as refused:
            return refused.response
        except (InvalidChecksum, InvalidId) as error:
            what = " checksum" if isinstance(error, InvalidChecksum) else ""
            return _illegal(f"Invalid event ID{what}.")
        except TooLarge as error:
            return _message(413, str(error))
        except BadEncoding as error:
            return _message(400, str(error))
        except Overloaded as error:
            call.refused = error.why
            return _unavailable(str(error), error.retry_after_s, {_EXCEPTION: _UNAVAILABLE})
        except Unavailable:
            return _unavailable("the storage does not answer", 1.0, {})
        except NotSupported as error:
            why = "dedup queues need SQL, Redis, memory or Kafka: " if BASES[base] else ""
            return _message(501, f"{why}{error}")
        except KmqError as error:
            return _illegal(str(error))

    async def _answer(self, call: Call, base: str) -> Response:
        segments = call.segments(base) or []
        if segments == ["ping"] and call.request.method != "DELETE":  # which purges a queue of that name
            call.verb = "ping"
            return _answer_ping(call.request.method)
        verb, queue = self._verb(call.request.method, segments)
        call.verb, call.queue = verb.name, queue
        if verb.has_body:
            _check_type(call)
        parameters = call.parameters()
        secret = call.header("x-bv-api-key") or parameters.get("APIKey")
        sender = await self._authenticate(secret)
        if sender is None:
            raise _Refused(_forbidden())
        if why := self._authenticate.objection(sender, call.header):
            raise _Refused(_message(403, why))
        call.key_id = sender.id
        self._authenticate.count_held(sender, call.share, call.limits.max_key_bytes)
        if verb.action is not None:
            if not sender.permits(verb.action, queue):
                raise _Refused(_forbidden())
            _check_name(queue)
        spend = partial(self._authenticate.spend_bytes, sender)
        return await verb.do(_Request(call, base, segments, sender, parameters, spend))

    def _verb(self, method: str, segments: Sequence[str]) -> tuple[_Verb, str]:
        """The verb of a request, and the name of its queue; raises _Refused with 404 or 405."""
        by_method: Mapping[str, _Verb]
        queue = ""
        match segments:
            case ["_sendbatch"]:
                by_method = {"POST": self._send_batches_verb}
            case ["_move"]:
                by_method = {"POST": self._move_verb}
            case ["_move", _]:
                by_method = {"GET": self._move_status_verb}
            case [queue]:
                by_method = {"DELETE": self._purge_verb}
            case [queue, name]:
                by_method = self._of_queue.get(name, {})
            case _:
                by_method = {}
        if not by_method:
            calls = ", ".join(self._of_queue)
            text = f"no such path; the calls of a queue are NAME/ and one of {calls}, and DELETE NAME"
            raise _Refused(_message(404, text))
        if method in by_method:
            return by_method[method], queue
        if "GET" in by_method and by_method["GET"].name != "poll":  # which changes something
            by_method = {**by_method, "HEAD": by_method["GET"]}
        if method not in by_method:
            raise _Refused(_not_allowed(method, by_method))
        return by_method[method], queue

    # --- sending ----------------------------------------------------------------------------------

    async def _send(self, request: _Request) -> Response:
        body = await request.body()
        raw = [_decoded(_RAW, body or b"null")]
        return await self._send_checked(request, {request.name: await _checked(request, raw)})

    async def _send_batch(self, request: _Request) -> Response:
        bodies = _decoded(_RAW_LIST, await request.body())
        return await self._send_checked(request, {request.name: await _checked(request, bodies)})

    async def _send_batches(self, request: _Request) -> Response:
        by_queue = _decoded(_RAW_BY_QUEUE, await request.body())
        for queue in by_queue:
            if not request.sender.permits("post", queue):
                raise _Refused(json_response(msgspec.json.encode({"queue": queue}), 403))
        for queue in by_queue:
            _check_name(queue)
        checked = {queue: await _checked(request, bodies) for queue, bodies in by_queue.items()}
        return await self._send_checked(request, checked)

    async def _send_checked(self, request: _Request, by_queue: Mapping[str, Sequence[bytes]]) -> Response:
        for queue, bodies in by_queue.items():
            request.call.count += len(bodies)
            for piece in pieces(bodies, _PIECE):
                await self._hub.with_made(_named(request.base, queue), methodcaller("send", piece))
        return json_response(_SUCCESS)

    # --- receiving --------------------------------------------------------------------------------

    async def _poll(self, request: _Request) -> Response:
        ttl_s = _ttl(request)
        limit = _limit(request)
        request.call.share.add(0)  # refused sooner if there is no room for an answer

        async def poll(served: ServedQueue) -> Response:
            if not ttl_s:
                return _shown(request, served.ids, await served.hand_out(limit))
            messages, why_none = await served.take(limit, ttl_s)
            if messages and await request.call.is_gone():
                await served.give_back(messages)
                messages = []
            try:
                return _shown(request, served.ids, messages, why_none)
            except Overloaded:
                await served.give_back(messages)
                raise

        return await self._with_queue(request, poll, json_response(b"[]"))

    async def _peek(self, request: _Request) -> Response:
        limit = _limit(request)
        request.call.share.add(0)

        async def peek(served: ServedQueue) -> Response:
            return _shown(request, served.ids, await served.peek(limit))

        return await self._with_queue(request, peek, json_response(b"[]"))

    async def _ack(self, request: _Request) -> Response:
        given = _ids(await request.body())

        return await self._on_ids(request, given, ServedQueue.ack)

    async def _renew(self, request: _Request) -> Response:
        ttl_s = _ttl(request)
        given = _ids(await request.body())

        async def renew(served: ServedQueue, ids: Sequence[str]) -> None:
            await (served.extend(ids, ttl_s) if ttl_s else served.release(ids))

        return await self._on_ids(request, given, renew)

    async def _on_ids(
        self,
        request: _Request,
        given: Sequence[object],
        do: Callable[[ServedQueue, Sequence[str]], Awaitable[None]],
    ) -> Response:
        """Check all ids, then do something with each, in pieces."""
        request.call.count = len(given)

        async def check(piece: Sequence[object], served: ServedQueue) -> None:
            _parsed(served.ids, piece)

        async def act(piece: Sequence[object], served: ServedQueue) -> None:
            await do(served, _parsed(served.ids, piece))

        steps = (act,) if len(given) <= _PIECE else (check, act)
        for step in steps:
            for piece in pieces(given, _PIECE):
                await self._with_queue(request, partial(step, piece), given=piece)
                if len(steps) > 1:
                    await asyncio.sleep(0)  # others have their turn
        return json_response(_SUCCESS)

    async def _change_all(self, do: Callable[[ServedQueue], Awaitable[None]], request: _Request) -> Response:
        """Do what may take long, unless the storage is away: EmoDB's clients give up after 500 ms."""

        async def look(served: ServedQueue) -> None:
            if served.capabilities.immediate:  # on Kafka a look may take long itself
                await served.is_ready()

        await self._with_queue(request, look)
        return await self._with_queue(request, do, patience_s=_LONG_S)

    async def _size(self, request: _Request) -> Response:
        limit = _number(request, "limit", bits=64)
        if limit is not None and limit <= 0:
            raise _Refused(_illegal("Limit must be >0"))
        return await self._count(methodcaller("size", limit), request)

    async def _count(self, count: Callable[[ServedQueue], Awaitable[int]], request: _Request) -> Response:
        async def counted(served: ServedQueue) -> Response:
            return json_response(str(await count(served)).encode())

        return await self._with_queue(request, counted, json_response(b"0"))

    async def _with_queue(
        self,
        request: _Request,
        use: Callable[[ServedQueue], Awaitable[Response | None]],
        missing: Response | None = None,
        given: Sequence[object] = (),
        patience_s: float = PATIENCE_S,
    ) -> Response:
        """Use the request's queue; without it, answer `missing`, or check the ids that were given.

        Where neither is an answer, it is that of success.
        """
        name = _named(request.base, request.name)

        def answer_missing() -> Response | None:
            _parsed(WireIds(self._hub.stored_name(name), None), given)
            return missing

        found = await self._hub.with_queue(name, use, missing=answer_missing, patience_s=patience_s)
        return json_response(_SUCCESS) if found is None else found

    # --- moves ------------------------------------------------------------------------------------

    async def _start_move(self, request: _Request) -> Response:
        origin, target = request.parameters.get("from"), request.parameters.get("to")
        for value, action in ((origin, "poll"), (target, "post")):
            if value and not request.sender.permits(action, value):
                raise _Refused(_forbidden())
        if not origin or not target:
            raise _Refused(_illegal(f"{'to' if origin else 'from'} is required"))
        _check_name(origin)
        _check_name(target)
        move = Move(_named(request.base, origin), _named(request.base, target))
        if self._hub.is_one(move.origin, move.target):
            raise _Refused(_illegal("cannot move queue to itself"))
        reference = await self._moves.start(request.base, move)
        return json_response(msgspec.json.encode({"id": reference}))

    async def _move_status(self, request: _Request) -> Response:
        reference = request.segments[1]
        try:
            move, status = await self._moves.status(request.base, reference)
        except UnknownMove:
            raise _Refused(
                json_response(msgspec.json.encode({"id": reference}), 404, {_EXCEPTION: _UNKNOWN_MOVE})
            ) from None
        return json_response(
            msgspec.json.encode({"from": move.origin.name, "to": move.target.name, "status": status.value})
        )


# --- values of requests -------------------------------------------------------------------------------


def _named(base: str, queue: str) -> QueueName:
    prefix = BASES[base]
    return QueueName(queue, prefix, {**_SETTINGS, **({"collapse": True} if prefix else {})})


def _check_type(call: Call) -> None:
    content_type = call.header("content-type").partition(";")[0].strip().lower()
    if content_type != "application/json" and (content_type or call.has_body()):
        # EmoDB's has no body. HTTP has a header for it, and ours is for people.
        note = "send JSON, with the header Content-Type: application/json"
        raise _Refused(Response(b"", 415, {"accept-post": "application/json", _NOTE: note}))


def _check_name(queue: str) -> None:
    if not _NAME.fullmatch(queue):
        raise _Refused(
            _illegal(
                "Queue name must be a lowercase ASCII string between 1 and 255 characters in length. Allowed "
                "punctuation characters are -.:@_ and the queue name may not start with a single underscore "
                "character. An example of a valid table name would be 'polloi:provision'."
            )
        )


def _ttl(request: _Request) -> int:
    ttl = _number(request, "ttl", bits=32)
    if ttl is None:
        return _DEFAULT_TTL_S
    if ttl < 0:
        raise _Refused(_illegal("ClaimTtl must be >=0"))
    if ttl > _MAX_TTL_S:
        raise _Refused(_illegal("ClaimTtl must be <=1 hour"))
    return ttl


def _limit(request: _Request) -> int:
    limit = _number(request, "limit", bits=32)
    if limit is None:
        return _DEFAULT_LIMIT
    if limit <= 0:
        raise _Refused(_illegal("Limit must be >0"))
    if limit > _MAX_LIMIT:
        raise _Refused(_illegal(f"Limit must be <={_MAX_LIMIT}"))
    return limit


def _number(request: _Request, name: str, *, bits: int) -> int | None:
    """A whole number in the query; None if it is not given."""
    text = request.parameters.get(name)
    if text is None:
        return None
    # int() of very many digits takes long, or raises; a number of so many bits has fewer digits than bits.
    if _INTEGER.fullmatch(text) and len(text) <= bits:
        value = int(text)
        if -(2 ** (bits - 1)) <= value < 2 ** (bits - 1):
            return value
    raise _Refused(text_response(f'"{text}" is not a number.', 400))


def _ids(body: bytes) -> Sequence[object]:
    """The ids in a body, which is a list; not yet checked."""
    given = _decoded(msgspec.json.Decoder(), body or b"null")
    if given is None:
        raise _Refused(_illegal("Missing message Ids"))
    if not isinstance(given, list):
        raise _Refused(_message(400, "a list of ids is expected"))
    return given


async def _checked(request: _Request, raw: Sequence[msgspec.Raw]) -> list[bytes]:
    """The messages as they are stored."""
    bodies: list[bytes] = []
    most = request.call.limits.max_message_bytes
    for piece in pieces(raw, _PIECE):
        for one in piece:
            body = msgspec.json.format(bytes(one), indent=-1)
            if len(body) > most:
                size = f"Message size ({len(body)}) is greater than the maximum allowed ({most}) message size"
                raise _Refused(_illegal(size))
            bodies.append(body)
        if len(raw) > _PIECE:
            await asyncio.sleep(0)  # others have their turn
    return bodies


def _answer_ping(method: str) -> Response:
    return text_response("pong") if method in {"GET", "HEAD"} else _not_allowed(method, ["GET", "HEAD"])


def _not_allowed(method: str, allowed: Iterable[str]) -> Response:
    """The answer to a method that a path does not have, or to OPTIONS."""
    text = ", ".join([*allowed, "OPTIONS"])
    if method == "OPTIONS":
        return Response(status_code=204, headers={"allow": text})
    return _message(405, f"{method} does nothing here; use {text}", {"allow": text})


def _parsed(ids: WireIds, given: Sequence[object]) -> list[str]:
    """The ids of the storage, each once, without those of queues that are gone; raises InvalidId."""
    found = {ids.parse(one): None for one in given}
    return [one for one in found if one is not None]


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    if body.count(b",") > _MAX_COMMAS:
        raise _Refused(_message(413, "the body has too many values"))
    try:
        body.decode()  # msgspec does not check the UTF-8 of what it keeps raw
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        what = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
        raise _Refused(_message(400, f"Unable to process JSON: {what}")) from None


# --- responses ----------------------------------------------------------------------------------------


def _shown(request: _Request, ids: WireIds, messages: Sequence[Taken], note: str = "") -> Response:
    """Messages, each with exactly two fields; raises Overloaded if there is no room for them."""
    request.call.count = len(messages)
    parts = [
        b'{"id":"%s","payload":%s}' % (ids.make(message.id).encode(), _payload(message.body))
        for message in messages
    ]
    body = b"[%s]" % b",".join(parts)
    request.call.share.add(len(body))
    request.spend(len(body))
    return json_response(body, headers={_NOTE: note} if note else None)


def _payload(body: bytes) -> bytes:
    """A body as JSON; what other programs sent that is no JSON becomes text, or base64 of bytes."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return msgspec.json.encode({"base64": body})
    try:
        return bytes(_RAW.decode(body))
    except (msgspec.MsgspecError, RecursionError):
        return msgspec.json.encode(text)


def _message(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    return json_response(msgspec.json.encode({"message": text}), status, headers)


def _illegal(text: str) -> Response:
    return text_response(text, 400, {_EXCEPTION: _ILLEGAL_ARGUMENT})


def _forbidden() -> Response:
    return json_response(b'{"reason":"not authorized"}', 403, {_EXCEPTION: _UNAUTHORIZED})


def _unavailable(text: str, retry_after_s: float, headers: Mapping[str, str]) -> Response:
    seconds = max(1, round(retry_after_s))
    body = msgspec.json.encode({"message": text, "retryAfterSeconds": seconds})
    return json_response(body, 503, {"retry-after": str(seconds), **headers})


BUSY = _unavailable("the gateway is busy", 1.0, {_EXCEPTION: _UNAVAILABLE})
"""The answer when too many requests run."""
