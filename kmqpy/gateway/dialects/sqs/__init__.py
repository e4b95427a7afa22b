"""SQS over HTTP, as AWS's SDKs speak it: JSON, and the older query protocol.

What queues and messages are called, which values they may have, statuses and texts are those of AWS; the
clients of SQS depend on codes and shapes of errors. shapes.py is made of AWS's own model.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import KmqError, NotSupported, Unavailable
from kmqpy.gateway.dialects.sqs import query
from kmqpy.gateway.dialects.sqs.addresses import Addresses, queue_of_path
from kmqpy.gateway.dialects.sqs.asked import Asked
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.errors import (
    ACCESS_DENIED,
    INVALID_ACTION,
    INVALID_TOKEN,
    INVALID_VALUE,
    MALFORMED,
    THROTTLED,
    TOO_LARGE,
    UNAVAILABLE,
    UNSUPPORTED,
    Fault,
    SqsError,
    missing,
)
from kmqpy.gateway.dialects.sqs.message_actions import MessageActions
from kmqpy.gateway.dialects.sqs.move_tasks import MoveTasks
from kmqpy.gateway.dialects.sqs.polls import Polls
from kmqpy.gateway.dialects.sqs.queue_actions import QueueActions
from kmqpy.gateway.dialects.sqs.shapes import REQUESTS
from kmqpy.gateway.http import Call, Response
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.limits import BadEncoding, Held, Overloaded, TooLarge
from kmqpy.gateway.service.hub import Hub

_TARGET = "AmazonSQS."
_JSON = "application/x-amz-json-1.0"
_FORM = "application/x-www-form-urlencoded"
_MAX_FIELDS = 5_000
REST_S = 60.0
"""AWS's seconds between two purges, and between a queue's end and the next one of its name."""

_Action = Callable[[Asked, Any], Awaitable[dict[str, Any] | None]]


class Authenticator(Protocol):
    """Finds out who sends a request."""

    async def __call__(self, secret: str | None) -> Principal | None: ...  # noqa: D102
    def objection(self, sender: Principal, header: Callable[[str], str]) -> str: ...  # noqa: D102
    def spend_bytes(self, sender: Principal, count: int) -> None: ...  # noqa: D102
    def held_by(self, sender: Principal, most: int) -> Held: ...  # noqa: D102


class SqsDialect:
    """Answers SQS's clients.

    region, account  only appear in ARNs and queue URLs
    public_url       scheme, host and port in queue URLs; empty: those of the request
    rest_s           see REST_S; 0: neither is refused
    """

    def __init__(
        self,
        hub: Hub,
        authenticate: Authenticator,
        *,
        region: str = "us-east-1",
        account: str = "000000000000",
        public_url: str = "",
        rest_s: float = REST_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._authenticate = authenticate
        self._region = region
        self._account = account
        self._public_url = public_url.rstrip("/")
        catalog = Catalog(hub, clock, rest_s)
        self._polls = Polls(hub)
        queues = QueueActions(hub, catalog, clock, rest_s)
        messages = MessageActions(hub, catalog, self._polls, clock)
        self._tasks = tasks = MoveTasks(hub, catalog, self._polls, clock)
        self._actions: dict[str, _Action] = {
            "AddPermission": queues.permit,
            "CancelMessageMoveTask": tasks.cancel,
            "ChangeMessageVisibility": messages.change,
            "ChangeMessageVisibilityBatch": messages.change_batch,
            "CreateQueue": queues.create,
            "DeleteMessage": messages.delete,
            "DeleteMessageBatch": messages.delete_batch,
            "DeleteQueue": queues.delete,
            "GetQueueAttributes": queues.attributes,
            "GetQueueUrl": queues.url,
            "ListDeadLetterSourceQueues": queues.sources,
            "ListMessageMoveTasks": tasks.list,
            "ListQueues": queues.urls,
            "ListQueueTags": queues.tags,
            "PurgeQueue": queues.purge,
            "ReceiveMessage": messages.receive,
            "RemovePermission": queues.forbid,
            "SendMessage": messages.send,
            "SendMessageBatch": messages.send_batch,
            "SetQueueAttributes": queues.set_attributes,
            "StartMessageMoveTask": tasks.start,
            "TagQueue": queues.tag,
            "UntagQueue": queues.untag,
        }

    async def run(self) -> None:
        """Run move tasks, until stop()."""
        await self._tasks.run()

    def stop(self) -> None:
        """Let long polls end now, and move tasks after their batch."""
        self._polls.stop()
        self._tasks.stop()

    async def answer(self, call: Call, _: str) -> Response:
        """Answer a request; see speaks()."""
        wire = _wire(call)
        try:
            return await self._answer(call, wire)
        except SqsError as error:
            return wire.error(error.fault, str(error))
        except Overloaded as error:
            call.refused = error.why
            return wire.error(THROTTLED if error.why == "key" else UNAVAILABLE, str(error))
        except Unavailable:
            return wire.error(UNAVAILABLE, "The storage does not answer.")
        except TooLarge as error:
            return wire.error(TOO_LARGE, str(error))
        except BadEncoding as error:
            return wire.error(MALFORMED, str(error))
        except NotSupported as error:
            return wire.error(UNSUPPORTED, str(error))
        except KmqError as error:
            return wire.error(INVALID_VALUE, str(error))

    async def _answer(self, call: Call, wire: _Wire) -> Response:
        sender = await self._authenticate(None)
        if sender is None:  # signatures are not checked yet
            raise SqsError(INVALID_TOKEN, "The security token included in the request is invalid.")
        if why := self._authenticate.objection(sender, call.header):
            raise SqsError(ACCESS_DENIED, why)
        call.key_id = sender.id
        spend = partial(self._authenticate.spend_bytes, sender)
        action, given = await wire.read(call, spend)
        call.verb = action
        asked = Asked(call, Addresses(self._base(call), self._region, self._account), spend)
        return wire.result(action, await self._actions[action](asked, given))

    def _base(self, call: Call) -> str:
        if self._public_url:
            return self._public_url
        return f"{call.request.scope['scheme']}://{call.header('host') or 'localhost'}"


def speaks(headers: Mapping[str, str], query_string: bytes) -> bool:
    """True for a request of SQS's clients, whatever its path."""
    return (
        headers.get("x-amz-target", "").startswith(_TARGET)
        or headers.get("content-type", "").startswith(_FORM)
        or b"Action=" in query_string
    )


