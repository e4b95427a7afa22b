"""Makes tables and a plot of the figures that were measured."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.results import JVM, PLAIN, Row, from_json, ratio, shown

BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
_HEAD = ("peer", "unit", "min", "median", "max", "÷ consume", "÷ JVM kmq")


def table(rows: Sequence[Row]) -> str:
    """All rows for a terminal, a block for each case.

    The last columns compare each peer with the plain consumer and with the JVM library. In a case without
    these two, the first peer is compared with each other peer.
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
                cells = (*cells[:5], _shown_ratio(_first_by(row, block)))
            lines.append(_line(cells, widths))
            if row.problem:
                lines.append(f"    {row.problem}")
    return "\n".join(lines).lstrip("\n")


def markdown(data: Mapping[str, Any], above: Mapping[str, Any] | None = None) -> str:
    """A results.json as tables in Markdown, one for cases of one work with the same metrics and peers.

    What all cases of a table share stands in its head. `above` is the results.json of the text above.
    """
    meta, rows = from_json(data)
    lines = [conditions(meta, rows, above["meta"] if above else None)]
    units: dict[tuple[str, str], dict[str, None]] = {}
    for row in rows:
        units.setdefault((row.work, row.case), {})[row.unit] = None
    for _, group in groupby(rows, key=lambda row: (row.work, *units[row.work, row.case])):
        for alike in _with_shared_peers(list(group)):
            lines += ["", *_markdown_table(alike)]
    return "\n".join(lines)


def conditions(meta: Mapping[str, Any], rows: Sequence[Row], above: Mapping[str, Any] | None = None) -> str:
    """A sentence that says when, on what machine and with what versions the figures were measured."""
    turns = "One turn." if _turns(rows) == 1 else f"Medians of up to {_turns(rows)} turns."
    is_same = above and _machine(above) == _machine(meta)
    return f"{meta['when']}, {'as above' if is_same else _machine(meta)}. {turns}"


def _machine(meta: Mapping[str, Any]) -> str:
    return (
        f"{meta['cores']} cores for all, {meta['system']}, Python {meta['python']}, "
        f"confluent-kafka {meta['confluent-kafka']}, Kafka {meta['kafka']}"
    )


def _turns(rows: Sequence[Row]) -> int:
    return max((len(row.values) for row in rows), default=0)


def summary(
    data: Mapping[str, Any],
    peers: Mapping[str, Sequence[str]],
    columns: Mapping[str, tuple[str, Callable[[str], str], str]],
) -> str:
    """Some figures of a results.json as a short table in Markdown, for the README.

    Args:
        data: The content of the results.json.
        peers: The peers that have a line, by their storage.
        columns: By its title, the work of a column, its case on a storage, and the metric.
    """
    meta, rows = from_json(data)
    found = {(row.work, row.case, row.metric, row.peer): row for row in rows}
    lines, used = ["| |", "|---|"], []
    for title in columns:
        lines[0] += f" {title} |"
        lines[1] += "---:|"
    for storage, names in peers.items():
        for name in names:
            own = [found.get((work, case(storage), metric, name)) for work, case, metric in columns.values()]
            cells = ["-" if row is None or row.median is None else shown(row.median) for row in own]
            lines.append(f"| {storage}: {name} | {' | '.join(cells)} |")
            used += [row for row in own if row is not None]
    turns, sizes = _turns(used), ", small sizes" * meta["quick"]
    how = "one run" if turns == 1 else f"medians of {turns}"
    lines += ["", f"{meta['when']}, {meta['system']}, {meta['cores']} cores{sizes}; {how}."]
    return "\n".join(lines)


def newest(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same results by title, without the works that another one has, too, and measured later."""
    dates: dict[str, str] = {}
    for data in results.values():
        for row in data["rows"]:
            dates[row["work"]] = max(dates.get(row["work"], ""), data["meta"]["when"])
    return {
        title: {**data, "rows": [row for row in data["rows"] if dates[row["work"]] == data["meta"]["when"]]}
        for title, data in results.items()
    }


def without(data: Mapping[str, Any], left_out: re.Pattern[str]) -> dict[str, Any]:
    """The same results without the rows in whose "work: case: peer" the pattern is found."""
    rows = [
        row for row in data["rows"] if not left_out.search(f"{row['work']}: {row['case']}: {row['peer']}")
    ]
    return {**data, "rows": rows}


def of_case(rows: Sequence[Row], work: str, case: str) -> list[Row]:
    """The rows of one case."""
    return [row for row in rows if (row.work, row.case) == (work, case)]


def _with_shared_peers(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of one work, in parts: cases that follow each other and share most of their peers."""
    found: list[Row] = []
    for _, group in groupby(rows, key=lambda row: row.case):
        block = list(group)
        before, peers = {row.peer for row in found}, {row.peer for row in block}
        if 2 * len(before & peers) <= min(len(before), len(peers)) and found:
            yield found
            found = []
        found += block
    yield found


def _markdown_table(rows: Sequence[Row]) -> list[str]:
    """One work: a line for each case, a column for each peer; in a cell the median of each metric."""
    peers = dict.fromkeys(row.peer for row in rows)
    units = dict.fromkeys(row.unit for row in rows)
    cases = [case.split(", ") for case in dict.fromkeys(row.case for row in rows)]
    shared = [part for part in cases[0] if len(cases) > 1 and all(part in case for case in cases)]
    what = ", ".join([rows[0].work, *shared])
    lines = [f"| {what}: {', below it '.join(units)} | {' | '.join(peers)} |"]
    lines.append("|---|" + "---:|" * len(peers))
    for case, group in groupby(rows, key=lambda row: row.case):
        block = list(group)
        cells = ["<br>".join(_measured(row) for row in block if row.peer == peer) or "-" for peer in peers]
        own = ", ".join(part for part in case.split(", ") if part not in shared)
        lines.append(f"| {own} | {' | '.join(cells)} |")
    return lines


def _first_by(row: Row, block: Sequence[Row]) -> float | None:
    of_first = ratio(row, block, block[0].peer)
    return 1 / of_first if of_first and row.peer != block[0].peer else None


def _shown_ratio(value: float | None) -> str:
    return "-" if value is None else shown(value)


def put_between_markers(file: Path, new: str) -> None:
    """Replace the text between the comments BEGIN and END in `file`; raises ValueError without them."""
    head, begin, rest = file.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file.name}: {BEGIN} and {END} must stand in it")
    file.write_text(f"{head}{BEGIN}\n{new}\n{END}{tail}")


def plot(rows: Sequence[Row], file: Path) -> None:
    """Draw a bar chart for each case and metric: medians, with lines from minimum to maximum."""
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
    figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
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
        *map(_shown_ratio, ratios),
    )


def _measured(row: Row) -> str:
    return "-" if row.median is None else shown(row.median)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=False)]
    return "  ".join([*left, *right]).rstrip()
