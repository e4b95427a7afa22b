"""Attributes of queues: which there are, what they may be, and how they are kept. Pure: no I/O.

They are kept as JSON in the setting `notes` of the queue; the visibility timeout is the queue's own lease, so
that `kmq queue alter` changes it, too.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from kmqpy.gateway.dialects.sqs.errors import (
    INVALID_ATTRIBUTE_NAME,
    INVALID_ATTRIBUTE_VALUE,
    INVALID_VALUE,
    QUEUE_EXISTS,
    SqsError,
    invalid,
)

_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
FIFO_SUFFIX = ".fifo"
_MAX_NAME = 80
_TYPE, _SCOPE = "FifoQueue", "DeduplicationScope"
_FIFO = {
    _TYPE: ("true",),
    "ContentBasedDeduplication": ("false", "true"),
    _SCOPE: ("queue", "messageGroup"),
    "FifoThroughputLimit": ("perQueue", "perMessageGroupId"),
}
"""Attributes of FIFO queues: what they may be, the default first."""
_FLAGS = (_TYPE, "ContentBasedDeduplication")
_KEY = "sqs"
"""Under this key, `notes` has what is the dialect's."""
MAX_COUNT = 1_000
_MAX_SOURCES = 10
_SCOPE_CHANGES_S = 60
"""As on AWS, another DeduplicationScope counts a minute after it was set."""
_MAX_POLICY_BYTES = 8_192
_VERSIONS = ("2008-10-17", "2012-10-17")
_NEGATED = ("Principal", "Action", "Resource")
_STATEMENT = {"Sid", "Effect", "Condition", *_NEGATED, *(f"Not{one}" for one in _NEGATED)}

VISIBILITY = "VisibilityTimeout"
_KMS, _SSE = "KmsMasterKeyId", "SqsManagedSseEnabled"
_KMS_PERIOD = "KmsDataKeyReusePeriodSeconds"
READ_ONLY = (
    "QueueArn",
    "CreatedTimestamp",
    "LastModifiedTimestamp",
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
)


class _Range(NamedTuple):
    default: int
    least: int
    most: int


NUMBERS = {
    VISIBILITY: _Range(30, 0, 43_200),
    "MaximumMessageSize": _Range(1_048_576, 1_024, 1_048_576),
    "MessageRetentionPeriod": _Range(345_600, 60, 1_209_600),
    "DelaySeconds": _Range(0, 0, 900),
    "ReceiveMessageWaitTimeSeconds": _Range(0, 0, 20),
    _KMS_PERIOD: _Range(300, 60, 86_400),
}
_ALWAYS_SHOWN = (*(name for name in NUMBERS if not name.startswith("Kms")), _SSE)
_DEFAULTS = {**{name: str(one.default) for name, one in NUMBERS.items()}, _SSE: "true"}
_EMPTIED = ("Policy", "RedrivePolicy", "RedriveAllowPolicy", _KMS)
"""These an empty text removes."""


class Redrive(NamedTuple):
    """Where messages go that were received more than `most` times."""

    arn: str
    most: int