# --- the two protocols --------------------------------------------------------------------------------


class _Wire(Protocol):
    """Reads requests and writes answers, of one request."""

    async def read(self, call: Call, spend: Callable[[int], None]) -> tuple[str, Any]:
        """The action and its values; raises SqsError."""

    def result(self, action: str, result: dict[str, Any] | None) -> Response:
        """The answer of an action."""

    def error(self, fault: Fault, message: str) -> Response:
        """The answer to what can't be done."""


def _wire(call: Call) -> _Wire:
    return (_Json if call.header("x-amz-target") else _Query)(call.request_id)


class _Json:
    """AWS's JSON 1.0."""

    def __init__(self, request_id: str) -> None:
        self._headers = {"content-type": _JSON, "x-amzn-requestid": request_id}

    async def read(self, call: Call, spend: Callable[[int], None]) -> tuple[str, Any]:
        action = _known(call.header("x-amz-target").removeprefix(_TARGET))
        body = await call.body()
        spend(len(body))
        try:
            given = _DECODERS[action].decode(body or b"{}")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _malformed(error) from None
        return action, _complete(call, given)

    def result(self, action: str, result: dict[str, Any] | None) -> Response:  # noqa: ARG002
        return Response(b"{}" if result is None else _ENCODER.encode(result), 200, self._headers)

    def error(self, fault: Fault, message: str) -> Response:
        body = _ENCODER.encode({"__type": f"com.amazonaws.sqs#{fault.shape}", "message": message})
        kind = "Receiver" if fault.status >= 500 else "Sender"
        return Response(body, fault.status, {**self._headers, "x-amzn-query-error": f"{fault.code};{kind}"})


class _Query:
    """Parameters in, XML out."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    async def read(self, call: Call, spend: Callable[[int], None]) -> tuple[str, Any]:
        body = await call.body()
        spend(len(body))
        parameters = [*_pairs(call.request.scope["query_string"]), *_pairs(body)]
        action = _known(next((value for name, value in parameters if name == "Action"), ""))
        try:
            given = msgspec.convert(query.values(action, parameters), REQUESTS[action], strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise _malformed(error) from None
        return action, _complete(call, given)

    def result(self, action: str, result: dict[str, Any] | None) -> Response:
        return self._response(query.answer(action, result, self._request_id), 200)

    def error(self, fault: Fault, message: str) -> Response:
        return self._response(query.error(fault, message, self._request_id), fault.status)

    def _response(self, body: bytes, status: int) -> Response:
        return Response(body, status, {"content-type": "text/xml", "x-amzn-requestid": self._request_id})


_ENCODER = msgspec.json.Encoder()
_DECODERS = {action: msgspec.json.Decoder(kind) for action, kind in REQUESTS.items()}


def _pairs(text: bytes) -> Sequence[tuple[str, str]]:
    try:
        return parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
        )
    except ValueError as error:
        raise _malformed(error) from None


def _known(action: str) -> str:
    if action not in REQUESTS:
        raise SqsError(
            INVALID_ACTION,
            f"The action {action[:200]} is not valid for this endpoint." if action else "There is no Action.",
        )
    return action


def _malformed(error: Exception) -> SqsError:
    what = str(error) if isinstance(error, msgspec.MsgspecError) else type(error).__name__
    return SqsError(MALFORMED, f"The request can't be read: {what}")


def _complete(call: Call, given: Any) -> Any:
    """The values of a request, which may name its queue by its path; raises SqsError if one is missing."""
    if "QueueUrl" in given.required and given.QueueUrl is None:
        queue = queue_of_path(call.request.scope["path"])
        given = msgspec.structs.replace(given, QueueUrl=queue)
    for name in given.required:
        if getattr(given, name) is None:
            raise missing(name)
    return given


BUSY = _Json("").error(UNAVAILABLE, "the gateway is busy")
"""The answer when too many requests run."""
