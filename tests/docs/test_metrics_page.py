"""docs/metrics.md tells of every metric and of no other; Prometheus takes its configuration."""

import ast
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Gauge, Histogram, InMemoryMetricReader, Sum
from prometheus_client import generate_latest

from kmqpy.gateway.limits import Limits
from kmqpy.gateway.metrics import GatewayMetrics
from kmqpy.message import Message
from kmqpy.telemetry.opentelemetry_metrics import MetricsTelemetry
from tests.deploy.prometheus import program
from tests.docs.metrics_tables import REGISTRIES, with_tables

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
GROUPS = {
    "destination": {"messaging.system", "messaging.destination.name"},
    "operation": {"messaging.operation.name", "messaging.operation.type"},
    "error": {"error.type"},
    "failure": {"kmq.failure"},
}
"""What the page calls the attributes."""


def table(section: str, first: str) -> dict[str, list[str]]:
    """The rows of the table of a section whose first column is called so, by their first column."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    (body,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [[cell.strip() for cell in re.split(r" \|(?= )", line.strip("|"))] for line in body.splitlines()]
    return {row[0].strip("| `"): [cell.strip("` |") for cell in row[1:]] for row in rows}


def test_the_tables_are_those_of_the_code() -> None:
    assert with_tables(PAGE) == PAGE, "run: make metrics-tables"


@pytest.mark.parametrize(
    ("section", "who"),
    [("Trackers", "trackers"), ("Gateways", "gateways"), ("Clients and workers", "clients")],
)
def test_the_tables_show_each_metric_and_what_it_means(section, who) -> None:
    scraped = generate_latest(REGISTRIES[who]).decode()
    texts = dict(re.findall(r"^# HELP (\w+?)(?<!_created) (.*)$", scraped, re.MULTILINE))
    kinds = dict(re.findall(r"^# TYPE (\w+?)(?<!_created) (.*)$", scraped, re.MULTILINE))
    told = table(section, "metric, with its labels")
    assert {name.partition("{")[0]: row for name, row in told.items()} == {
        name: [text + " Histogram." * (kinds[name] == "histogram")] for name, text in texts.items()
    }
    for name, text in texts.items():
        assert (kinds[name] == "counter") == name.endswith("_total"), name
        assert text.endswith("."), name
        assert text.startswith("Seconds ") == name.endswith("_seconds"), name


def test_labels_of_gateways() -> None:
    metrics = GatewayMetrics()
    assert list(table("Gateways", "why")) == [labels[0] for labels in metrics.refused._metrics]
    for name, counter in (("asked", metrics.asked), ("moves", metrics.moves)):
        meaning = table("Gateways", "metric, with its labels")[f"kmq_gateway_{name}_total{{outcome}}"][0]
        assert all(re.search(rf"\b{labels[0]}\b", meaning) for labels in counter._metrics), name


def test_limits_of_gateways() -> None:
    limits = Limits()
    rows = table("Gateways", "why").values()
    assert [re.findall(r"\d+(?: [MK]iB| s\b)?", row[0].replace(",", "")) for row in rows] == [
        [str(limits.max_requests)],
        [f"{limits.max_held_bytes >> 20} MiB", f"{limits.max_key_bytes >> 20} MiB"],
        [],
        [str(limits.max_connections)],
        [f"{limits.max_header_bytes >> 10} KiB"],
        [
            f"{seconds:.0f} s"
            for seconds in (limits.head_timeout_s, limits.body_timeout_s, limits.answer_timeout_s)
        ],
    ]


def test_units_and_meanings_of_opentelemetry() -> None:
    for name, (_, _, unit, meaning) in table("OpenTelemetry", "metric").items():
        assert meaning.endswith("."), name
        assert (unit == "s") == name.endswith(".duration"), name


def test_metrics_of_opentelemetry() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader], shutdown_on_exit=False)
    telemetry = MetricsTelemetry(provider)
    with pytest.raises(ValueError, match="x"), telemetry.sending("q", ()):
        raise ValueError("x")
    message = Message.__new__(Message)
    object.__setattr__(message, "queue", "q")
    telemetry.received("q", [message])
    telemetry.finished("q", "ack")
    telemetry.failed("q", "commit")
    telemetry.in_flight("q", 1)
    telemetry.paused("q", 1)
    with pytest.raises(ValueError, match="x"), telemetry.processing(message):
        raise ValueError("x")
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    kinds = {Sum: "counter", Gauge: "gauge", Histogram: "histogram"}
    found = {
        metric.name: (kinds[type(metric.data)], set(metric.data.data_points[0].attributes), metric.unit)
        for metric in scope.metrics
    }
    provider.shutdown()
    told = {
        name: (kind, set().union(*(GROUPS[group] for group in groups.split(", "))), unit)
        for name, (kind, groups, unit, _) in table("OpenTelemetry", "metric").items()
    }
    assert told == found
    named = table("OpenTelemetry", "attributes")
    assert {name: set(re.findall(r"[a-z]+\.[a-z._]+", row[0])) for name, row in named.items()} == GROUPS


def test_failures_that_clients_and_workers_get_over() -> None:
    found = set()
    for file in (ROOT / "kmqpy").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            called = _owner(node.func.value), node.func.attr
            if called == ("telemetry", "failed"):  # the first argument is the queue
                found.add(_text(node.args[1]))
            elif called in {("failures", "report"), ("failures", "count")}:
                found.add(_text(node.args[0]))
    ends = {"late ": ("ack", "nack", "extend", "dead-letter")}
    found = {start + end for start in found - {""} for end in ends.get(start, ("",))}
    told = {what for cell in table("Clients and workers", "what") for what in cell.split("`, `")}
    assert told == found


def _owner(value: ast.expr) -> str:
    name = value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")
    return name.lstrip("_")


def _text(argument: ast.expr) -> str:
    """A text, or what an f-string begins with; empty for anything else."""
    if isinstance(argument, ast.JoinedStr):
        argument = argument.values[0]
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, str) else ""


def test_prometheus_takes_the_configuration(tmp_path: Path) -> None:
    ((block, rules),) = re.findall(
        r"<!-- checked: promtool -->\n```yaml\n(.*?- (\S+alerts\.yaml).*?)```", PAGE, re.DOTALL
    )
    assert yaml.safe_load(block)["scrape_configs"][0]["static_configs"][0]["targets"][0].endswith(":9404")
    folder = ROOT / "deploy" / "prometheus"
    text = block.replace(rules, str(folder / "*alerts.yaml"))
    (tmp_path / "prometheus.yml").write_text(text)
    command = [program("promtool"), "check", "config", "prometheus.yml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    for name in ("alerts.yaml", "gateway-alerts.yaml"):
        assert f"{(folder / name).read_text().count('alert:')} rules found" in done.stdout
