"""What a gateway's native interface and its clients write to each other, as JSON. Pure: no I/O.

Durations are seconds. What is no UTF-8 text stands in base64 in the field of the same name with `_base64`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from kmqpy.core.int64 import INT64_MAX
from kmqpy.errors import MessageError
from kmqpy.message import Headers, Message, OutgoingMessage, as_bytes
from kmqpy.queue.plain import headers_of
from kmqpy.queue.protocol import DeadLetter, Orphan

MOST = 1_000
"""The most messages, receipts and ids in one request."""
MOST_SEEN = 10_000
"""The most messages, or dead letters, that a look shows; fewer if their bodies are large."""
QUEUE_ID = "kmq-queue-id"
"""The header in which a client says which queue it has opened: see Capabilities.bound_handles."""
PROBLEM = "application/problem+json"
PROBLEM_TYPE = "urn:kmqpy:error:"
"""The type of a problem is this and the name of the error's class."""
LATE_BODY = "BodyTimeout"
"""That of a request that was not read to its end."""

Count = Annotated[int, Meta(ge=1, le=INT64_MAX)]
Few = Annotated[int, Meta(ge=1, le=MOST)]
Seen = Annotated[int, Meta(ge=1, le=MOST_SEEN)]
Seconds = Annotated[float, Meta(ge=0)]
Receipts = Annotated[list[str], Meta(max_length=MOST)]
Pairs = list[tuple[str, bytes | None]]


_NOTHING = (None, None, None)


class _Content(Struct, kw_only=True, omit_defaults=True):
    """Key and headers of a message.

    `header_pairs` is there if the headers repeat a name, or their order shows nowhere else; then it has all
    of them, with values in base64.
    """

    key: str | UnsetType | None = UNSET
    key_base64: bytes | UnsetType = UNSET
    headers: dict[str, str | None] | UnsetType = UNSET
    headers_base64: dict[str, bytes] | UnsetType = UNSET
    header_pairs: Pairs | UnsetType = UNSET

    def key_bytes(self) -> bytes | None:
        """The key."""
        return _data(self.key, self.key_base64)

    def all_headers(self) -> Headers:
        """The headers."""
        if self.header_pairs:
            return tuple(self.header_pairs)
        texts = self.headers or {}
        return tuple(
            [(name, None if text is None else as_bytes(text, "headers")) for name, text in texts.items()]
            + [*(self.headers_base64 or {}).items()]
        )


class NewMessage(_Content, kw_only=True, forbid_unknown_fields=True):
    """A message to send."""

    body: str | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET
    delay: Seconds = 0.0
    priority: Annotated[int, Meta(ge=0, le=9)] = 0
    group: str | None = None
    dedup_id: str | None = None

    def outgoing(self) -> OutgoingMessage | bytes:
        """The message for Queue.send_many(); if there is only a body, that, which takes half the time."""
        body = _data(self.body, self.body_base64) or b""
        key, headers = self.key_bytes(), self.all_headers()
        if not (headers or self.delay or self.priority) and (key, self.group, self.dedup_id) == _NOTHING:
            return body
        return OutgoingMessage(
            body,
            key=key,
            headers=headers,
            delay=self.delay,
            priority=self.priority,
            group=self.group,
            dedup_id=self.dedup_id,
        )


class SentMessage(_Content, kw_only=True):
    """A message as `kmq receive` prints it, too."""

    receipt: str
    queue: str
    id: str
    body: str | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET
    attempts: int
    enqueued_ms: int
    first_enqueued_ms: int
    lease_until_ms: int
    group: str | None = None

    def body_bytes(self) -> bytes:
        """The body."""
        return _data(self.body, self.body_base64) or b""


class Letter(_Content, kw_only=True):
    """A dead letter; only a peek shows its body and headers."""

    id: str
    attempts: int | None
    first_enqueued_ms: int | None
    dead_since_ms: int
    reason: str | None
    size: int
    group: str | None = None
    body: str | UnsetType = UNSET
    body_base64: bytes | UnsetType = UNSET

    def letter(self) -> DeadLetter:
        """The dead letter that it describes."""
        return DeadLetter(
            id=self.id,
            key=self.key_bytes(),
            attempts=self.attempts,
            first_enqueued_ms=self.first_enqueued_ms,
            dead_since_ms=self.dead_since_ms,
            reason=self.reason,
            size=self.size,
            group=self.group,
            body=_data(self.body, self.body_base64) or b"",
            headers=self.all_headers(),
        )


