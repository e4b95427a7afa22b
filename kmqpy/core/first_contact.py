"""Limits how long a command waits for the first answer of Kafka and of ZooKeeper.

Clients and trackers wait for their whole timeout, because the service may be just starting. A command that
somebody has typed gives up sooner, because the address may be wrong: it runs in first_contact_within().
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class Service(StrEnum):
    """The services for whose first answer there can be a time limit."""

    KAFKA = "Kafka"
    ZOOKEEPER = "ZooKeeper"


@dataclass(slots=True)
class _FirstContact:
    """The time limit of a first_contact_within() block, and the services that answered during the block."""

    within_s: float
    answered: set[Service] = field(default_factory=set)


_current: ContextVar[_FirstContact | None] = ContextVar("kmq-first-contact", default=None)


@contextmanager
def first_contact_within(seconds: float) -> Iterator[None]:
    """Let this thread wait at most `seconds` for the first answer of each service, in the `with` block."""
    token = _current.set(_FirstContact(seconds))
    try:
        yield
    finally:
        _current.reset(token)


def is_awaited(service: Service) -> bool:
    """Return True in a first_contact_within() block where `service` has not answered yet."""
    contact = _current.get()
    return contact is not None and service not in contact.answered


def patience_s(service: Service, timeout_s: float) -> float:
    """Seconds to wait for an answer: `timeout_s`, or less while is_awaited(service) is true."""
    contact = _current.get()
    if contact is None or service in contact.answered:
        return timeout_s
    return min(timeout_s, contact.within_s)


def note_answer(service: Service) -> None:
    """Note that `service` has answered: patience_s() returns its whole timeout for the rest of the block."""
    contact = _current.get()
    if contact is not None:
        contact.answered.add(service)
