"""What the policy of a queue says of a request that is signed by a key. Pure: no I/O.

This is the part of AWS's language that needs no users and no other services: statements with Effect,
Principal, Action and Resource. docs/sqs.md says what the values may be.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from kmqpy.gateway.dialects.sqs.errors import INVALID_ATTRIBUTE_VALUE, SqsError

_READ = frozenset({"Sid", "Effect", "Principal", "Action", "Resource"})
_READ_OF_ALL = frozenset({"Version", "Id", "Statement"})
_SENDER = re.compile(
    r"\*|\w+|arn:[a-z-]+:iam::(?P<account>\w*):(?:root|user/(?:[^*?]*/)?(?P<key>[^/*?]+))", re.ASCII
)


def verdict(policy: str, *, action: str, key_id: str, account: str, arn: str) -> bool | None:
    """True: the policy allows it; False: it denies it, whatever else it allows; None: it says nothing.

    action   as the request has it; what is said of an action goes for its batches
    key_id   of the key that has signed
    account  to which all keys belong
    arn      the queue's
    """
    queue = arn.rpartition(":")[2]
    names = {f"sqs:{one}".lower() for one in (action, action.removesuffix("Batch"))}
    found: bool | None = None
    for one in _statements(policy):
        denies = one.get("Effect") != "Allow"
        if not _is_understood(one):
            if denies:  # nobody knows whom it means
                return False
            continue
        resources = _texts(one["Resource"])
        if (
            _names_sender(one["Principal"], key_id, account)
            and any(_fits(name, pattern.lower()) for pattern in _texts(one["Action"]) for name in names)
            and (
                any(_fits(arn, pattern) for pattern in resources)
                # A policy that came from AWS with another region or account must not stop denying.
                or (denies and any(_fits(queue, pattern.rpartition(":")[2]) for pattern in resources))
            )
        ):
            if denies:
                return False
            found = True
    return found


def check_denials(policy: str) -> None:
    """Raise SqsError for a denial that can't be understood, since nobody could use the queue."""
    for one in _statements(policy):
        if one.get("Effect") != "Allow" and not _is_understood(one):
            raise SqsError(
                INVALID_ATTRIBUTE_VALUE,
                "Invalid value for the parameter Policy. Reason: a statement that denies may have Sid, "
                "Effect (Allow or Deny), Principal (* or AWS, with accounts, keys and users), Action (of "
                "sqs) and Resource (without variables) only, and a policy Version, Id and Statement; this "
                "gateway can't enforce others.",
            )


@lru_cache(maxsize=1_000)
def _statements(policy: str) -> Sequence[Mapping[str, Any]]:
    """The statements of a policy, which is a JSON object; what is none is one without an effect."""
    whole = json.loads(policy)
    found = whole.get("Statement", [])
    statements = found if isinstance(found, list) else [found]
    if not whole.keys() <= _READ_OF_ALL:  # "statement": who mistypes has denied something
        statements = [*statements, {}]
    return [one if isinstance(one, dict) else {} for one in statements]


def _is_understood(statement: Mapping[str, Any]) -> bool:
    """True if it is clear whom and what it means; what allows may name others besides, and allows less."""
    if not (
        statement.keys() <= _READ
        and statement.get("Effect") in ("Allow", "Deny")
        and all(_texts(statement.get(part)) for part in ("Action", "Resource"))
        and all(one == "*" or one.lower().startswith("sqs:") for one in _texts(statement["Action"]))
    ):
        return False
    senders = _senders(statement.get("Principal"))
    return bool(senders) and (
        statement["Effect"] == "Allow"
        or (
            all(_SENDER.fullmatch(one) for one in senders)
            and not any("$" in one for one in _texts(statement["Resource"]))
        )
    )


def _names_sender(principal: Any, key_id: str, account: str) -> bool:
    for one in _senders(principal):
        found = _SENDER.fullmatch(one)
        if found is None:
            continue
        if found["key"]:
            is_sender = found["key"] == key_id
        else:
            is_sender = (found["account"] or one) in ("*", key_id, account)
        if is_sender:
            return True
    return False


def _senders(principal: Any) -> list[str]:
    """Whom a Principal names; none if others than accounts, keys and users are among them."""
    if principal == "*":
        return ["*"]
    is_aws = isinstance(principal, dict) and principal.keys() == {"AWS"}
    return _texts(principal["AWS"]) if is_aws else []


def _texts(value: Any) -> list[str]:
    """A text, or several; none if something else is among them."""
    found = value if isinstance(value, list) else [value]
    return found if all(isinstance(one, str) for one in found) else []


def _fits(text: str, pattern: str) -> bool:
    """True if a pattern means this text: * stands for any characters, ? for one, and nothing else does."""
    return fnmatchcase(text, pattern.replace("[", "[[]"))
