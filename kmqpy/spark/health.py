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
_COLOURS = dict(
    zip(map(str, State), ("#9ecae1", "#3182bd", "#e6550d", "#31a354", "#756bb1", "#636363"), strict=True)
)


@dataclass(frozen=True)
class Health:
    """The state of a queue at one moment.

    Attributes:
        queue: Its name.
        tables: A pandas frame for each table, by name

            - depth: messages of each partition by state
            - ages: unacknowledged messages by their age, 1, 2, 4, … seconds: state, at_most_s, messages
            - attempts: state, attempts, messages
            - latency: quantile, waiting_ms, processing_ms, total_ms
            - reasons: the 20 most frequent reasons of dead letters: reason, messages
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

        Args:
            folder: Made if it is missing.

        Raises:
            MissingExtra: matplotlib is not installed.
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
        for name, table in self.tables.items():
            if len(table):
                figure = Figure(figsize=(8, 4.5), layout="constrained")
                _draw(figure.subplots(), name, table)
                figure.suptitle(f"{self.queue}: {name}")
                figure.savefig(folder / f"{name}.png", dpi=120)
                written.append(folder / f"{name}.png")
        return written


def health(kmq: KmqSpark, clock: Clock = SYSTEM_CLOCK) -> Health:
    """Read the state of the queue, as of now; raises what KmqSpark.messages raises.

    Args:
        kmq: The queue.
        clock: For tests.
    """
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


def _draw(axes: Any, name: str, table: pd.DataFrame) -> None:
    if name == "latency":
        times = table.set_index(table["quantile"].map("{:.0%}".format))
        times = times[["waiting_ms", "processing_ms", "total_ms"]].astype("float64")  # all may be null
        ticks = range(len(times))
        times.clip(lower=1).plot.line(ax=axes, marker="o", logy=True, ylabel="ms", xticks=ticks)
    elif name == "reasons":
        counts = table.set_index(table["reason"].astype(str).str[:60])["messages"]
        counts.plot.barh(ax=axes, color="#636363").set(xlabel="dead letters", ylabel="")
        axes.invert_yaxis()
    else:  # a bar for each partition, age or count, with a part for each state
        if name == "depth":
            bars = table.set_index("partition")
        else:
            by = {"ages": "at_most_s", "attempts": "attempts"}[name]
            bars = table.pivot_table("messages", by, "state", aggfunc="sum", fill_value=0)
        bars = bars[[state for state in _COLOURS if state in bars.columns]]
        bars.plot.bar(ax=axes, stacked=True, color=_COLOURS, rot=0, ylabel="messages")
