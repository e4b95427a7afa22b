"""SQS's query protocol: parameters of a form or URL become values, answers XML. Pure: no I/O.

Parameters are flat: `MessageAttribute.1.Value.DataType`. Lists have numbers; in maps a name and a value stand
under each number.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kmqpy.gateway.dialects.sqs.errors import (
    MALFORMED,
    NO_QUEUE,
    NO_SUCH_QUEUE,
    UNKNOWN_OPERATION,
    Fault,
    SqsError,
)

NAMESPACE = "http://queue.amazonaws.com/doc/2012-11-05/"
_LISTS = {
    "ActionName": "Actions",
    "AttributeName": "AttributeNames",
    "AWSAccountId": "AWSAccountIds",
    "BinaryListValue": "BinaryListValues",
    "MessageAttributeName": "MessageAttributeNames",
    "MessageSystemAttributeName": "MessageSystemAttributeNames",
    "StringListValue": "StringListValues",
    "TagKey": "TagKeys",
}
_MAPS = {
    "Attribute": ("Attributes", "Name"),
    "MessageAttribute": ("MessageAttributes", "Name"),
    "MessageSystemAttribute": ("MessageSystemAttributes", "Name"),
    "Tag": ("Tags", "Key"),
}
_ENTRIES = "RequestEntry"
_ELEMENTS = {
    "Messages": "Message",
    "QueueUrls": "QueueUrl",
    "queueUrls": "QueueUrl",
    "Failed": "BatchResultErrorEntry",
    "Results": "ListMessageMoveTasksResultEntry",
}
"""The elements of lists in answers."""
_KEYS = dict(_MAPS.values())
"""What names the keys of maps in answers."""
_JSON_NAMES = {"Messages": "messages", "QueueUrls": "queueUrls"}
_EMPTY = {"ReceiveMessage": {"messages": None}, "ListQueues": {"queueUrls": None}}
"""In JSON: other names of lists, and how empty ones are shown."""
_DEPTH = 6
_SPECIAL = re.compile("[&<>\"'\r\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")
_ESCAPES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&apos;", "\r": "&#xD;"}


def values(action: str, parameters: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values of a request, as JSON would have them; raises SqsError."""
    tree: dict[str, Any] = {}
    for name, value in parameters:
        *path, last = name.split(".")
        node = tree
        if len(path) > _DEPTH:
            raise _malformed(name)
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise _malformed(name)
        if last in node:
            raise _malformed(name)
        node[last] = value
    found = _shaped(tree)
    if action == "CreateQueue" and "Tags" in found:
        found["tags"] = found.pop("Tags")
    if "AttributeNames" in found:  # here, not in JSON, they are asked for instead of the others
        found.pop("MessageSystemAttributeNames", None)
    return found


def _shaped(tree: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if not isinstance(value, dict):
            found[name] = value
        elif name in _LISTS:
            found[_LISTS[name]] = _numbered(name, value)
        elif name.endswith(_ENTRIES):
            found["Entries"] = [_shaped(_node(name, one)) for one in _numbered(name, value)]
        elif name in _MAPS:
            plural, key = _MAPS[name]
            entries = (_node(name, one) for one in _numbered(name, value))
            found[plural] = dict(_pair(name, one, key) for one in entries)
        else:
            found[name] = _shaped(value)
    return found


def _pair(name: str, entry: Mapping[str, Any], key: str) -> tuple[str, Any]:
    value = entry.get("Value")
    if not isinstance(entry.get(key), str):
        raise _malformed(name)
    return entry[key], _shaped(value) if isinstance(value, dict) else value


def _numbered(name: str, node: Mapping[str, Any]) -> Sequence[Any]:
    if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in node):
        raise _malformed(name)
    return [node[part] for part in sorted(node, key=int)]


