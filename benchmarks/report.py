"""Tables and the plot of what was measured."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.results import JVM, PLAIN, Row, from_json, ratio, shown

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
_HEAD = ("peer", "unit", "min", "median", "max", "÷ consume", "÷ JVM kmq")


def table(rows: Sequence[Row]) -> str:
    """All rows for a terminal, a block for each case.

    Where no peer is a plain consumer or the JVM library, the first is compared with each other one.
    """
    cells = [_cells(row, rows) for row in rows]
    widths = [max(len(line[i]) for line in [*cells, _HEAD]) for i in range(len(_HEAD))]
    lines: list[str] = []
    for (work, case), group in groupby(rows, key=lambda row: (row.work, row.case)):
        block = list(group)
        by_kafka = any(row.peer in (PLAIN, JVM) for row in block)
        first = block[0].peer
        lines += ["", f"{work}: {case}", _line(_HEAD if by_kafka else (*_HEAD[:5], f"{first} ÷ it"), widths)]
        for row in block:
            cells = _cells(row, rows)
            if not by_kafka:
                beside = ratio(row, rows, first)
                cells = (*cells[:5], shown(1 / beside) if beside and row.peer != first else "-")
            lines.append(_line(cells, widths))
            if row.problem:
                lines.append(f"    {row.problem}")
    return "\n".join(lines).lstrip("\n")


def markdown(data: Mapping[str, Any], only: str = "") -> str:
    """A results.json as a table; `only`: of one case, "work: case"."""
    meta, rows = from_json(data)
    rows = [row for row in rows if only in ("", f"{row.work}: {row.case}")]
    turns = max((len(row.values) for row in rows), default=0)
    lines = [
        (
            f"{meta['when']}, {meta['cores']} cores for clients, trackers and broker together, "
            f"{meta['system']}, Python {meta['python']}, "
            f"confluent-kafka {meta['confluent-kafka']}, Kafka {meta['kafka']}. "
            f"Median (minimum to maximum) of up to {turns} turns; ratios are of medians."
        ),
        "",
        "| work | who | measured | ÷ plain consume | ÷ JVM kmq |",
        "|---|---|---:|---:|---:|",
    ]
    before = None
    for row in rows:
        *_, of_plain, of_jvm = _cells(row, rows)
        title = f"{row.work}: {row.case}"
        lines.append(
            f"| {'' if title == before else title} | {row.peer} | {_measured(row)} | {of_plain} | {of_jvm} |"
        )
        before = title
    return "\n".join(lines)


def between_markers(text: str, new: str) -> str:
    """`text` with what stands between the two comments replaced; raises ValueError without them."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page needs the lines {BEGIN} and {END}")
    return f"{head}{BEGIN}\n{new}\n{END}{tail}"


def plot(rows: Sequence[Row], file: Path) -> None:
    """A bar chart per case and metric: medians, with lines from minimum to maximum."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    key = {row.peer: None for row in rows}
    colours = dict(zip(key, plt.get_cmap("tab10").colors * 3, strict=False))  # type: ignore[attr-defined]
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.values:
            found.setdefault((row.work, row.case, row.unit), []).append(row)
    charts = list(found.items())
    if not charts:
        return
    heights = [0.4 + 0.28 * len(group) for _, group in charts]
    figure, axes = plt.subplots(
        len(charts), 1, figsize=(9, sum(heights) + 0.5 * len(charts)), height_ratios=heights, squeeze=False
    )
    for axis, ((work, case, unit), group) in zip(axes[:, 0], charts, strict=True):
        medians = [row.median or 0.0 for row in group]
        spread = [
            [median - min(row.values) for row, median in zip(group, medians, strict=True)],
            [max(row.values) - median for row, median in zip(group, medians, strict=True)],
        ]
        names = [row.peer for row in group]
        axis.barh(names, medians, xerr=spread, color=[colours[name] for name in names], ecolor="#444")
        axis.invert_yaxis()
        axis.set_title(f"{work}: {case} ({unit})", fontsize=8, loc="left")
        axis.tick_params(labelsize=7)
        for place, median in enumerate(medians):
            axis.text(median, place, f" {shown(median)}", va="bottom", fontsize=6)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _cells(row: Row, rows: Sequence[Row]) -> tuple[str, ...]:
    if not row.values:
        return (row.peer, row.unit, "-", "-", "-", "-", "-")
    figures = (min(row.values), row.median or 0.0, max(row.values))
    ratios = (ratio(row, rows, PLAIN), ratio(row, rows, JVM))
    return (
        row.peer,
        row.unit,
        *(shown(figure) for figure in figures),
        *("-" if value is None else shown(value) for value in ratios),
    )


def _measured(row: Row) -> str:
    if not row.values:
        return f"no figure: {row.problem}"
    text = f"{shown(row.median or 0.0)} {row.unit}"
    if len(row.values) > 1:
        text += f" ({shown(min(row.values))} to {shown(max(row.values))})"
    return text


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=False)]
    return "  ".join([*left, *right]).rstrip()
