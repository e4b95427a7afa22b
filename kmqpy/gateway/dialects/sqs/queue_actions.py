"""SQS's actions on queues: their life, attributes, tags and permissions."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import methodcaller
from typing import Any

from kmqpy.core.clock import SYSTEM_CLOCK
from kmqpy.gateway.dialects.sqs import attributes, shapes
from kmqpy.gateway.dialects.sqs.addresses import is_arn, queue_of_arn
from kmqpy.gateway.dialects.sqs.asked import Asked
from kmqpy.gateway.dialects.sqs.attributes import Sheet
from kmqpy.gateway.dialects.sqs.catalog import Catalog
from kmqpy.gateway.dialects.sqs.errors import (
    INVALID_VALUE,
    OVER_LIMIT,
    PURGE_IN_PROGRESS,
    SqsError,
    invalid,
    missing,
    raise_no_such_queue,
)
from kmqpy.gateway.dialects.sqs.policies import check_denials
from kmqpy.gateway.service.hub import Hub, QueueName

_MAX_LISTED = 1_000
_MAX_TAGS = 50
_MAX_KEY, _MAX_TAG = 128, 256
_MAX_PERMITTED = 7
_MAX_STATEMENTS = 20
_COLONS = 5
"""In an ARN."""
_ACTIONS = frozenset(
    {
        "*",
        "SendMessage",
        "ReceiveMessage",
        "DeleteMessage",
        "ChangeMessageVisibility",
        "GetQueueAttributes",
        "GetQueueUrl",
        "ListDeadLetterSourceQueues",
        "PurgeQueue",
    }
)
"""Actions that AddPermission can permit."""
_LONG_S = 60.0
"""Seconds that a purge may take."""


class QueueActions:
    """Makes, changes, lists and deletes queues.

    rest_s  seconds for which a queue that was purged can't be purged again
    """

    def __init__(self, hub: Hub, catalog: Catalog, rest_s: float) -> None:
        self._hub = hub
        self._catalog = catalog
        self._rest_s = rest_s

    # --- life -------------------------------------------------------------------------------------

    async def create(self, asked: Asked, given: shapes.CreateQueueRequest) -> dict[str, Any]:
        """Make a queue, unless it is there with the same attributes."""
        name = asked.about(given.QueueName or "")
        wanted = given.Attributes or {}
        attributes.check_name(name, wanted)
        checked = attributes.checked(wanted, is_fifo=name.endswith(attributes.FIFO_SUFFIX))
        if checked.get("Policy"):  # it gives permissions
            asked.about(name, "manage")
        tags = given.tags or {}
        _check_tags(name, tags)
        await self._check(asked, name, wanted, checked)
        await self._catalog.create(name, checked, tags)
        return {"QueueUrl": asked.addresses.url(name)}

    async def url(self, asked: Asked, given: shapes.GetQueueUrlRequest) -> dict[str, Any]:
        if not given.QueueName:
            raise SqsError(
                INVALID_VALUE, "Value for parameter QueueName is invalid. Reason: Must specify a queue name."
            )
        name = asked.about(given.QueueName)
        await self._catalog.get(name)
        return {"QueueUrl": asked.addresses.url(name)}

    async def urls(self, asked: Asked, given: shapes.ListQueuesRequest) -> dict[str, Any]:
        prefix = given.QueueNamePrefix or ""
        names = [name for name in await self._catalog.names() if name.startswith(prefix) and asked.may(name)]
        return _page(asked, "QueueUrls", names, given.MaxResults, given.NextToken)

    async def delete(self, asked: Asked, given: shapes.DeleteQueueRequest) -> None:
        await self._catalog.delete(asked.queue(given.QueueUrl))

    async def purge(self, asked: Asked, given: shapes.PurgeQueueRequest) -> None:
        """Remove all messages of a queue."""
        name = asked.queue(given.QueueUrl)
        if self._catalog.is_recent((await self._catalog.read(name)).purged_ms):
            raise SqsError(
                PURGE_IN_PROGRESS,
                f"Only one PurgeQueue operation on {name} is allowed every {self._rest_s:g} seconds.",
            )
        purge = methodcaller("purge")
        await self._hub.with_queue(QueueName(name), purge, missing=raise_no_such_queue, patience_s=_LONG_S)
        now_ms = SYSTEM_CLOCK.wall_ms()
        await self._catalog.change(name, lambda sheet: replace(sheet, purged_ms=now_ms))

    # --- attributes -------------------------------------------------------------------------------

    async def attributes(self, asked: Asked, given: shapes.GetQueueAttributesRequest) -> dict[str, Any]:
        name = asked.queue(given.QueueUrl)
        names = given.AttributeNames or []
        sheet = await self._catalog.read(name)
        attributes.check_known(names)
        found = sheet.shown()
        found["QueueArn"] = asked.addresses.arn(name)
        found["CreatedTimestamp"] = str(sheet.created_s)
        found["LastModifiedTimestamp"] = str(sheet.modified_s)
        if "All" in names or any(one.startswith("Approximate") for one in names):
            sizes = await self._catalog.describe(name)
            found["ApproximateNumberOfMessages"] = str(sizes.ready)
            found["ApproximateNumberOfMessagesNotVisible"] = str(sizes.in_flight)
            found["ApproximateNumberOfMessagesDelayed"] = str(sizes.delayed)
        chosen = found if "All" in names else {one: found[one] for one in names if one in found}
        return {"Attributes": chosen} if chosen else {}

    async def set_attributes(self, asked: Asked, given: shapes.SetQueueAttributesRequest) -> None:
        name = asked.queue(given.QueueUrl)
        sheet = await self._catalog.read(name)
        wanted = given.Attributes or {}
        if not wanted:
            raise missing("Attribute.Name")
        checked = attributes.checked(wanted, is_fifo=sheet.is_fifo, former=sheet)
        await self._check(asked, name, wanted, checked)
        now_s = SYSTEM_CLOCK.wall_ms() // 1000
        await self._catalog.change(name, lambda sheet: sheet.changed(checked, now_s))

    async def _check(
        self, asked: Asked, name: str, wanted: Mapping[str, str], checked: Mapping[str, str]
    ) -> None:
        """Raise SqsError for a policy that can't be enforced, and for a wrong queue for dead letters."""
        if asked.sender.key is not None:
            check_denials(checked.get("Policy") or "{}")
        if checked.get("Policy"):
            attributes.check_policy(checked["Policy"])
        policy = checked.get("RedrivePolicy")
        if not policy:
            return
        arn, policy = json.loads(policy)["deadLetterTargetArn"], wanted["RedrivePolicy"]
        if not is_arn(arn):
            is_other = arn.startswith("arn:") and arn.count(":") >= _COLONS and ":sqs:" not in arn
            why = "Only SQS queues are valid resources for" if is_other else "Invalid value for"
            raise invalid(policy, "RedrivePolicy", f"{why} deadLetterTargetArn.")
        to, former = queue_of_arn(arn, "RedrivePolicy"), await self._catalog.find(name)
        if former is None or former.redrive is None or former.redrive.arn != arn:
            asked.about(to, "post")  # what the queue gets is sent there later, for whoever receives
        target = await self._catalog.find(to)
        if target is None:
            raise invalid(policy, "RedrivePolicy", "Dead letter target does not exist.")
        if target.is_fifo != name.endswith(attributes.FIFO_SUFFIX):
            raise invalid(
                policy, "RedrivePolicy", "Dead-letter queue must be same type of queue as the source.."
            )
        if not target.admits(asked.addresses.arn(name)):
            raise invalid(
                policy,
                "RedrivePolicy",
                "Dead letter target does not allow this queue, by its RedriveAllowPolicy.",
            )

    async def sources(self, asked: Asked, given: shapes.ListDeadLetterSourceQueuesRequest) -> dict[str, Any]:
        """The queues whose dead letters go to a queue."""
        name = asked.queue(given.QueueUrl)
        await self._catalog.read(name)
        found = [one for one in await self._catalog.sources_of(name) if asked.may(one)]
        return {"queueUrls": [], **_page(asked, "queueUrls", found, given.MaxResults, given.NextToken)}

    # --- tags -------------------------------------------------------------------------------------

    async def tags(self, asked: Asked, given: shapes.ListQueueTagsRequest) -> dict[str, Any]:
        sheet = await self._catalog.read(asked.queue(given.QueueUrl))
        return {"Tags": dict(sheet.tags)} if sheet.tags else {}

    async def tag(self, asked: Asked, given: shapes.TagQueueRequest) -> None:
        """Add tags to a queue, or give them other values."""
        name, tags = asked.queue(given.QueueUrl), given.Tags or {}
        if not tags:
            raise missing("Tags")
        _check_tags(name, tags)

        def tagged(sheet: Sheet) -> Sheet:
            together = {**sheet.tags, **tags}
            _check_tags(name, together)
            return replace(sheet, tags=together)

        await self._catalog.change(name, tagged)

    async def untag(self, asked: Asked, given: shapes.UntagQueueRequest) -> None:
        """Remove tags."""
        name, keys = asked.queue(given.QueueUrl), set(given.TagKeys or ())
        if not keys:
            raise SqsError(INVALID_VALUE, "Tag keys must be between 1 and 128 characters in length.")

        def untagged(sheet: Sheet) -> Sheet:
            return replace(sheet, tags={key: one for key, one in sheet.tags.items() if key not in keys})

        await self._catalog.change(name, untagged)

    # --- permissions ------------------------------------------------------------------------------

    async def permit(self, asked: Asked, given: shapes.AddPermissionRequest) -> None:
        """Add a statement to the policy of a queue."""
        name, label = asked.queue(given.QueueUrl), given.Label or ""
        accounts, actions = given.AWSAccountIds or [], given.Actions or []
        _check_label(label)
        if not accounts:
            raise invalid("[]", "PrincipalId", "Unable to verify.")
        if not actions:
            raise missing("Actions")
        for action in actions:
            if action not in _ACTIONS:
                raise invalid(
                    f"SQS:{action}"[:200],
                    "ActionName",
                    "Only the queue owner is allowed to invoke this action."
                    if action in shapes.REQUESTS
                    else "Please refer to the appropriate WSDL for a list of valid actions.",
                )
        if len(actions) > _MAX_PERMITTED:
            raise SqsError(
                OVER_LIMIT, f"{len(actions)} Actions were found, maximum allowed is {_MAX_PERMITTED}."
            )
        arn = asked.addresses.arn(name)
        statement = {
            "Sid": label,
            "Effect": "Allow",
            "Principal": {"AWS": _one_or_all(f"arn:aws:iam::{account}:root" for account in accounts)},
            "Action": _one_or_all(f"SQS:{action}" for action in actions),
            "Resource": arn,
        }

        def added(statements: list[Any]) -> list[Any]:
            if any(_label(one) == label for one in statements):
                raise invalid(label, "Label", "Already exists.")
            if len(statements) >= _MAX_STATEMENTS:
                raise SqsError(
                    OVER_LIMIT,
                    f"{len(statements) + 1} Statements were found, maximum allowed is {_MAX_STATEMENTS}.",
                )
            return [*statements, statement]

        await self._change_policy(name, arn, added)

    async def forbid(self, asked: Asked, given: shapes.RemovePermissionRequest) -> None:
        """Remove a statement from the policy of a queue."""
        name, label = asked.queue(given.QueueUrl), given.Label or ""
        _check_label(label)

        def removed(statements: Sequence[Any]) -> list[Any]:
            left = [one for one in statements if _label(one) != label]
            if len(left) == len(statements):
                where = " on existing policy" if statements else ""
                raise invalid(label, "Label", f"can't find label{where}.")
            return left

        await self._change_policy(name, asked.addresses.arn(name), removed)

    async def _change_policy(self, name: str, arn: str, change: Callable[[list[Any]], list[Any]]) -> None:
        now_s = SYSTEM_CLOCK.wall_ms() // 1000

        def changed(sheet: Sheet) -> Sheet:
            text = sheet.attributes.get("Policy")
            policy = json.loads(text) if text else {}
            former = policy.get("Statement", [])
            statements = change(former if isinstance(former, list) else [former])
            if not statements:
                return sheet.changed({"Policy": ""}, now_s)
            head = {"Version": "2008-10-17", "Id": f"{arn}/SQSDefaultPolicy"}
            new = json.dumps({**head, **policy, "Statement": statements})
            return sheet.changed(attributes.checked({"Policy": new}, is_fifo=False), now_s)

        await self._catalog.change(name, changed)


