"""Runs the turns of cases, and makes rows of their figures. Its I/O: progress lines, and results.json."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLAIN = "plain consume"
JVM = "JVM kmq core_2.12:0.2"
SHARE = "share group"
SHARE_IMPLICIT = "share group, implicit acks"
SHARE_PERF = "share group, implicit acks, Kafka's own tool"
KMQPY = {"jvm": "kmqpy, JVM markers", "range": "kmqpy, range markers"}
RETRY_LANE = "kmqpy, retry lane"

Figures = Mapping[str, float]
"""The figures of one turn of one peer, by metric."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One work under one condition, done by several peers in turns.

    metrics  the figures that tables show, each with its unit; other figures of a turn are in the JSON only
    """

    work: str
    name: str
    metrics: Mapping[str, str]
    peers: Mapping[str, Callable[[], Figures]]
    repeats: int


@dataclass(kw_only=True)
class Row:
    """One peer's figures of one metric of a case; `values` has one for each turn, in order."""

    work: str
    case: str
    metric: str
    unit: str
    peer: str
    values: list[float] = field(default_factory=list)
    extra: dict[str, list[float]] = field(default_factory=dict)
    problem: str = ""

    @property
    def median(self) -> float | None:
        """The median of the turns that succeeded; None if none did."""
        return statistics.median(self.values) if self.values else None


def run_case(case: Case) -> list[Row]:
    """Run all turns of a case; a peer that fails has the error in its rows, and no more turns."""
    rows = {
        (peer, metric): Row(
            work=case.work,
            case=case.name,
            metric=metric,
            unit=unit,
            peer=peer,
        )
        for peer in case.peers
        for metric, unit in case.metrics.items()
    }
    failed: set[str] = set()
    for turn in range(1, case.repeats + 1):
        for peer, measure in case.peers.items():
            if peer in failed:
                continue
            own = [rows[peer, metric] for metric in case.metrics]
            began = time.monotonic()
            try:
                figures = measure()
            except Exception as error:  # one peer must not end the run
                failed.add(peer)
                for row in own:
                    row.problem = _one_line(error)
                outcome = f"failed: {_one_line(error)}"
            else:
                for row in own:
                    row.values.append(figures[row.metric])
                own[0].extra = _extended(own[0].extra, figures, but=case.metrics)
                outcome = ", ".join(
                    f"{shown(figures[metric])} {unit}" for metric, unit in case.metrics.items()
                )
            progress(
                f"{case.work} | {case.name} | {peer} {turn}/{case.repeats}: {outcome} "
                f"({time.monotonic() - began:.0f} s)"
            )
    return list(rows.values())


def progress(text: str) -> None:
    """Write a line about the progress to stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def ratio(row: Row, rows: Iterable[Row], peer: str) -> float | None:
    """This row's median divided by that of `peer` in the same case and metric; None if one is missing."""
    for other in rows:
        if (other.work, other.case, other.metric, other.peer) == (row.work, row.case, row.metric, peer):
            if row.median is None or not other.median:
                return None
            return row.median / other.median
    return None


def to_json(meta: Mapping[str, Any], rows: Sequence[Row]) -> dict[str, Any]:
    """Return the content of results.json: figures of five digits, without what is empty."""
    return {"meta": dict(meta), "rows": [_filled(row) for row in rows]}


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write results.json with one row a line, so that a diff shows which figures changed."""
    rows = ",\n ".join(json.dumps(row) for row in content["rows"])
    file.write_text(f'{{"meta": {json.dumps(content["meta"])},\n"rows": [\n {rows}\n]}}\n')


def from_json(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[Row]]:
    """The reverse of to_json."""
    return dict(data["meta"]), [Row(**row) for row in data["rows"]]


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


def shown(value: float) -> str:
    """A figure as text: without decimals from 100 on, with one from 10 on, else with two."""
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _filled(row: Row) -> dict[str, Any]:
    def short(values: list[float]) -> list[float]:
        return [float(f"{value:.5g}") for value in values]

    extra = {name: short(values) for name, values in row.extra.items()}
    fields = {**asdict(row), "values": short(row.values), "extra": extra}
    return {name: value for name, value in fields.items() if value}


def _extended(extra: dict[str, list[float]], figures: Figures, but: Iterable[str]) -> dict[str, list[float]]:
    return {key: [*extra.get(key, []), value] for key, value in figures.items() if key not in set(but)}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else text[:157] + "..."