@dataclass(frozen=True, kw_only=True)
class Sheet:
    """What is kept of a queue.

    attributes  those that were set, but VisibilityTimeout
    visibility  VisibilityTimeout, in seconds
    created_s   when it was made (s since 1970); 0: not by SQS's clients
    modified_s  when its attributes were changed last
    purged_ms   when it was purged last (ms since 1970)
    tasks       its latest move tasks, see moves.py
    scoped      the DeduplicationScope before the last change, and until when (s since 1970) that one counts
    has_shares  True if the storage lets groups share the queue, although it is a standard one
    others      what other dialects keep
    """

    visibility: int = 30
    attributes: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    created_s: int = 0
    modified_s: int = 0
    purged_ms: int = 0
    tasks: tuple[Mapping[str, Any], ...] = ()
    scoped: tuple[str, int] = ("", 0)
    has_shares: bool = False
    others: Mapping[str, Any] = field(default_factory=dict)

    def value(self, name: str) -> str | None:
        """An attribute as it was set, or its default; None if it has none."""
        if name == VISIBILITY:
            return str(self.visibility)
        default = _FIFO[name][0] if self.is_fifo and name in _FIFO else _DEFAULTS.get(name)
        return self.attributes.get(name, default)

    @cached_property
    def is_fifo(self) -> bool:
        return self.attributes.get("FifoQueue") == "true"

    def scope(self, now_s: int) -> str:
        """The DeduplicationScope that counts."""
        former, until_s = self.scoped
        return former if now_s < until_s else self.value(_SCOPE) or ""

    def number(self, name: str) -> int:
        return int(self.value(name) or 0)

    def shown(self) -> dict[str, str]:
        """The attributes that clients see, without those of the queue's state."""
        names = dict.fromkeys((*_ALWAYS_SHOWN, *(_FIFO if self.is_fifo else ()), *self.attributes))
        names.pop(_KMS_PERIOD, None)
        if _KMS in self.attributes or self.value(_KMS_PERIOD) != _DEFAULTS[_KMS_PERIOD]:
            names[_KMS_PERIOD] = None
        return {name: value for name in names if (value := self.value(name)) is not None}

    @cached_property
    def redrive(self) -> Redrive | None:
        """Where its messages go that were received too often."""
        text = self.attributes.get("RedrivePolicy")
        if text is None:
            return None
        policy = json.loads(text)
        return Redrive(policy["deadLetterTargetArn"], int(policy["maxReceiveCount"]))

    def admits(self, source_arn: str) -> bool:
        """True if the queue of this ARN may have this one for its dead letters."""
        policy = json.loads(self.attributes.get("RedriveAllowPolicy", "{}"))
        match policy.get("redrivePermission", "allowAll"):
            case "byQueue":
                return source_arn in policy.get("sourceQueueArns", ())
            case "denyAll":
                return False
        return True

    def changed(self, attributes: Mapping[str, str], now_s: int) -> Sheet:
        """With other values of some attributes, which were checked."""
        kept = {**self.attributes, **attributes}
        if attributes.get(_KMS):  # one of the two encrypts
            kept[_SSE] = "false"
        elif attributes.get(_SSE) == "true":
            kept.pop(_KMS, None)
        scoped = self.scoped
        if self.is_fifo and _SCOPE in attributes:
            scoped = self.scope(now_s), now_s + _SCOPE_CHANGES_S
        visibility = int(kept.pop(VISIBILITY, self.visibility))
        kept = {name: value for name, value in kept.items() if value or name not in _EMPTIED}
        return replace(self, attributes=kept, visibility=visibility, modified_s=now_s, scoped=scoped)

    def notes(self) -> str:
        """The text that is kept."""
        mine = {
            "attributes": dict(self.attributes),
            "tags": dict(self.tags),
            "created_s": self.created_s,
            "modified_s": self.modified_s,
            "purged_ms": self.purged_ms,
            "tasks": list(self.tasks),
            **({"scoped": self.scoped} if self.scoped[1] else {}),
            **({"never_hidden": True} if not self.visibility else {}),
        }
        return json.dumps({**self.others, _KEY: mine}, separators=(",", ":"))


def read_sheet(notes: str, lease_ms: int) -> Sheet:
    """The reverse of Sheet.notes(); what is not such text, of a queue that others made, is an empty sheet."""
    try:
        whole = json.loads(notes or "{}")
        mine = whole.pop(_KEY, {})
        former, until_s = mine.get("scoped", ("", 0))
        return Sheet(
            visibility=0 if mine.get("never_hidden") else max(1, round(lease_ms / 1000)),
            attributes=_good(mine.get("attributes", {})),
            tags=dict(mine.get("tags", {})),
            created_s=int(mine.get("created_s", 0)),
            modified_s=int(mine.get("modified_s", 0)),
            purged_ms=int(mine.get("purged_ms", 0)),
            tasks=tuple(mine.get("tasks", ())),
            scoped=(str(former), int(until_s)),
            others=whole,
        )
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return Sheet(visibility=max(1, round(lease_ms / 1000)))


