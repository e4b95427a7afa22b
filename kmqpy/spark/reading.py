"""The filters of KmqSpark.read: by state, and by the time when messages were appended."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.errors import ConfigError
from kmqpy.spark.state import State


def checked_states(state: State | str | Iterable[State | str] | None) -> list[str] | None:
    """The values of the given states, None if none is given; raises ConfigError for an unknown state."""
    if state is None:
        return None
    given = [state] if isinstance(state, str) else list(state)
    for one in given:
        if one not in list(State):
            raise ConfigError(f"state: {one!r} is none of {', '.join(State)}")
    return [State(one).value for one in given]


def within(messages: DataFrame, since: datetime | None, until: datetime | None) -> DataFrame:
    """Return the messages that were appended from `since` on and before `until`; raises ConfigError."""
    for name, moment in (("since", since), ("until", until)):
        if moment is None:
            continue
        if not isinstance(moment, datetime) or moment.tzinfo is None:
            raise ConfigError(f"{name}: {moment!r} is no datetime with a time zone")
        at = F.timestamp_micros(F.lit(round(moment.astimezone(UTC).timestamp() * 1_000_000)))
        messages = messages.where(F.col("timestamp") >= at if name == "since" else F.col("timestamp") < at)
    return messages
