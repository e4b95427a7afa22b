"""The table, the JSON and the plot of a run."""

import json
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median

from .run import Done, Result

_COLUMNS = ("fault", "times", "redelivery: median", "max", "delivery: median", "max")


def write(result: Result, out: Path) -> None:
    """report.json and timeline.png."""
    (out / "report.json").write_text(json.dumps(_json(result), indent=1) + "\n")
    _plot(result, out / "timeline.png")


def table(result: Result) -> str:
    """What was counted, then how long each kind of fault was felt."""
    lines = []
    for name, verdict in result.verdicts.items():
        lines.append(f"queue {name}")
        lines += [f"  {key.replace('_', ' '):24}{count:>12,}" for key, count in verdict.counts.items()]
    lines += ["", "requests of trackers that were held back:", *_held(result)]
    lines += ["", "longest time, in seconds, that a partition went without a redelivery (a delivery):"]
    rows = [_COLUMNS, *(_row(kind, found) for kind, found in _by_kind(result).items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join(cells))
    return "\n".join(lines)


def _held(result: Result) -> list[str]:
    return [
        f"  {way:24}" + "  ".join(f"{api} {count:,} of {seen:,}" for api, (count, seen) in by_api.items())
        for way, by_api in result.held.items()
    ]


def _by_kind(result: Result) -> dict[str, list[Done]]:
    found: dict[str, list[Done]] = {}
    for done in sorted(result.done, key=lambda done: done.fault.name):
        found.setdefault(done.fault.name, []).append(done)
    return found


def _row(kind: str, found: Sequence[Done]) -> tuple[str, ...]:
    cells = [kind, str(len(found))]
    for values in (
        [done.silence.redelivery for done in found],
        [done.silence.delivery for done in found],
    ):
        known = [value for value in values if value is not None]
        cells += [f"{median(known):.1f}", f"{max(known):.1f}"] if known else ["-", "-"]
        if len(known) < len(values):
            cells[-1] = "never"
    return tuple(cells)


def _spread(values: Sequence[float | None]) -> dict[str, object]:
    """Seconds: all, median and maximum; None where it never went on."""
    known = [value for value in values if value is not None]
    return {"s": values, "median_s": median(known) if known else None, "max_s": max(known, default=None)}


def _json(result: Result) -> dict[str, object]:
    level = result.level
    return {
        "when": datetime.now(UTC).strftime("%Y-%m-%d"),
        "system": platform.system(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "confluent-kafka": version("confluent-kafka"),
        "level": level.name,
        "seed": result.seed,
        "seconds": result.seconds,
        "load_seconds": (result.load_ended_ms - result.load_began_ms) / 1000,
        "session_ms": level.session_ms,
        "lease_ms": level.lease_ms,
        "problems": result.all_problems,
        "queues": {name: verdict.counts for name, verdict in result.verdicts.items()},
        "held": result.held,
        "recovery": {
            kind: {
                "times": len(found),
                "redelivery": _spread([done.silence.redelivery for done in found]),
                "delivery": _spread([done.silence.delivery for done in found]),
            }
            for kind, found in _by_kind(result).items()
        },
        "faults": [
            {
                **asdict(done.fault),
                "began_s": (done.began_ms - result.load_began_ms) / 1000,
                "ended_s": (done.ended_ms - result.load_began_ms) / 1000,
            }
            for done in result.done
        ],
    }


def _plot(result: Result, file: Path) -> None:
    """Rates over time, and the faults below."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        return  # an extra; the figures are in the JSON all the same
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    began_s = result.load_began_ms // 1000
    kinds = list(_by_kind(result))
    figure, (rates, faults) = plt.subplots(
        2, 1, figsize=(11, 4 + 0.3 * len(kinds)), height_ratios=(2.5, 0.35 * len(kinds) + 0.4), sharex=True
    )
    curves = {
        "sent": Counter(result.times.sends),
        "delivered": _per_second(result.times.deliveries),
        "redelivered": _per_second(result.times.copies),
    }
    last = max((max(curve, default=began_s) for curve in curves.values()), default=began_s)
    for name, curve in curves.items():
        seconds = range(began_s, last + 1)
        rates.plot([s - began_s for s in seconds], [curve[s] for s in seconds], label=name, linewidth=1)
    rates.set_ylabel("messages/s")
    rates.legend(loc="upper right", fontsize=8)
    rates.set_title(f"{result.level.name}, seed {result.seed}", fontsize=9, loc="left")
    for done in result.done:
        left = (done.began_ms - result.load_began_ms) / 1000
        row = kinds.index(done.fault.name)
        faults.barh(row, max(0.5, (done.ended_ms - done.began_ms) / 1000), left=left, color="tab:red")
    faults.set_yticks(range(len(kinds)), kinds, fontsize=7)
    faults.invert_yaxis()
    faults.set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _per_second(times: dict[int, list[int]]) -> Counter[int]:
    return Counter(at_ms // 1000 for moments in times.values() for at_ms in moments)
