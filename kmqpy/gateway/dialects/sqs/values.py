"""Attributes of messages: checked as SQS does, kept as headers, and chosen for an answer. Pure: no I/O.

An attribute is a header of its name, so programs with kmqpy have it, and their headers are attributes. One
header says which types the attributes have that are no plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kmqpy.gateway.dialects.sqs.errors import (
    INVALID_ATTRIBUTE_NAME,
    INVALID_CONTENTS,
    UNSUPPORTED,
    Fault,
    SqsError,
    missing,
)
from kmqpy.gateway.dialects.sqs.errors import INVALID_VALUE as _INVALID
from kmqpy.gateway.dialects.sqs.shapes import MessageAttributeValue, MessageSystemAttributeValue
from kmqpy.message import Headers

OWN = "sqs-"
"""Headers of the dialect's own begin so."""
TYPES = "sqs-types"
TRACE = "sqs-trace"
GROUP = "sqs-group"
DEDUP = "sqs-dedup"
MOVED = "sqs-moved"
_ESCAPE = "sqs-name-"
"""Stands before names of attributes that headers can't have."""
_RESERVED = (OWN, "kmq-")
TRACE_HEADER = "AWSTraceHeader"

_MOST = 10
_NAME = re.compile(r"(?!\.)(?!.*\.\.)[\w.-]{1,256}(?<!\.)")
"""Letters and digits of all scripts, as AWS takes them."""
_TYPE = re.compile(r"(String|Number|Binary)(\.[A-Za-z0-9_.-]+)?")
_MAX_NAME = 256
_MAX_TYPE = 256
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Value(NamedTuple):
    """The value of an attribute."""

    type: str
    content: bytes

    @property
    def is_binary(self) -> bool:
        """True if it is no text."""
        return self.type.startswith("Binary")

    def shown(self) -> dict[str, Any]:
        """Its form in answers."""
        if self.is_binary:
            return {"BinaryValue": self.content, "DataType": self.type}
        return {"StringValue": self.content.decode(), "DataType": self.type}


def check_contents(text: str, fault: Fault = INVALID_CONTENTS) -> None:
    """Raise SqsError if the text has a character that messages can't have."""
    if _FORBIDDEN.search(text):
        raise SqsError(
            fault,
            "Invalid characters found. Valid unicode characters are #x9 | #xA | #xD | #x20 to #xD7FF | "
            "#xE000 to #xFFFD | #x10000 to #x10FFFF",
        )


def checked(given: Mapping[str, MessageAttributeValue]) -> dict[str, Value]:
    """The attributes that a client sends; raises SqsError."""
    if len(given) > _MOST:
        raise SqsError(
            _INVALID, f"Number of message attributes [{len(given)}] exceeds the allowed maximum [{_MOST}]."
        )
    return {name: _checked(_checked_name(name), value) for name, value in given.items()}


def checked_trace(given: Mapping[str, MessageSystemAttributeValue]) -> dict[str, Value]:
    """The system attributes that a client sends: only one can be sent."""
    for name in given:
        if name != TRACE_HEADER:
            raise SqsError(_INVALID, f"Message system attribute name '{name[:256]}' is invalid.")
    found = {name: _checked(name, value) for name, value in given.items()}
    for value in found.values():
        if value.type != "String":
            raise SqsError(_INVALID, f"The type of message system attribute '{TRACE_HEADER}' must be String.")
    return found


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name.lower().startswith(("aws.", "amazon.")):
        raise SqsError(_INVALID, _fault_of_name(name))
    return name


def _fault_of_name(name: str) -> str:
    if not name:
        return "The request must contain non-empty message (user) attribute names."
    if name.lower().startswith(("aws.", "amazon.")):
        return (
            "You can't use message attribute names beginning with 'AWS.' or 'Amazon'. These strings are "
            "reserved for internal use."
        )
    for is_wrong, what in (
        (len(name) > _MAX_NAME, f"be shorter than {_MAX_NAME} bytes"),
        (name.startswith("."), "not begin with character '.'"),
        (name.endswith("."), "not end with character '.'"),
        (".." in name, "not have successive '.' characters"),
    ):
        if is_wrong:
            return f"Message (user) attribute name must {what}."
    return (
        "Message (user) attributes name can only contain upper and lower score characters, digits, periods, "
        "hyphens and underscores. "
    )


