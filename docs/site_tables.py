"""Makes what pages of the site show of the code, in place of comments such as `<!-- table: modules -->`.

It does not import MkDocs, so that tests can run it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kmqpy.gateway.metrics import GatewayMetrics
from kmqpy.telemetry.prometheus import PrometheusTelemetry, QueueGauges
from kmqpy.testing import memory_storage
from tracker.health.metrics import TrackerMetrics

ROOT = Path(__file__).parents[1]
_PLACE = re.compile(r"^<!-- table: (.+?) -->$", re.MULTILINE)


def with_tables(markdown: str) -> str:
    """The page with a table in each place of one; raises KeyError for a table that nobody makes."""
    return _PLACE.sub(lambda place: "\n".join(_TABLES[place[1]]()), markdown)


def metrics_of(registry: CollectorRegistry) -> Iterator[tuple[str, str, list[str], str]]:
    """Name in a query, type, labels and help text of each metric."""
    for collector in registry._collector_to_names:
        for family in collector.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = (collector if hasattr(collector, "_labelnames") else family)._labelnames
            yield name, family.type, list(labels), family.documentation


def of_clients() -> CollectorRegistry:
    """A registry with the metrics of programs that use queues."""
    registry = CollectorRegistry()
    PrometheusTelemetry(registry)
    QueueGauges(memory_storage(), registry=registry)
    return registry


def modules() -> Iterator[tuple[str, str]]:
    """The files of kmqpy and tracker, and the first line of the docstring of each."""
    for room in ("kmqpy", "tracker"):
        for file in sorted((ROOT / room).rglob("*.py")):
            told = ast.get_docstring(ast.parse(file.read_text())) or ""
            yield str(file.relative_to(ROOT)), told.partition("\n")[0]


def _of_metrics(registry: CollectorRegistry) -> list[str]:
    rows = [
        f"| `{name}` | {kind} | {', '.join(labels)} | {text} |"
        for name, kind, labels, text in metrics_of(registry)
    ]
    return ["| metric | type | labels | counts or shows |", "|---|---|---|---|", *rows]


def _of_modules() -> list[str]:
    return [
        "| file | |",
        "|---|---|",
        *(f"| `{file}` | {told.replace('|', '&#124;')} |" for file, told in modules()),
    ]


_TABLES = {
    "metrics of trackers": lambda: _of_metrics(TrackerMetrics().registry),
    "metrics of gateways": lambda: _of_metrics(GatewayMetrics().registry),
    "metrics of clients": lambda: _of_metrics(of_clients()),
    "modules": _of_modules,
}
