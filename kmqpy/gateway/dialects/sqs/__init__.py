"""SQS over HTTP, as AWS's SDKs speak it: JSON, and the older query protocol.

What queues and messages are called, which values they may have, statuses and texts are those of AWS; the
clients of SQS depend on codes and shapes of errors. shapes.py is made of AWS's own model.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.errors import KmqError, NotSupported, Unavailable
from kmqpy.gateway.dialects.sqs import query
from kmqpy.gateway.dialects.sqs.addresses import Addresses, queue_of_arn, queue_of_path, queue_of_url
from kmqpy.gateway.dialects.sqs.asked import Asked
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.errors import (
    ACCESS_DENIED,
    INCOMPLETE_SIGNATURE,
    INVALID_ACTION,
    INVALID_ADDRESS,
    INVALID_TOKEN,
    INVALID_VALUE,
    MALFORMED,
    MISSING_TOKEN,
    SIGNATURE_MISMATCH,
    THROTTLED,
    TOO_LARGE,
    UNAVAILABLE,
    UNKNOWN_OPERATION,
    UNSUPPORTED,
    Fault,
    SqsError,
    missing,
)
from kmqpy.gateway.dialects.sqs.message_actions import MessageActions
from kmqpy.gateway.dialects.sqs.move_tasks import MoveTasks
from kmqpy.gateway.dialects.sqs.policies import verdict
from kmqpy.gateway.dialects.sqs.queue_actions import QueueActions
from kmqpy.gateway.dialects.sqs.reading import malformed, read_json
from kmqpy.gateway.dialects.sqs.shapes import REQUESTS
from kmqpy.gateway.http import Call, Response
from kmqpy.gateway.keys.access import Access
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.keys.sigv4 import BadSignature, Signature, canonical_request, signature_of
from kmqpy.gateway.limits import BadEncoding, Overloaded, TooLarge
from kmqpy.gateway.service.hub import Hub
from kmqpy.gateway.service.polls import Polls

_TARGET = "AmazonSQS."
_JSON = "application/x-amz-json-1.0"
_FORM = "application/x-www-form-urlencoded"
_SERVICE = "sqs"
_QUEUE_PATH = re.compile(r"/\d{12}/[^/]+")
_UNKNOWN_KEY = "The security token included in the request is invalid."
_MAX_FIELDS = 5_000
_NOT_AT_QUEUES = {"CreateQueue", "ListQueues"}
"""Actions of the query protocol that queues' own URLs don't have."""
REST_S = 60.0
"""AWS's seconds between two purges, and between a queue's end and the next one of its name."""

_Action = Callable[[Asked, Any], Awaitable[dict[str, Any] | None]]


class SqsDialect:
    """Answers SQS's clients.

    region, account  only appear in ARNs and queue URLs
    public_url       scheme, host and port in queue URLs; empty: those of the request
    rest_s           see REST_S; 0: neither is refused
    fair             see Catalog
    """

    def __init__(
        self,
        hub: Hub,
        polls: Polls,
        authenticate: Access,
        *,
        region: str = "us-east-1",
        account: str = "000000000000",
        public_url: str = "",
        rest_s: float = REST_S,
        fair: Sequence[str] = (),
    ) -> None:
        self._authenticate = authenticate
        self._region = region
        self._account = account
        self._public_url = public_url.rstrip("/")
        self._catalog = catalog = Catalog(hub, rest_s, fair)
        self._polls = polls
        queues = QueueActions(hub, catalog, rest_s)
        messages = MessageActions(hub, catalog, self._polls)
        self._tasks = tasks = MoveTasks(hub, catalog, self._polls)
        self._actions: dict[str, tuple[str, _Action]] = {
            "AddPermission": ("manage", queues.permit),
            "CancelMessageMoveTask": ("manage", tasks.cancel),
            "ChangeMessageVisibility": ("poll", messages.change),
            "ChangeMessageVisibilityBatch": ("poll", messages.change_batch),
            "CreateQueue": ("post", queues.create),
            "DeleteMessage": ("poll", messages.delete),
            "DeleteMessageBatch": ("poll", messages.delete_batch),
            "DeleteQueue": ("manage", queues.delete),
            "GetQueueAttributes": ("get_status", queues.attributes),
            "GetQueueUrl": ("get_status", queues.url),
            "ListDeadLetterSourceQueues": ("get_status", queues.sources),
            "ListMessageMoveTasks": ("get_status", tasks.list),
            "ListQueues": ("get_status", queues.urls),
            "ListQueueTags": ("get_status", queues.tags),
            "PurgeQueue": ("poll", queues.purge),
            "ReceiveMessage": ("poll", messages.receive),
            "RemovePermission": ("manage", queues.forbid),
            "SendMessage": ("post", messages.send),
            "SendMessageBatch": ("post", messages.send_batch),
            "SetQueueAttributes": ("manage", queues.set_attributes),
            "StartMessageMoveTask": ("manage", tasks.start),
            "TagQueue": ("manage", queues.tag),
            "UntagQueue": ("manage", queues.untag),
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
        except BadSignature as error:
            return wire.error(INCOMPLETE_SIGNATURE if error.is_incomplete else SIGNATURE_MISMATCH, str(error))
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
        if call.request.method not in {"GET", "POST"}:
            raise SqsError(INVALID_ACTION, "Ask by GET or POST.")
        sender, signature = await self._authenticate.of_id(None), None
        if sender is None:  # not everybody may come
            signature = signature_of(call.headers(), call.parameters(), _SERVICE)
            if signature is None:
                raise SqsError(MISSING_TOKEN, "Request is missing Authentication Token")
            sender = await self._authenticate.of_id(signature.claim.key_id)
        if sender is None:
            raise SqsError(INVALID_TOKEN, _UNKNOWN_KEY)
        if why := self._authenticate.objection(sender, call.header):
            raise SqsError(ACCESS_DENIED, why)
        call.key_id = sender.id
        self._authenticate.count_held(sender, call.share, call.limits.max_key_bytes)
        body = await call.body()
        if sender.key is not None and signature is not None:
            self._check(call, sender, signature, body)
        self._authenticate.spend_request(sender)
        spend = partial(self._authenticate.spend_bytes, sender)
        spend(len(body))
        action, given = wire.read(call, body)
        call.verb = action
        needs, do = self._actions[action]
        addresses = Addresses(self._base(call), self._region, self._account)
        ruled = await self._ruled(action, needs, given, sender, addresses)
        return wire.result(action, await do(Asked(call, addresses, sender, needs, spend, ruled), given))

    async def _ruled(
        self, action: str, needs: str, given: Any, sender: Principal, addresses: Addresses
    ) -> Mapping[str, bool]:
        """What the policy of the queue says of the request; it rules nothing that needs `manage`."""
        if sender.key is None or needs == "manage" or action in {"CreateQueue", "ListQueues"}:
            return {}
        try:
            name = _subject(given)
            policy = (await self._catalog.get(name)).attributes.get("Policy")
        except SqsError:  # there is no such queue, which whoever may know it is told later
            return {}
        if policy is None:
            return {}
        arn = addresses.arn(name)
        found = verdict(policy, action=action, key_id=sender.id, account=self._account, arn=arn)
        return {} if found is None else {name: found}

    def _check(self, call: Call, sender: Principal, signature: Signature, body: bytes) -> None:
        """Raise SqsError unless the sender has signed the request."""
        secrets = self._authenticate.aws_secrets(sender)
        if not secrets:  # a key of another kind, or the gateway has no operator's key
            raise SqsError(INVALID_TOKEN, _UNKNOWN_KEY)
        signature.check_time(SYSTEM_CLOCK.wall_ms() / 1000)
        scope = call.request.scope
        text = canonical_request(
            signature,
            scope["method"],
            (scope.get("raw_path") or scope["path"].encode()).partition(b"?")[0].decode("latin-1"),
            scope["query_string"].decode("latin-1"),
            call.headers(),
            body,
        )
        if not any(signature.check(secret, text) for secret in secrets):
            raise BadSignature(
                "The request signature we calculated does not match the signature you provided. Check your "
                "AWS Secret Access Key and signing method. Consult the service documentation for details."
            )

    def _base(self, call: Call) -> str:
        if self._public_url:
            return self._public_url
        return f"{call.request.scope['scheme']}://{call.header('host') or 'localhost'}"


def speaks(call: Call) -> bool:
    """True for a request of SQS's clients, whatever its path, or for the URL of a queue."""
    scope = call.request.scope
    return (
        call.header("x-amz-target").startswith(_TARGET)
        or call.header("content-type").startswith(_FORM)
        or b"Action=" in scope["query_string"]
        or (scope["method"] == "GET" and _QUEUE_PATH.fullmatch(scope["path"]) is not None)
    )


