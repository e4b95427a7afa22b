"""Limits how long a service may take to answer for the first time.

Clients and trackers wait, since the service may be just starting. A command that somebody has typed gives up
soon, since its address may be wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum


class Service(StrEnum):
    """The services whose first answer may be waited for."""

    KAFKA = "Kafka"
    ZOOKEEPER = "ZooKeeper"


@dataclass(slots=True)
class _FirstContact:
    within_s: float
    answered: set[Service] = field(default_factory=set)


_current: ContextVar[_FirstContact | None] = ContextVar("kmq-first-contact", default=None)


@contextmanager
def first_contact_within(seconds: float) -> Iterator[None]:
    """In this thread, wait no longer than that for the first answer of each service."""
    token = _current.set(_FirstContact(seconds))
    try:
        yield
    finally:
        _current.reset(token)


def is_awaited(service: Service) -> bool:
    """Return True if the service's first answer is being waited for, with little patience."""
    contact = _current.get()
    return contact is not None and service not in contact.answered


def patience_s(service: Service, timeout_s: float) -> float:
    """Return how long to wait for an answer: `timeout_s`, or less for the first one."""
    contact = _current.get()
    if contact is None or service in contact.answered:
        return timeout_s
    return min(timeout_s, contact.within_s)


def has_answered(service: Service) -> None:
    """Note that the service has answered: later calls wait for as long as they ask to."""
    contact = _current.get()
    if contact is not None:
        contact.answered.add(service)
