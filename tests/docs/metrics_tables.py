"""Writes the tables of docs/metrics.md that are made of the code's help texts: `make metrics-tables`."""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from kmqpy.gateway.metrics import GatewayMetrics
from kmqpy.telemetry.prometheus import PrometheusTelemetry, QueueGauges
from kmqpy.testing import memory_storage
from tracker.health.metrics import TrackerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
_TABLE = re.compile(r"(<!-- metrics of (\w+): begin -->\n).*?(<!-- metrics of \2: end -->)", re.DOTALL)


def of_clients() -> CollectorRegistry:
    """A registry with the metrics of programs that use queues."""
    registry = CollectorRegistry()
    PrometheusTelemetry(registry)
    QueueGauges(memory_storage(), registry=registry)
    return registry


REGISTRIES = {
    "trackers": TrackerMetrics().registry,
    "gateways": GatewayMetrics().registry,
    "clients": of_clients(),
}


def with_tables(page: str) -> str:
    """The page with each table as it is now, between its comments."""
    return _TABLE.sub(lambda found: f"{found[1]}{_table(REGISTRIES[found[2]])}{found[3]}", page)


def _table(registry: CollectorRegistry) -> str:
    lines = ["| metric, with its labels | counts or shows |", "|---|---|"]
    for name, labels, text in _metrics_of(registry):
        shown = text.replace("|", "\\|")
        lines.append(f"| `{name}{{{','.join(labels)}}}` | {shown} |".replace("{}", ""))
    return "\n".join([*lines, ""])


def _metrics_of(registry: CollectorRegistry) -> Iterator[tuple[str, list[str], str]]:
    """Name in a query, labels and meaning of each metric."""
    for collector in registry._collector_to_names:
        for family in collector.describe():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = (collector if hasattr(collector, "_labelnames") else family)._labelnames
            yield name, list(labels), family.documentation + " Histogram." * (family.type == "histogram")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