# --- requests -----------------------------------------------------------------------------------------


class Batch(Struct, forbid_unknown_fields=True):
    """Messages to send: all of them, or none if one can't be sent."""

    messages: Annotated[list[NewMessage], Meta(max_length=MOST)]


class Finish(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages to finish, by the receipts of takes, or by ids: whoever has them, or nobody."""

    receipts: Receipts = []
    ids: Receipts = []


class Nack(Finish, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages to give back; without `count` this was no attempt."""

    delay: Seconds | None = None
    count: bool = True
    reason: str | None = None


class Extend(Finish, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages whose lease is to end so many seconds from now."""

    lease: Annotated[float, Meta(ge=0.1)]


class Reject(Finish, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Messages that become dead letters."""

    reason: str | None = None


class Redrive(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Dead letters to put back: those with these ids, or the oldest, or all."""

    ids: Receipts | None = None
    limit: Count | None = None


class Settings(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a queue, by name. With `expected`, nothing changes unless these are the present values."""

    settings: dict[str, Any] = {}
    expected: dict[str, Any] = {}


class SendQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """A header is NAME=VALUE, and may be repeated."""

    key: str | None = None
    header: list[str] = []
    delay: Seconds = 0.0
    priority: Annotated[int, Meta(ge=0, le=9)] = 0
    group: str | None = None


class ReceiveQuery(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How many to take, how long to wait for the first, at most 60 s, and for how long they are leased."""

    max_messages: Few = 1
    wait: Seconds = 0.0
    lease: Annotated[float, Meta(ge=0.1)] | None = None
    one_per_group: bool = False


class Limit(Struct, kw_only=True, forbid_unknown_fields=True):
    """How many to show."""

    limit: Seen = 10


class CountQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """No more are counted than this."""

    limit: Count | None = None


class OrphansQuery(Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Taken more than so many seconds ago, or queued before."""

    older_than: Seconds | None = None
    queued_before_ms: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    limit: Seen = MOST_SEEN


class TraceQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """A receipt or an id."""

    message: str


class ReceiptQuery(Struct, kw_only=True, forbid_unknown_fields=True):
    """The id of a message."""

    id: str


class NoQuery(Struct, forbid_unknown_fields=True):
    """Nothing may be given."""


# --- answers ------------------------------------------------------------------------------------------


class Id(Struct):
    """The id of the message that was sent."""

    id: str


class Ids(Struct):
    """Ids of messages, in the order in which they were given."""

    ids: list[str]


class Received(Struct, kw_only=True):
    """Messages that were taken.

    waited_ms  how long the request waited until then
    lease_ms   how long they are leased from then on
    """

    messages: list[SentMessage]
    waited_ms: int
    lease_ms: int


class Messages(Struct):
    """Messages that were looked at."""

    messages: list[SentMessage]


class Letters(Struct):
    """Dead letters, the oldest first."""

    dead_letters: list[Letter]


class Lost(Struct):
    """Receipts, and ids, whose lease can't be extended any more."""

    lost: list[str]


class Receipt(Struct):
    """A receipt for whoever has the message, or nobody yet."""

    receipt: str


class Counted(Struct):
    """How many messages."""

    count: int


class Taken(Struct, kw_only=True):
    """A message in flight; see Orphan."""

    receipt: str
    holder: str | None
    since_ms: int
    lease_until_ms: int
    message: SentMessage | None

    def orphan(self, message: Message | None) -> Orphan:
        """The orphan that it describes."""
        return Orphan(
            receipt=self.receipt,
            holder=self.holder,
            since_ms=self.since_ms,
            lease_until_ms=self.lease_until_ms,
            message=message,
        )


class Orphans(Struct):
    """Messages in flight; the one taken first comes first."""

    orphans: list[Taken]


class Queues(Struct):
    """Names of queues, sorted."""

    queues: list[str]


class Description(Struct, kw_only=True):
    """Settings of a queue, and how many messages it holds; see QueueDescription."""

    name: str
    generation: str
    settings: dict[str, Any]
    ready: int
    delayed: int
    in_flight: int
    dead: int
    held_groups: int = 0


class Handle(Struct, kw_only=True):
    """What a client knows of a queue that it has opened; see Queue."""

    unique_id: str
    default_lease: float
    max_lease: float
    at_most_once: bool
    delays_retries: bool
    in_groups: bool
    max_in_flight: int | None
    settings: dict[str, Any]
    capabilities: dict[str, Any]


class Capable(Struct):
    """What the storage can do; see Capabilities."""

    capabilities: dict[str, Any]


class Life(Struct):
    """The life of a message, as `kmq trace -o json` prints it."""

    life: dict[str, Any]


class Problem(Struct, kw_only=True, omit_defaults=True):
    """An error, by RFC 9457.

    field, value  the parameter or setting that is wrong, where one is
    done          of Unfinished: how much is done
    """

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    value: Any | UnsetType = UNSET
    done: int | None = None


# --- made of messages ---------------------------------------------------------------------------------


def content_of(key: bytes | None, headers: Headers) -> dict[str, Any]:
    """The fields of _Content."""
    if not headers:
        return {**_content("key", key), "headers": {}}
    by_kind = headers_of(headers)
    texts, binary = by_kind["headers"], by_kind.get("headers_base64", {})
    found: dict[str, Any] = {**_content("key", key), "headers": texts}
    if binary:
        found["headers_base64"] = {name: dict(headers)[name] for name in binary}
    if len(headers) > len(texts) + len(binary) or (texts and binary):
        found["header_pairs"] = [*headers]
    return found


def sent_message(queue: str, receipt: str, message: Message) -> SentMessage:
    """A message as it is shown; `queue` and `receipt` are what the client knows."""
    return SentMessage(
        receipt=receipt,
        queue=queue,
        id=message.id,
        attempts=message.attempts,
        enqueued_ms=message.enqueued_ms,
        first_enqueued_ms=message.first_enqueued_ms,
        lease_until_ms=message.lease_until_ms,
        group=message.group,
        **_content("body", message.body),
        **content_of(message.key, message.headers),
    )


def letter_of(one: DeadLetter, *, whole: bool) -> Letter:
    """A dead letter as it is shown; `whole`: with body and headers."""
    more = {**_content("body", one.body), **content_of(one.key, one.headers)}
    return Letter(
        id=one.id,
        attempts=one.attempts,
        first_enqueued_ms=one.first_enqueued_ms,
        dead_since_ms=one.dead_since_ms,
        reason=one.reason,
        size=one.size,
        group=one.group,
        **(more if whole else _content("key", one.key)),
    )


def new_message(body: bytes, key: bytes | None, headers: Headers, **more: Any) -> NewMessage:
    """A message to send; `more` are the fields that need no encoding."""
    own = content_of(key, headers) if headers or key is not None else {}
    return NewMessage(**_sendable(body), **own, **more)


_COSTLY = bytes([*range(32), ord(",")])
"""Characters that are long in JSON, or make a gateway take a text for a huge list."""


def _sendable(body: bytes) -> Mapping[str, Any]:
    """The body; as base64 if it is not text, or more than an eighth of it is costly."""
    costly = len(body) - len(body.translate(None, _COSTLY))
    return {"body_base64": body} if costly * 8 > len(body) else _content("body", body)


def _content(name: str, data: bytes | None) -> Mapping[str, Any]:
    try:
        return {name: None if data is None else data.decode()}
    except UnicodeDecodeError:
        return {f"{name}_base64": data}


def _data(text: str | UnsetType | None, data: bytes | UnsetType) -> bytes | None:
    if isinstance(data, bytes):
        if isinstance(text, str):
            raise MessageError("message: give a text or the same in base64, not both")
        return data
    return None if text is None or isinstance(text, UnsetType) else as_bytes(text, "body")
