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
_ARN = re.compile(r"arn:[a-z-]+:iam::(?P<account>[^:]*):(?:root|user/(?P<key>.+))")


def verdict(policy: str, *, action: str, key_id: str, account: str, queue: str) -> bool | None:
    """True: the policy allows it; False: it denies it, whatever else it allows; None: it says nothing.

    action   as the request has it; what is said of an action goes for its batches
    key_id   of the key that has signed
    account  to which all keys belong
    queue    its name
    """
    names = {f"sqs:{one}".lower() for one in (action, action.removesuffix("Batch"))}
    found: bool | None = None
    for one in _statements(policy):
        denies = one.get("Effect") != "Allow"
        if not _is_understood(one):
            if denies:  # nobody knows whom it means
                return False
            continue
        if (
            _names_sender(one["Principal"], key_id, account)
            and any(fnmatchcase(name, pattern.lower()) for pattern in _texts(one["Action"]) for name in names)
            and any(fnmatchcase(queue, pattern.rpartition(":")[2]) for pattern in _texts(one["Resource"]))
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
                "Effect (Allow or Deny), Principal (* or AWS), Action (of sqs) and Resource only; this "
                "gateway can't enforce others.",
            )


@lru_cache(maxsize=1_000)
def _statements(policy: str) -> Sequence[Mapping[str, Any]]:
    """The statements of a policy, which is a JSON object; what is none is one without an effect."""
    found = json.loads(policy).get("Statement", [])
    return [one if isinstance(one, dict) else {} for one in (found if isinstance(found, list) else [found])]


def _is_understood(statement: Mapping[str, Any]) -> bool:
    principal = statement.get("Principal")
    return (
        statement.keys() <= _READ
        and statement.get("Effect") in ("Allow", "Deny")
        and (
            principal == "*"
            or (
                isinstance(principal, dict) and principal.keys() == {"AWS"} and bool(_texts(principal["AWS"]))
            )
        )
        and all(_texts(statement.get(part)) for part in ("Action", "Resource"))
        and all(one == "*" or one.lower().startswith("sqs:") for one in _texts(statement["Action"]))
    )


def _names_sender(principal: Any, key_id: str, account: str) -> bool:
    for one in ["*"] if principal == "*" else _texts(principal["AWS"]):
        if one in ("*", key_id, account):
            return True
        found = _ARN.fullmatch(one)
        if found is not None and (found["key"] or found["account"]) in (key_id, account):
            return True
    return False


def _texts(value: Any) -> list[str]:
    """A text, or several; none if something else is among them."""
    found = value if isinstance(value, list) else [value]
    return found if all(isinstance(one, str) for one in found) else []
