"""Batches of SQS: what makes the whole call fail, and what only an entry of it. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from kmqpy.gateway.dialects.sqs.errors import (
    BATCH_IDS_NOT_DISTINCT,
    EMPTY_BATCH,
    INVALID_BATCH_ID,
    TOO_MANY_ENTRIES,
    SqsError,
    missing,
)

_MOST = 10
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")


class Entry(Protocol):
    """An entry of a batch."""

    @property
    def Id(self) -> str | None:  # noqa: N802 - as SQS writes it
        """Tells the entries of a batch apart."""


E = TypeVar("E", bound=Entry)


def checked(kind: str, entries: Sequence[E]) -> dict[str, E]:
    """The entries of a batch by their ids; raises SqsError for what makes the whole call fail."""
    if not entries:
        raise SqsError(EMPTY_BATCH, f"There should be at least one {kind} in the request.")
    if len(entries) > _MOST:
        raise SqsError(
            TOO_MANY_ENTRIES,
            f"Maximum number of entries per request are {_MOST}. You have sent {len(entries)}.",
        )
    found: dict[str, E] = {}
    for number, entry in enumerate(entries, 1):
        if entry.Id is None:
            raise missing(f"{kind}.{number}.Id")
        id_ = entry.Id
        if not _ID.fullmatch(id_):
            raise SqsError(
                INVALID_BATCH_ID,
                "A batch entry id can only contain alphanumeric characters, hyphens and underscores. It can "
                "be at most 80 letters long.",
            )
        if id_ in found:
            raise SqsError(BATCH_IDS_NOT_DISTINCT, f"Id {id_} repeated.")
        found[id_] = entry
    return found


def outcome(results: dict[str, dict[str, Any] | SqsError]) -> dict[str, Any]:
    """The answer to a batch: a result or error for each entry. Lists without entries are left out."""
    good = [{"Id": id_, **one} for id_, one in results.items() if not isinstance(one, SqsError)]
    bad = [
        {"Id": id_, "SenderFault": one.fault.status < 500, "Code": one.fault.code, "Message": str(one)}
        for id_, one in results.items()
        if isinstance(one, SqsError)
    ]
    return {**({"Successful": good} if good else {}), **({"Failed": bad} if bad else {})}