def _checked(name: str, value: MessageAttributeValue | MessageSystemAttributeValue | None) -> Value:
    if value is None:
        raise missing(f"MessageAttributes.{name}.Value")
    if value.StringListValues or value.BinaryListValues:
        raise SqsError(
            UNSUPPORTED, "Message attribute list values in SendMessage operation are not supported."
        )
    if not value.DataType:
        what = "value" if value.StringValue is None and value.BinaryValue is None else "type"
        raise SqsError(
            _INVALID,
            f"The message (user) attribute '{name}' must contain a non-empty message attribute {what}.",
        )
    if len(value.DataType) > _MAX_TYPE:
        raise SqsError(_INVALID, f"Message (user) attribute type must be shorter than {_MAX_TYPE} bytes.")
    if not _TYPE.fullmatch(value.DataType):
        raise SqsError(
            _INVALID,
            f"The type of message (user) attribute '{name}' is invalid. You must use only the following "
            "supported type prefixes: Binary, Number, String.",
        )
    kind = value.DataType.partition(".")[0]
    content = value.BinaryValue if kind == "Binary" else value.StringValue
    if not content:
        raise SqsError(
            _INVALID,
            f"Message (user) attribute '{name}' must contain a non-empty value of type '{value.DataType}'.",
        )
    if isinstance(content, bytes):
        return Value(value.DataType, content)
    check_contents(content, _INVALID)
    if kind == "Number" and not _NUMBER.fullmatch(content):
        raise SqsError(_INVALID, f"Can't cast the value of message (user) attribute '{name}' to a number.")
    return Value(value.DataType, content.encode())


def to_headers(attributes: Mapping[str, Value], system: Mapping[str, Value]) -> list[tuple[str, bytes]]:
    headers = [
        (_ESCAPE + name if name.startswith(_RESERVED) else name, one.content)
        for name, one in attributes.items()
    ]
    types = {name: one.type for name, one in attributes.items() if one.type != "String"}
    if types:
        headers.append((TYPES, json.dumps(types).encode()))
    if trace := system.get(TRACE_HEADER):
        headers.append((TRACE, trace.content))
    return headers


def from_headers(headers: Headers) -> dict[str, Value]:
    """The attributes that headers keep, or are; the reverse of to_headers()."""
    types: dict[str, Any] = {}
    found: dict[str, bytes] = {}
    for header, content in headers:
        name = header.removeprefix(_ESCAPE)
        if header == TYPES:
            types = _types(content or b"")
        elif content and not (name is header and name.startswith(_RESERVED)) and _NAME.fullmatch(name):
            found[name] = content
    return {name: _value(types.get(name), content) for name, content in found.items()}


def _types(content: bytes) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):  # of somebody else
        return {}
    return found if isinstance(found, dict) else {}


def _value(kind: Any, content: bytes) -> Value:
    kind = kind if isinstance(kind, str) and _TYPE.fullmatch(kind) else "String"
    if not kind.startswith("Binary"):
        try:
            is_text = not _FORBIDDEN.search(content.decode())
        except UnicodeDecodeError:
            is_text = False
        kind = kind if is_text else "Binary"
    return Value(kind, content)


def chosen(attributes: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    """The attributes that a client asks for: by names, `All`, `*`, `.*`, or `prefix.*`."""
    found: dict[str, Value] = {}
    for asked in names:
        if asked in {"All", "*", ".*"}:
            return dict(attributes)
        if asked.endswith(".*"):
            found |= {name: one for name, one in attributes.items() if name.startswith(asked[:-2])}
        elif asked in attributes:
            found[asked] = attributes[asked]
    return found


SYSTEM = (
    "SenderId",
    "SentTimestamp",
    "ApproximateReceiveCount",
    "ApproximateFirstReceiveTimestamp",
    "SequenceNumber",
    "MessageDeduplicationId",
    "MessageGroupId",
    TRACE_HEADER,
    "DeadLetterQueueSourceArn",
)
"""System attributes of messages."""


def check_system_names(names: Sequence[str]) -> None:
    """Raise SqsError for a name that no system attribute has."""
    for name in names:
        if name != "All" and name not in SYSTEM:
            raise SqsError(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name[:256]}.")