def _label(statement: Any) -> Any:
    return statement.get("Sid") if isinstance(statement, dict) else None


def _check_label(label: str) -> None:
    if not attributes.is_name(label):
        raise invalid(
            label[:200],
            "Label",
            "Can only include alphanumeric characters, hyphens, or underscores. 1 to 80 in length.",
        )


def _one_or_all(texts: Iterable[str]) -> str | list[str]:
    found = [*texts]
    return found[0] if len(found) == 1 else found


def _check_tags(name: str, tags: Mapping[str, str]) -> None:
    if len(tags) > _MAX_TAGS:
        raise SqsError(INVALID_VALUE, f"Too many tags added for queue {name}.")
    for key, value in tags.items():
        is_key = 1 <= len(key) <= _MAX_KEY and "\0" not in key
        if not is_key or len(value) > _MAX_TAG or "\0" in value:
            what = (
                f"values must be between 0 and {_MAX_TAG}"
                if is_key
                else f"keys must be between 1 and {_MAX_KEY}"
            )
            raise SqsError(INVALID_VALUE, f"Tag {what} characters in length.")


def _page(
    asked: Asked, field: str, names: Sequence[str], most: int | None, token: str | None
) -> dict[str, Any]:
    """A page of queues' URLs; without MaxResults up to 1,000, and no token."""
    if most is not None and not 1 <= most <= _MAX_LISTED:
        raise SqsError(
            INVALID_VALUE,
            "Value for parameter MaxResults is invalid. Reason: MaxResults must be an integer between 1 and "
            f"{_MAX_LISTED}.",
        )
    if token:
        after = _parse_token(token)
        names = [name for name in names if name > after]
    shown = names[: most or _MAX_LISTED]
    found: dict[str, Any] = {field: [asked.addresses.url(name) for name in shown]} if shown else {}
    if most is not None and len(names) > len(shown):
        found["NextToken"] = base64.urlsafe_b64encode(shown[-1].encode()).decode()
    return found


def _parse_token(token: str) -> str:
    try:
        return base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode()
    except ValueError:
        raise SqsError(INVALID_VALUE, "Invalid or expired next token.") from None
