"""The alerts and the dashboard in deploy/, by the programs that read them: Prometheus and promtool."""

import contextlib
import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry, start_http_server
from support import LiveQueue, until

from kmqpy import Backoff, KafkaConnection, Worker
from kmqpy.dev.ports import free_ports
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.kafka.kmq_client import KmqClient
from kmqpy.telemetry.prometheus import PrometheusTelemetry
from kmqpy.testing import memory_storage
from tests.deploy.prometheus import program
from tests.gateway.gateway_support import Calls, running
from tracker.health.metrics import TrackerMetrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("alerts.yaml", "gateway-alerts.yaml")]
ALERTS = [rule for file in RULES for rule in yaml.safe_load(file.read_text())["groups"][0]["rules"]]
ONLY_WHILE_ONE_HANGS = "kmq_hanging_transaction_seconds"
"""Has no series here, where no transaction hangs."""


@pytest.mark.parametrize("rules", RULES, ids=lambda file: file.stem)
def test_each_alert_fires_when_it_must_and_not_otherwise(rules):
    done = subprocess.run(
        [program("promtool"), "test", "rules", f"{rules.stem}_test.yaml"],
        cwd=DEPLOY / "prometheus",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_is_tested_and_explained():
    files = [file.with_name(f"{file.stem}_test.yaml") for file in RULES]
    tested = {test["name"] for file in files for test in yaml.safe_load(file.read_text())["tests"]}
    page = (ROOT / "docs" / "operations.md").read_text()
    headings = re.findall(r"^### (\w+)$", page, re.MULTILINE)
    (critical,) = re.findall(r"^\*Critical\* are ([^:]*):", page, re.MULTILINE)
    names = [alert["alert"] for alert in ALERTS]
    assert {f"{name} {kind}" for name in names for kind in ("fires", "is quiet")} == tested
    assert names == headings
    assert re.findall(r"Kmq\w+", critical) == [
        alert["alert"] for alert in ALERTS if alert["labels"]["severity"] == "critical"
    ]
    for alert in ALERTS:
        assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{alert['alert'].lower()}"


class Prometheus:
    """A server that scrapes addresses twice a second."""

    def __init__(self, folder: Path, targets: list[str]) -> None:
        (port,) = free_ports(1)
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(file) for file in RULES],
            "scrape_configs": [{"job_name": "kmqpy", "static_configs": [{"targets": targets}]}],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._url = f"http://127.0.0.1:{port}/api/v1/query?"
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    program("prometheus"),
                    f"--config.file={folder}/prometheus.yml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def series(self, expression: str) -> int:
        """How many series an expression gives; 0 while the server starts."""
        try:
            query = self._url + urllib.parse.urlencode({"query": expression})
            with urllib.request.urlopen(query, timeout=60) as answer:
                return len(json.loads(answer.read())["data"]["result"])
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 503:  # it is starting
                    return 0
                raise AssertionError(f"{expression}: {error.read().decode()}") from None
        except OSError:
            return 0

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def scraped(cluster, zookeeper, tmp_path_factory) -> Iterator[Prometheus]:
    """Prometheus, a tracker, a client of a queue that redelivers and dead-letters, and a gateway."""
    registry = CollectorRegistry()
    telemetry = PrometheusTelemetry(registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)

    def handle(message):
        if message.body != b"good":
            raise ValueError("bad")

    connection = KafkaConnection(bootstrap=cluster.bootstrap)
    with LiveQueue(connection, zookeeper, "test-deploy", 1, max_redeliveries=1) as queue:
        tracker = queue.tracker(http_port=0, count_interval_ms=50)
        targets = [f"127.0.0.1:{tracker.http_port}", f"127.0.0.1:{server.server_address[1]}"]
        queue.send("good", "bad")
        telemetry.failed(queue.name, "nothing")  # there are no series of failures before the first
        folder = tmp_path_factory.mktemp("prometheus")
        with (
            TrackerProcess(f"kafka://{cluster.bootstrap}?zookeeper={cluster.zookeeper}&root=/other") as other,
            running(
                memory_storage(), trackers={"": other}, discovery=zookeeper, cluster=queue.name
            ) as served,
            contextlib.closing(
                Prometheus(folder, [*targets, f"127.0.0.1:{served.gateway.admin_port}"])
            ) as prometheus,
            KmqClient(queue.settings, connection, telemetry=telemetry) as received,
            Worker(received, handle, backoff=Backoff(first=0.01), telemetry=telemetry, handle_signals=False),
        ):
            Calls(served, "q").send(1)
            yield prometheus
    server.shutdown()
    server.server_close()
    thread.join()


def test_each_query_of_the_dashboard_finds_something(scraped):
    dashboard = json.loads((DEPLOY / "grafana" / "kmqpy.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] == "timeseries"]
    queries = [(panel["title"], target["expr"]) for panel in panels for target in panel["targets"]]
    assert len(queries) > 20
    for title, query in queries:
        filled = query.replace("$queue", ".*").replace("$__rate_interval", "5s")
        until(
            lambda filled=filled: scraped.series(filled) > 0,
            what=lambda title=title, q=filled: f"{title}: {q}",
        )


def test_each_alert_names_metrics_that_there_are(scraped):
    for alert in ALERTS:
        for metric in set(re.findall(r"\bkmq_\w+", alert["expr"])):
            if metric == ONLY_WHILE_ONE_HANGS:
                assert metric in TrackerMetrics().registry._names_to_collectors
                continue
            until(lambda metric=metric: scraped.series(metric) > 0, what=lambda metric=metric: metric)