def _node(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(name)
    return value


def _malformed(name: str) -> SqsError:
    return SqsError(MALFORMED, f"The parameter {name[:200]} is malformed.")


# --- answers ------------------------------------------------------------------------------------------


def answer(action: str, result: Mapping[str, Any] | None, request_id: str) -> bytes:
    """The XML of an answer; None: the action has no result."""
    body = ""
    if result is not None:
        members = _members(action, result)
        body = f"<{action}Result>{members}</{action}Result>" if members else f"<{action}Result/>"
    return _document(f"{action}Response", body, request_id)


def error(fault: Fault, message: str, request_id: str) -> bytes:
    if fault is UNKNOWN_OPERATION:
        return f"<{fault.shape}/>".encode()
    kind, message = _told(fault, message)
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{NAMESPACE}"><Error><Type>{kind}</Type>'
        f"<Code>{fault.code}</Code><Message>{escaped(message)}</Message><Detail/></Error>"
        f"<RequestId>{escaped(request_id)}</RequestId></ErrorResponse>"
    ).encode()


def json_answer(action: str, result: Mapping[str, Any] | None, request_id: str) -> dict[str, Any]:
    """The answer of an action for JSON, as SQS gives it to who asks by parameters and accepts only that."""
    told = {} if result is None else {f"{action}Result": {**_EMPTY.get(action, {}), **_json_values(result)}}
    return {f"{action}Response": {**told, "ResponseMetadata": {"RequestId": request_id}}}


def json_error(fault: Fault, message: str, request_id: str) -> dict[str, Any]:
    kind, message = _told(fault, message)
    return {"Error": {"Type": kind, "Code": fault.code, "Message": message}, "RequestId": request_id}


def _json_values(values: Mapping[str, Any]) -> dict[str, Any]:
    return {_JSON_NAMES.get(name, name): _json_value(name, value) for name, value in values.items()}


def _json_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_json_value("", one) for one in value]
    if name in _KEYS:
        return [{_KEYS[name]: key, "Value": _json_value("", one)} for key, one in value.items()]
    return _json_values(value) if isinstance(value, dict) else value


def _told(fault: Fault, message: str) -> tuple[str, str]:
    """Type and Message of an error."""
    if fault is NO_SUCH_QUEUE:  # SQS says so here, and not in its other protocol
        message = f"{NO_QUEUE} for this wsdl version."
    return "Receiver" if fault.status >= 500 else "Sender", message


def _document(name: str, body: str, request_id: str) -> bytes:
    return (
        f'<?xml version="1.0"?><{name} xmlns="{NAMESPACE}">{body}<ResponseMetadata><RequestId>'
        f"{escaped(request_id)}</RequestId></ResponseMetadata></{name}>"
    ).encode()


def _members(action: str, values: Mapping[str, Any]) -> str:
    return "".join(_member(action, name, value) for name, value in values.items())


def _member(action: str, name: str, value: Any) -> str:
    match value:
        case dict() if name in _KEYS:
            return _map(action, name.removesuffix("s"), _KEYS[name], value)
        case list():
            element = f"{action}ResultEntry" if name == "Successful" else _ELEMENTS[name]
            return "".join(_member(action, element, one) for one in value)
        case dict():
            return f"<{name}>{_members(action, value)}</{name}>"
        case bool():
            text = "true" if value else "false"
        case bytes():
            text = base64.b64encode(value).decode()
        case _:
            text = escaped(str(value))
    return f"<{name}>{text}</{name}>"


def _map(action: str, element: str, key: str, values: Mapping[str, Any]) -> str:
    return "".join(
        f"<{element}><{key}>{escaped(name)}</{key}>{_member(action, 'Value', value)}</{element}>"
        for name, value in values.items()
    )


def escaped(text: str) -> str:
    """Text for XML; characters that XML can't have become U+FFFD."""
    return _SPECIAL.sub(lambda found: _ESCAPES.get(found[0], "\N{REPLACEMENT CHARACTER}"), text)
