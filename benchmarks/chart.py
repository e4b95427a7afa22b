"""A bar chart as the text of an SVG, readable on a light and on a dark page."""

from collections.abc import Sequence
from html import escape

from benchmarks.results import Row, shown

_WIDTH, _LEFT, _RIGHT = 760, 190, 110
_BAR, _STEP, _TOP, _GAP = 18, 26, 30, 20
_STYLE = """
    text { fill: #1f2328; font: 13px system-ui, sans-serif; }
    .head { font-weight: 600; }
    .ours { fill: #0969da; }
    .other { fill: #8c959f; }
    @media (prefers-color-scheme: dark) {
      text { fill: #f0f6fc; }
      .ours { fill: #4493f8; }
      .other { fill: #6e7681; }
    }
  """


def svg(rows: Sequence[Row]) -> str:
    """The medians of rows as bars, a block for each case, all on one scale; kmqpy's bars stand out.

    Raises ValueError if no row has a figure.
    """
    largest = max((row.median or 0.0 for row in rows), default=0.0)
    if not largest:
        raise ValueError("no figures to draw")
    scale = (_WIDTH - _LEFT - _RIGHT) / largest
    parts: list[str] = []
    y, case = 0, None
    for row in rows:
        if row.case != case:
            y += _TOP if case is None else _TOP + _GAP
            case = row.case
            title = escape(f"{row.work}: {row.case} ({row.unit})")
            parts.append(f'<text class="head" x="8" y="{y - 10}">{title}</text>')
        text = y + _BAR - 5
        parts.append(f'<text x="{_LEFT - 8}" y="{text}" text-anchor="end">{escape(row.peer)}</text>')
        if row.median is None:
            parts.append(f'<text x="{_LEFT + 6}" y="{text}">no figure</text>')
        else:
            width = max(1, round(row.median * scale))
            kind = "ours" if row.peer.startswith("kmqpy") else "other"
            parts.append(f'<rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_BAR}" rx="3"/>')
            parts.append(f'<text x="{_LEFT + width + 6}" y="{text}">{shown(row.median)}</text>')
        y += _STEP
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 8}" role="img">'
    return "\n  ".join([head, f"<style>{_STYLE}</style>", *parts]) + "\n</svg>\n"