# --- the two protocols --------------------------------------------------------------------------------


class _Wire(Protocol):
    """Reads requests and writes answers, of one request."""

    def read(self, call: Call, body: bytes) -> tuple[str, Any]:
        """The action and its values; raises SqsError."""

    def result(self, action: str, result: dict[str, Any] | None) -> Response:
        """The answer of an action."""

    def error(self, fault: Fault, message: str) -> Response:
        """The answer to what can't be done."""


def _wire(call: Call) -> _Wire:
    if call.header("x-amz-target"):
        return _Json(call.request_id)
    return _Query(call.request_id, in_json="application/json" in call.header("accept"))


class _Json:
    """AWS's JSON 1.0."""

    def __init__(self, request_id: str) -> None:
        self._headers = {"content-type": _JSON, "x-amzn-requestid": request_id}

    def read(self, call: Call, body: bytes) -> tuple[str, Any]:
        action = _known(call.header("x-amz-target").removeprefix(_TARGET))
        given = _complete(call, read_json(action, body or b"{}"))
        _check_required(given)
        return action, given

    def result(self, action: str, result: dict[str, Any] | None) -> Response:  # noqa: ARG002
        return Response(b"{}" if result is None else _ENCODER.encode(result), 200, self._headers)

    def error(self, fault: Fault, message: str) -> Response:
        body = _ENCODER.encode({"__type": f"{fault.space}#{fault.shape}", "message": message})
        kind = "Receiver" if fault.status >= 500 else "Sender"
        return Response(body, fault.status, {**self._headers, "x-amzn-query-error": f"{fault.code};{kind}"})


