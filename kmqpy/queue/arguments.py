"""Checks arguments of the methods that every storage has; raises ConfigError that names the argument."""

from __future__ import annotations

from collections.abc import Iterable

from kmqpy.core.durations import Duration, duration_ms
from kmqpy.core.int64 import INT64_MAX
from kmqpy.core.settings import check_limit
from kmqpy.errors import ConfigError, shown


def check_queue(queue: object) -> None:
    """Raise ConfigError unless `queue` is a Queue (a url is none)."""
    if not hasattr(queue, "at_most_once"):
        raise ConfigError(f"queue: {type(queue).__name__} is not a Queue; kmqpy.queue_for(url) opens one")


def check_flag(value: object, name: str) -> None:
    """Raise ConfigError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: {shown(value)} is neither True nor False")


def check_ids(ids: object) -> None:
    """Raise ConfigError unless `ids` is iterable and no text; the ids themselves are not checked."""
    if isinstance(ids, str | bytes | bytearray) or not isinstance(ids, Iterable):
        raise ConfigError(f"ids: {shown(ids)} is not a list of ids")


def check_redrive(ids: object, limit: int | None) -> None:
    """Check the arguments of DeadLetters.redrive()."""
    if ids is not None and limit is not None:
        raise ConfigError("redrive: give ids or a limit, not both")
    if ids is not None:
        check_ids(ids)
    if limit is not None:
        check_limit(limit, "limit")


def clean_reason(reason: object, most: int | None = None) -> str | None:
    """The first `most` characters of a reason; NUL and lone surrogates, which not all can keep, replaced."""
    if reason is None:
        return None
    if not isinstance(reason, str):
        raise ConfigError(f"reason: an object of type {type(reason).__name__} is not text")
    return reason[:most].encode(errors="replace").decode().replace("\0", "\N{REPLACEMENT CHARACTER}")


def check_age(older_than: Duration | None, queued_before_ms: object) -> int | None:
    """Check the arguments of Queue.orphans(); return `older_than` in ms, or None."""
    if older_than is not None and queued_before_ms is not None:
        raise ConfigError("orphans: give older_than or queued_before_ms, not both")
    if queued_before_ms is not None and (
        isinstance(queued_before_ms, bool)
        or not isinstance(queued_before_ms, int)
        or not 0 <= queued_before_ms <= INT64_MAX
    ):
        raise ConfigError(
            f"queued_before_ms: {shown(queued_before_ms)} is not a time: use whole ms since 1970"
        )
    return None if older_than is None else duration_ms(older_than, "older_than")