def _good(attributes: Mapping[str, str]) -> dict[str, str]:
    """Those that can be what a client has set, since whoever writes notes may err."""
    found = {}
    for name, value in attributes.items():
        with contextlib.suppress(SqsError):
            found[name] = _checked(name, value, is_fifo=attributes.get("FifoQueue") == "true")
    return found


# --- checks -------------------------------------------------------------------------------------------


def check_name(name: str, attributes: Mapping[str, str]) -> None:
    """Raise SqsError for a name that no queue may have, or none with these attributes."""
    is_fifo = attributes.get(_TYPE, "").lower() == "true"
    if is_fifo and not (name.endswith(FIFO_SUFFIX) and is_name(name)):
        raise SqsError(
            INVALID_VALUE,
            "The name of a FIFO queue can only include alphanumeric characters, hyphens, or underscores, "
            "must end with .fifo suffix and be 1 to 80 in length.",
        )
    if not is_fifo and not _NAME.fullmatch(name):
        raise SqsError(
            INVALID_VALUE,
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length",
        )


def is_name(name: str) -> bool:
    """True for a name that a queue of SQS may have."""
    return len(name) <= _MAX_NAME and _NAME.fullmatch(name.removesuffix(FIFO_SUFFIX)) is not None


def checked(given: Mapping[str, str], *, is_fifo: bool, former: Sheet | None = None) -> dict[str, str]:
    """Attributes that a client sets, as they are kept; raises SqsError. `former`: what is kept already."""
    if former is not None and former.is_fifo and given.get(_TYPE, "true").lower() != "true":
        raise _invalid(_TYPE, "Modifying queue type is not supported.")
    found = {name: _checked(name, value, is_fifo=is_fifo) for name, value in given.items()}
    if found.get(_KMS) and found.get(_SSE) == "true":
        raise SqsError(
            INVALID_ATTRIBUTE_NAME,
            "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE "
            "or SQS SSE.",
        )
    whole = {**(former.attributes if former else {}), **found}
    if whole.get("FifoThroughputLimit") == "perMessageGroupId" and whole.get(_SCOPE) != "messageGroup":
        raise _invalid(
            "FifoThroughputLimit",
            f"The perMessageGroupId value is allowed only when the value for {_SCOPE} is messageGroup.",
        )
    return found


