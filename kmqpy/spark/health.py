"""Makes reports on the state of a queue, for people: tables, and plots as PNG files.

print(health(KmqSpark(spark, "host:9092", queue="jobs")).save("report"))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import functions as F  # noqa: N812

from kmqpy.core.clock import SYSTEM_CLOCK, Clock
from kmqpy.errors import MissingExtra
from kmqpy.spark.queue import KmqSpark
from kmqpy.spark.state import State

_QUANTILES = (0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
_UNACKNOWLEDGED = [State.PENDING.value, State.IN_FLIGHT.value, State.OVERDUE.value]
_MAX_REASONS = 20
"""The most reasons of dead letters that a report has; less frequent ones are left out."""
_COLOURS = dict(
    zip(
        (state.value for state in State),
        ("#9ecae1", "#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363"),
        strict=True,
    )
)


@dataclass(frozen=True)
class Health:
    """The state of a queue at one moment: a pandas frame for each table, by name.

    depth      messages of each partition by state
    ages       unacknowledged messages by their age, 1, 2, 4, … seconds: state, at_most_s, messages
    attempts   state, attempts, messages
    latency    quantile, waiting_ms, processing_ms, total_ms
    reasons    the 20 most frequent reasons of dead letters: reason, messages
    """

    queue: str
    tables: Mapping[str, pd.DataFrame]

    def __str__(self) -> str:
        parts = [f"Queue {self.queue}"]
        for name, table in self.tables.items():
            parts.append(f"{name}\n{table.to_string(index=False) if len(table) else '(none)'}")
        return "\n\n".join(parts)

    def save(self, folder: str | Path) -> list[Path]:
        """Write report.txt and a PNG for each table that has rows; returns the files.

        Raises MissingExtra without matplotlib.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError:
            raise MissingExtra("spark", "Plots") from None
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "report.txt"
        text.write_text(f"{self}\n", encoding="utf-8")
        written = [text]
        for name, draw in _PLOTS.items():
            if len(self.tables[name]):
                figure = Figure(figsize=(8, 4.5), layout="constrained")
                draw(figure.subplots(), self.tables[name])
                figure.suptitle(f"{self.queue}: {name}")
                figure.savefig(folder / f"{name}.png", dpi=120)
                written.append(folder / f"{name}.png")
        return written


def health(kmq: KmqSpark, clock: Clock = SYSTEM_CLOCK) -> Health:
    """Read the state of the queue, as of now; raises what KmqSpark.messages raises."""
    messages = kmq.messages().persist()
    try:
        age = (F.lit(clock.wall_ms()) - F.unix_millis("timestamp")) / 1000
        # Upper bounds of ages, each twice the one before: 1 s, 2 s, 4 s, …
        bound = F.pow(F.lit(2.0), F.ceil(F.log2(F.greatest(age, F.lit(1.0)))))
        waiting = messages.filter(F.col("state").isin(_UNACKNOWLEDGED))
        ages = waiting.groupBy("state", bound.cast("bigint").alias("at_most_s"))
        letters = kmq.undelivered().groupBy("reason").agg(F.count("*").alias("messages"))
        frames = {
            "depth": kmq.depth(messages).orderBy("partition"),
            "ages": ages.agg(F.count("*").alias("messages")).orderBy("state", "at_most_s"),
            "attempts": kmq.attempts(messages),
            "latency": kmq.latency(_QUANTILES, messages),
            "reasons": letters.orderBy(F.desc("messages"), "reason").limit(_MAX_REASONS),
        }
        return Health(kmq.queue.name, {name: frame.toPandas() for name, frame in frames.items()})
    finally:
        messages.unpersist()


def _stacked(axes: Any, table: pd.DataFrame, by: str) -> None:
    """Draw a bar for each value of `by`, with a part for each state."""
    pivoted = table.pivot_table(index=by, columns="state", values="messages", aggfunc="sum", fill_value=0)
    _bars(axes, pivoted)
    axes.set_xlabel(by)


def _bars(axes: Any, table: pd.DataFrame) -> None:
    names = [str(name) for name in table.index]
    below = [0] * len(table)
    for state, colour in _COLOURS.items():
        if state in table.columns:
            axes.bar(names, table[state], bottom=below, color=colour, label=state)
            below = [low + high for low, high in zip(below, table[state], strict=True)]
    axes.set_ylabel("messages")
    axes.legend()


def _depth(axes: Any, table: pd.DataFrame) -> None:
    _bars(axes, table.set_index("partition"))
    axes.set_xlabel("partition")


def _latency(axes: Any, table: pd.DataFrame) -> None:
    names = [f"{100 * quantile:g} %" for quantile in table["quantile"]]
    for column in ("waiting_ms", "processing_ms", "total_ms"):
        times = table[column].astype("float64")  # all of them may be null
        axes.plot(names, times.clip(lower=1), marker="o", label=column)
    axes.set_yscale("log")
    axes.set_ylabel("ms")
    axes.legend()


def _reasons(axes: Any, table: pd.DataFrame) -> None:
    axes.barh([str(reason)[:60] for reason in table["reason"]], table["messages"], color="#636363")
    axes.invert_yaxis()
    axes.set_xlabel("dead letters")


_PLOTS = {
    "depth": _depth,
    "ages": lambda axes, table: _stacked(axes, table, "at_most_s"),
    "attempts": lambda axes, table: _stacked(axes, table, "attempts"),
    "latency": _latency,
    "reasons": _reasons,
}
