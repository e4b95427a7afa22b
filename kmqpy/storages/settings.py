"""The settings of a queue on a storage other than Kafka, and the rule for its name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kmqpy.core.settings import build, check_count, check_limit, json_object
from kmqpy.errors import ConfigError, NotSupported, shown
from kmqpy.queue import Capabilities
from kmqpy.queue_policy import POLICY, QueuePolicy

MAX_NOTES = 100_000
NOISY_FROM, NOISY_PART = 30, 10
"""The thresholds of SQS's fair queues."""
_CHOICES = {
    "requeue_to": ("back", "front"),
    "order": ("fifo", "any", "group"),
    "redelivery": ("automatic", "manual"),
    "delivery": ("at-least-once", "at-most-once"),
    "on_dead_letter": ("continue", "hold"),
    "dedup_until": ("window", "acknowledged"),
    "dedup_by": ("id", "body"),
    "fair_by": ("in_flight", "noise"),
}

_SHARES = ("fair", "fair_by", "max_in_flight_per_group")
ALTERABLE = (*POLICY, "dedup_window_ms", "notes", *_SHARES)
"""The settings that can be changed while the queue is used."""


@dataclass(frozen=True, kw_only=True)
class StoredQueueSettings(QueuePolicy):
    """How a storage treats the messages of a queue.

    name                any text of 1 to 200 printable characters, without spaces around it
    max_lease_ms        longest lease, extension or delay of nack()
    requeue_to          where a message goes that was given back or whose lease ended. `back`: behind all
                        others. `front`: its own place, before messages that were sent after it
    order               `fifo`: the order of sending. `any`: any order, where that makes the storage faster.
                        `group`: of the messages of one group one at a time (or several in one receive()), in
                        the order of sending, whatever fails: a redelivered message keeps its place, and those
                        behind it wait
    redelivery          `automatic`: the storage redelivers a message when its lease ends. `manual`: a taken
                        message stays in flight until the application finishes it or gives it back
    delivery            `at-least-once`: the storage keeps a taken message until it is acknowledged.
                        `at-most-once`: it deletes a message when it is taken
    collapse            True: of equal messages that nobody has taken yet, a take hands out the first one, and
                        deletes the others. kmqpy/queue/canonical.py says which messages are equal
    notes               text that a program keeps with the queue, at most MAX_NOTES characters. The gateway
                        keeps there what SQS's clients set
    on_dead_letter      with order `group`, when a message of a group becomes a dead letter. `continue`: those
                        behind it come next. `hold`: they wait until it was redriven, which puts it back in
                        its place, and acknowledged, or until the dead letters were purged
    fair                True: a take prefers groups of which least is in flight, then the oldest message. The
                        order of sending holds within a group only
    fair_by             what fair=True prefers. `in_flight`: see there. `noise`: groups that are not noisy,
                        the oldest message first, then the noisy one of which least is in flight. Noisy is a
                        group of which NOISY_FROM messages or more are in flight, and more than one in
                        NOISY_PART of all; that is counted when one of its own is taken or ends
    max_in_flight_per_group   None, or of a group at most so many messages are in flight
    dedup_window_ms     so long after a message was sent with a dedup id, others with this id are not stored
    dedup_until         `window`: see dedup_window_ms. `acknowledged`: they are not stored for as long as the
                        first one is in the queue, and no dead letter
    dedup_by            `id`: only messages that were sent with a dedup id have one. `body`: to others the
                        digest of their body is one

    QueuePolicy describes the other settings.
    """

    requeue_to: str = "back"
    order: str = "fifo"
    redelivery: str = "automatic"
    delivery: str = "at-least-once"
    collapse: bool = False
    notes: str = ""
    on_dead_letter: str = "continue"
    fair: bool = False
    fair_by: str = "in_flight"
    max_in_flight_per_group: int | None = None
    dedup_window_ms: int = 300_000
    dedup_until: str = "window"
    dedup_by: str = "id"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_queue_name(self.name)
        for key, choices in _CHOICES.items():
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(f"{key}: {shown(value)} is none of {', '.join(map(repr, choices))}")
        for key in ("collapse", "fair"):
            if not isinstance(getattr(self, key), bool):
                raise ConfigError(f"{key}: {shown(getattr(self, key))} is neither true nor false")
        if not isinstance(self.notes, str) or len(self.notes) > MAX_NOTES or "\0" in self.notes:
            raise ConfigError(f"notes: expected text of at most {MAX_NOTES} characters, without NUL")
        if self.in_groups and (self.at_most_once or self.collapse):
            raise ConfigError("order: 'group' goes neither with delivery='at-most-once' nor with collapse")
        if self.holds and not self.in_groups:
            raise ConfigError("on_dead_letter: 'hold' needs order='group'")
        if self.fair_by == "noise" and not self.fair:
            raise ConfigError("fair_by: 'noise' needs fair=True")
        if self.max_in_flight_per_group is not None:
            check_limit(self.max_in_flight_per_group, "max_in_flight_per_group")
        if self.shares and (self.at_most_once or self.collapse or self.in_groups):
            key = "fair" if self.fair else "max_in_flight_per_group"
            raise ConfigError(
                f"{key}: goes neither with order='group', where one of a group is in flight at a time, nor "
                "with delivery='at-most-once' or collapse"
            )
        check_count(self, "dedup_window_ms")

    @property
    def to_front(self) -> bool:
        """True when a redelivered message keeps its place."""
        return self.requeue_to == "front" or self.in_groups

    @property
    def is_manual(self) -> bool:
        """True when messages are not redelivered at the end of their leases."""
        return self.redelivery == "manual"

    @property
    def at_most_once(self) -> bool:
        """True when the storage forgets a message when it is taken."""
        return self.delivery == "at-most-once"

    @property
    def in_groups(self) -> bool:
        """True when the messages of a group are handed out in order, one at a time."""
        return self.order == "group"

    @property
    def shares(self) -> bool:
        """True when groups share the takers, by fairness or by caps."""
        return self.fair or self.max_in_flight_per_group is not None

    @property
    def by_noise(self) -> bool:
        """True when a group counts only if it is noisy."""
        return self.fair and self.fair_by == "noise"

    @property
    def keeps_groups(self) -> bool:
        """True when a take looks at the groups of messages."""
        return self.in_groups or self.shares

    @property
    def holds(self) -> bool:
        """True when a dead letter holds the messages of its group."""
        return self.on_dead_letter == "hold"

    @property
    def until_acknowledged(self) -> bool:
        """True when a dedup id is free again once its message is finished."""
        return self.dedup_until == "acknowledged"

    def check_supported(self, capabilities: Capabilities) -> None:
        """Raise NotSupported if a storage with these capabilities can't do one of the settings."""
        wanted: list[tuple[bool, bool, str]] = [
            (self.in_groups, capabilities.groups, "order"),
            (self.requeue_to == "front", capabilities.requeue_to_front, "requeue_to"),
            (self.is_manual, capabilities.manual_redelivery, "redelivery"),
            (self.at_most_once, capabilities.at_most_once, "delivery"),
            (self.collapse, capabilities.collapse, "collapse"),
            (self.fair, capabilities.fair, "fair"),
            (self.max_in_flight_per_group is not None, capabilities.fair, "max_in_flight_per_group"),
            (bool(self.retry_delays), capabilities.retry_delays, "retry_delays"),
            (self.until_acknowledged, capabilities.dedup, "dedup_until"),
            (self.dedup_by == "body", capabilities.dedup, "dedup_by"),
        ]
        for is_wanted, can, key in wanted:
            if is_wanted and not can:
                raise NotSupported(f"{key}: this storage can't do {getattr(self, key)!r}")

    def to_json(self) -> str:
        """The settings as JSON, the form in which a storage keeps them."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str, name: str) -> StoredQueueSettings:
        """The reverse of to_json(), for the queue `name`, whatever name the text holds.

        Leaves out settings that only a newer kmqpy knows. Raises ConfigError for a text that is not JSON, and
        for a wrong value.
        """
        values = json_object(text, "queue settings")
        known = {key: value for key, value in values.items() if key in cls.__dataclass_fields__}
        return build(cls, {**known, "name": name})

    @classmethod
    def of(cls, name: str, values: Mapping[str, Any]) -> StoredQueueSettings:
        """The settings of queue `name`; text is converted. Raises ConfigError for a wrong or unknown one."""
        return build(cls, values, {"name": check_queue_name(name)})


SETTING_NAMES = tuple(field.name for field in dataclasses.fields(StoredQueueSettings) if field.name != "name")
"""The names of all settings, which are also names of settings in a url."""


def check_queue_name(name: object) -> str:
    """`name`; raises ConfigError unless it is text of 1 to 200 printable characters, with no space around."""
    if not isinstance(name, str) or not 1 <= len(name) <= 200 or not name.isprintable():
        raise ConfigError(f"queue: invalid name {shown(name)}: use 1 to 200 printable characters")
    if name != name.strip():
        raise ConfigError(f"queue: {name!r} begins or ends with a space")
    return name


def noise(taken: int, in_flight: int) -> int:
    """How noisy a group is of which so many are taken, while so many of all are in flight; 0: not at all."""
    is_noisy = taken >= NOISY_FROM and taken * NOISY_PART > in_flight
    return taken - NOISY_FROM + 1 if is_noisy else 0