def _checked(name: str, value: str, *, is_fifo: bool) -> str:
    if name in NUMBERS:
        low, high = NUMBERS[name][1:]
        if not (value.isascii() and value.isdecimal() and len(value) < 9 and low <= int(value) <= high):
            raise _invalid(name)
        return str(int(value))
    if name in _FIFO and is_fifo:
        if name in _FLAGS:
            value = value.lower()
        if value not in _FIFO[name]:
            raise _invalid(name)
        return value
    if name in _FIFO and name not in _FLAGS:
        raise SqsError(
            INVALID_ATTRIBUTE_NAME, f"You can specify the {name} only when {_TYPE} is set to true."
        )
    if name not in _CHECKS:
        raise SqsError(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")
    return _CHECKS[name](value) if value else value


def check_policy(text: str) -> None:
    """Raise SqsError for a policy that no client may set; what is kept already is heeded whatever it is."""
    policy = json.loads(text)
    given = policy.get("Statement")
    statements = given if isinstance(given, list) else [given]
    if not (
        policy.keys() <= {"Version", "Id", "Statement"}
        and policy.get("Version", _VERSIONS[0]) in _VERSIONS
        and statements
        and all(isinstance(one, dict) and one.keys() <= _STATEMENT for one in statements)
    ):
        raise _invalid("Policy")


def check_known(names: list[str]) -> None:
    """Raise SqsError for a name that no attribute of a queue has."""
    known = {"All", *READ_ONLY, *NUMBERS, *_CHECKS, *_FIFO}
    for name in names:
        if name not in known:
            raise SqsError(INVALID_ATTRIBUTE_NAME, f"Unknown Attribute {name}.")


def check_same(existing: Sheet, wanted: Mapping[str, str]) -> None:
    """Raise SqsError if a queue has other values of these attributes."""
    for name, value in wanted.items():
        if not _are_same(name, existing.value(name) or "", value):
            raise SqsError(
                QUEUE_EXISTS,
                "A queue already exists with the same name and a different value for attribute " + name,
            )


def _are_same(name: str, one: str, other: str) -> bool:
    if name.endswith("Policy") and one and other:
        return bool(json.loads(one) == json.loads(other))
    return one == other


def _invalid(name: str, reason: str = "") -> SqsError:
    why = f" Reason: {reason}" if reason else ""
    return SqsError(INVALID_ATTRIBUTE_VALUE, f"Invalid value for the parameter {name}.{why}")


def _object(value: str) -> dict[str, Any] | None:
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _check_policy(value: str) -> str:
    if _object(value) is None or len(value.encode()) > _MAX_POLICY_BYTES:
        raise _invalid("Policy")
    return value


def _check_redrive(value: str) -> str:
    policy = _object(value)
    if policy is None:
        raise invalid(value, "RedrivePolicy", "Redrive policy is not a valid JSON map.")
    for key in ("maxReceiveCount", "deadLetterTargetArn"):
        if key not in policy:
            raise invalid(
                value, "RedrivePolicy", f"Redrive policy does not contain mandatory attribute: {key}."
            )
    for key in policy:
        if key not in {"deadLetterTargetArn", "maxReceiveCount"}:
            raise invalid(
                value,
                "RedrivePolicy",
                "Only following attributes are supported: [maxReceiveCount, deadLetterTargetArn].",
            )
    count = str(policy["maxReceiveCount"])
    if isinstance(policy["maxReceiveCount"], bool) or not (
        count.isascii() and count.isdecimal() and len(count) < 9 and 1 <= int(count) <= MAX_COUNT
    ):
        raise invalid(
            value,
            "RedrivePolicy",
            f"Invalid value for maxReceiveCount: {count}, valid values are from 1 to {MAX_COUNT} both "
            "inclusive.",
        )
    if not isinstance(policy["deadLetterTargetArn"], str):
        raise invalid(value, "RedrivePolicy", "Invalid value for deadLetterTargetArn.")
    return json.dumps({**policy, "maxReceiveCount": int(count)}, separators=(",", ":"))


def _check_allow(value: str) -> str:
    policy = _object(value)
    sources = policy.get("sourceQueueArns", []) if policy is not None else None
    if (
        policy is None
        or not policy.keys() <= {"redrivePermission", "sourceQueueArns"}
        or policy.get("redrivePermission") not in ("allowAll", "denyAll", "byQueue")
        or not isinstance(sources, list)
        or not all(isinstance(one, str) for one in sources)
    ):
        raise _invalid(
            "RedriveAllowPolicy",
            "Amazon SQS can't create the redrive allow policy, as it\N{RIGHT SINGLE QUOTATION MARK}s in an "
            "unsupported format.",
        )
    why = ""
    if policy["redrivePermission"] != "byQueue":
        if sources:
            why = "To specify one or more source queue ARNs, you must set redrivePermission to byQueue."
    elif not sources:
        why = (
            "When you specify the byQueue permission type, you must also specify one or more "
            "sourceQueueArns values."
        )
    elif len(sources) > _MAX_SOURCES:
        why = f"The maximum number of source queue ARNs you can specify is {_MAX_SOURCES}."
    if why:
        why = f"Amazon SQS can't create the redrive allow policy. {why}"
        raise invalid(value, "RedriveAllowPolicy", why)
    return value


def _check_flag(value: str) -> str:
    if value.lower() not in {"true", "false"}:
        raise _invalid(_SSE)
    return value.lower()


_CHECKS: dict[str, Callable[[str], str]] = {
    "Policy": _check_policy,
    "RedrivePolicy": _check_redrive,
    "RedriveAllowPolicy": _check_allow,
    _KMS: lambda value: value,
    _SSE: _check_flag,
}