class _Query:
    """Parameters in, XML out, or JSON for who accepts that."""

    def __init__(self, request_id: str, *, in_json: bool) -> None:
        self._request_id = request_id
        self._in_json = in_json

    def read(self, call: Call, body: bytes) -> tuple[str, Any]:
        parameters = [*_pairs(call.request.scope["query_string"]), *_pairs(body)]
        action = next((value for name, value in parameters if name == "Action"), "")
        path = call.request.scope["path"]
        if not action and call.request.method == "GET":
            raise SqsError(UNKNOWN_OPERATION, path)
        _known(action, is_at_queue=queue_of_path(path) is not None)
        try:
            given = msgspec.convert(query.values(action, parameters), REQUESTS[action], strict=False)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise malformed(error) from None
        given = _complete(call, given)
        if "QueueUrl" in given.required and not given.QueueUrl:
            url = f"{call.request.scope['scheme']}://{call.header('host')}{path}"
            raise SqsError(INVALID_ADDRESS, f"The address {url[:300]} is not valid for this endpoint.")
        _check_required(given)
        return action, given

    def result(self, action: str, result: dict[str, Any] | None) -> Response:
        if self._in_json:
            return self._response(query.json_answer(action, result, self._request_id), 200)
        return self._response(query.answer(action, result, self._request_id), 200)

    def error(self, fault: Fault, message: str) -> Response:
        if self._in_json and fault is not UNKNOWN_OPERATION:
            return self._response(query.json_error(fault, message, self._request_id), fault.status)
        return self._response(query.error(fault, message, self._request_id), fault.status)

    def _response(self, answer: bytes | dict[str, Any], status: int) -> Response:
        kind = "text/xml"
        if not isinstance(answer, bytes):
            answer, kind = _ENCODER.encode(answer), "application/json"
        return Response(answer, status, {"content-type": kind, "x-amzn-requestid": self._request_id})


_ENCODER = msgspec.json.Encoder()


def _pairs(text: bytes) -> Sequence[tuple[str, str]]:
    try:
        return parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_FIELDS
        )
    except ValueError as error:
        raise malformed(error) from None


def _known(action: str, *, is_at_queue: bool = False) -> str:
    if action not in REQUESTS or (is_at_queue and action in _NOT_AT_QUEUES):
        raise SqsError(
            INVALID_ACTION,
            f"The action {action[:200]} is not valid for this endpoint." if action else "There is no Action.",
        )
    return action


def _subject(given: Any) -> str:
    """The name of the queue that a request is about; raises SqsError."""
    if "QueueUrl" in given.required:
        return queue_of_url(given.QueueUrl)
    if "SourceArn" in given.required:
        return queue_of_arn(given.SourceArn, "SourceArn")
    return str(given.QueueName)


def _complete(call: Call, given: Any) -> Any:
    """The values of a request, which may name its queue by its path."""
    if "QueueUrl" in given.required and given.QueueUrl is None:
        return msgspec.structs.replace(given, QueueUrl=queue_of_path(call.request.scope["path"]))
    return given


def _check_required(given: Any) -> None:
    """Raise SqsError if a value is missing."""
    for name in given.required:
        if getattr(given, name) is None:
            raise missing(name)


BUSY = _Json("").error(UNAVAILABLE, "the gateway is busy")
"""The answer when too many requests run."""
