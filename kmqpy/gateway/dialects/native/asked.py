"""A request whose call, values and sender are known."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from kmqpy.gateway.http import Call
from kmqpy.gateway.keys.keyring import Principal
from kmqpy.gateway.service.hub import QueueName
from kmqpy.queue import shapes


@dataclass(slots=True)
class Asked:
    """What calls know of a request.

    queue   the name as it was written; empty if the call is about none
    query   the parameters
    body    the body: bytes, or as the call's type
    spend   counts bytes of bodies for the sender's limit
    given   parameters and fields of the body, by name
    """

    call: Call
    queue: str
    sender: Principal
    query: Any
    spend: Callable[[int], None]
    given: Mapping[str, Any]
    body: Any = None

    @property
    def name(self) -> QueueName:
        """The queue, for the hub."""
        return QueueName(self.queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A call.

    path    below /v1; {queue} stands for the name of a queue
    name    in logs, metrics and the OpenAPI document
    do      does it; its docstring is the summary
    action  the permission that it needs on the queue; None: any valid key
    query   the type of the parameters
    body    the type of the body; bytes: any; None: there is none
    answer  the type of the answer; None: there is none (204)
    """

    method: str
    path: str
    name: str
    do: Callable[[Asked], Awaitable[Any]]
    action: str | None
    query: type[msgspec.Struct] = shapes.NoQuery
    body: type[Any] | None = None
    answer: type[msgspec.Struct] | None = None
