"""The manifests: by kubectl, and by the schemas of Kubernetes and KEDA, without a cluster."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.parse
import urllib.request
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kmqpy.core.durations import parse_duration_ms
from kmqpy.dev.ports import free_ports
from kmqpy.kafka.settings import KafkaConnection
from kmqpy.zookeeper.settings import ZooKeeperConnection
from tests.deploy import keda
from tests.deploy.prometheus import program
from tracker.health.metrics import TrackerMetrics
from tracker.health.server import HealthServer

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "deploy" / "kubernetes"
SCALED = yaml.safe_load((MANIFESTS / "scaled-consumers.yaml").read_text())
TRIGGER = SCALED["spec"]["triggers"][0]["metadata"]


def resources(text: str) -> dict[str, dict]:
    """The resources of a file of manifests, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all(text)}


TRACKERS = resources((MANIFESTS / "trackers.yaml").read_text())
(CONTAINER,) = TRACKERS["Deployment"]["spec"]["template"]["spec"]["containers"]
GATEWAYS = resources((MANIFESTS / "gateways" / "gateways.yaml").read_text())
POD = GATEWAYS["Deployment"]["spec"]["template"]["spec"]


# --- trackers -----------------------------------------------------------------------------------------


def test_the_manifests_keep_to_the_schemas_of_kubernetes():
    namespace = resources((MANIFESTS / "namespace.yaml").read_text())
    assert [*TRACKERS] == [*GATEWAYS] == ["Deployment", "Service", "PodDisruptionBudget"]
    for resource in [*TRACKERS.values(), *GATEWAYS.values(), *namespace.values()]:
        kubernetes_validate.validate(resource, "1.33", strict=True)


def test_what_kubectl_makes_of_them_is_whole():
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", MANIFESTS], capture_output=True, text=True, check=True, timeout=60
    )
    made = resources(done.stdout)
    assert made.keys() == {*TRACKERS, "Namespace", "ConfigMap"}
    (container,) = made["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"][0]["configMapRef"]["name"] == made["ConfigMap"]["metadata"]["name"]


def test_the_kustomization_names_files_and_the_image_that_there_are():
    kustomization = yaml.safe_load((MANIFESTS / "kustomization.yaml").read_text())
    assert all((MANIFESTS / one).exists() for one in kustomization["resources"])
    assert CONTAINER["image"] in {image["name"] for image in kustomization["images"]}


@pytest.mark.parametrize("folder", ["", "gateways"])
def test_kubectl_takes_a_folder(folder):
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    command = ["kubectl", "kustomize", MANIFESTS / folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for resource in yaml.safe_load_all(done.stdout):
        kubernetes_validate.validate(resource, "1.33", strict=True)
        assert resource["metadata"].get("namespace", "kmqpy") == "kmqpy"
        if resource["kind"] == "Deployment":
            (container,) = resource["spec"]["template"]["spec"]["containers"]
            assert container["image"] == f"kmqpy:{version}"


def test_a_folder_of_ones_own_changes_addresses_image_and_replicas(tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl")
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (kustomization,) = re.findall(r"<!-- checked: kubectl -->\n```yaml\n(.*?)```", page, re.DOTALL)
    shutil.copytree(MANIFESTS, tmp_path / "deploy" / "kubernetes")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(kustomization)
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "mine"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    made = resources(done.stdout)
    for resource in made.values():
        kubernetes_validate.validate(resource, "1.33", strict=True)
    deployment, settings = made["Deployment"]["spec"], made["ConfigMap"]["data"]
    (container,) = deployment["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.org/kmqpy:0.1.0"
    assert container["envFrom"][0]["configMapRef"]["name"] == made["ConfigMap"]["metadata"]["name"]
    assert deployment["replicas"] == 3
    with pytest.MonkeyPatch.context() as environment:
        for name, value in settings.items():
            environment.setenv(name, value)
        connection = KafkaConnection.from_environment()
        assert ZooKeeperConnection.from_environment().hosts == "zookeeper.kafka.svc:2181"
    assert connection.bootstrap == "my-kafka-bootstrap.kafka.svc:9093"
    assert connection.kafka["sasl.username"] == "kmqpy-tracker"


def test_prometheus_takes_the_configuration_of_the_page(tmp_path):
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    ((block, rules),) = re.findall(
        r"<!-- checked: promtool -->\n```yaml\n(.*?- (\S+alerts\.yaml).*?)```", page, re.DOTALL
    )
    text = block.replace(rules, str(ROOT / "deploy" / "prometheus" / "*alerts.yaml"), 1)
    (tmp_path / "prometheus.yml").write_text(text)
    done = subprocess.run(
        [program("promtool"), "check", "config", "prometheus.yml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    service, port = TRACKERS["Service"]["metadata"]["name"], TRACKERS["Service"]["spec"]["ports"][0]["port"]
    (where,) = yaml.safe_load(block)["scrape_configs"][0]["dns_sd_configs"]
    assert where["names"][0].startswith(f"{service}.kmqpy.svc.")
    assert where["port"] == port


# --- gateways -----------------------------------------------------------------------------------------


def test_a_gateway_of_the_manifest_answers_probes_and_clients_with_a_key(tmp_path):
    (container,) = POD["containers"]
    ports = dict(zip(("http", "admin"), free_ports(2), strict=True))
    own = {
        "--host": "127.0.0.1",
        "--port": ports["http"],
        "--keys": tmp_path / "keys.json",
        "--advertise": "localhost",
        "--drain": "0s",
    }
    given = [one.partition("=") for one in container["args"]]
    arguments = [f"{name}={own[name]}" if equals else name for name, equals, _ in given]
    arguments.append(f"--admin-port={ports['admin']}")
    kmq = Path(sys.executable).with_name("kmq")
    environment = {**os.environ, "KMQ_QUEUE_URL": f"sqlite:///{tmp_path / 'queues.db'}"}
    create = [kmq, "key", "--keys", own["--keys"], "create", "--role", "queue_standard"]
    made = subprocess.run(create, capture_output=True, text=True, check=True, timeout=60)
    with subprocess.Popen([kmq, *arguments], env=environment, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline().startswith(b"gateway at ")
            for probe in ("livenessProbe", "readinessProbe"):
                http = container[probe]["httpGet"]
                assert _status(ports[http["port"]], http["path"]) == 200
            sizes = "/queue/1/q/size"
            assert _status(ports["http"], sizes) == 403
            assert _status(ports["http"], sizes, {"X-BV-API-Key": made.stdout.strip()}) == 200
        finally:
            process.terminate()
    assert process.returncode == 0


def _status(port, path, headers=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_what_a_gateway_of_the_manifest_names_is_there():
    (container,) = POD["containers"]
    arguments = dict(one.removeprefix("--").split("=") for one in container["args"] if "=" in one)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": int(arguments["port"]), "admin": int(arguments["port"]) + 1}
    service = {port["name"]: port["port"] for port in GATEWAYS["Service"]["spec"]["ports"]}
    assert service == ports, "EmoDB's clients ask the port after theirs for their health"
    annotations = GATEWAYS["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["admin"])
    (keys,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "keys")
    assert arguments["keys"].startswith(f"{keys}/")
    variables = {one["name"] for one in container["env"]}
    assert {arguments["advertise"]} <= {f"$({name})" for name in variables}
    drain_s = parse_duration_ms(arguments["drain"]) / 1000
    assert POD["terminationGracePeriodSeconds"] > drain_s + 30


def test_the_compose_file_s_gateway_has_keys_and_trackers_beside_it():
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    command = services["gateway"]["command"]
    assert "--no-tracker" in command
    assert {"tracker-1", "tracker-2"} <= services.keys()
    keys = command[command.index("--keys") + 1]
    assert services["gateway"]["volumes"] == [f"keys:/app/{Path(keys).parent}"]
    make = re.findall(r"exec gateway (kmq key .*)", (ROOT / "docker-compose.yml").read_text())
    assert make == [f"kmq key --keys {keys} create --role queue_standard"]


# --- consumers that KEDA scales -----------------------------------------------------------------------


@pytest.mark.timeout(400)  # it may have to install a package
def test_keda_knows_what_the_scaled_object_says():
    unknown, wrong = copy.deepcopy(SCALED), copy.deepcopy(SCALED)
    unknown["spec"]["maxReplicas"] = 12
    unknown["spec"]["triggers"][0]["metadat"] = {}
    wrong["spec"]["triggers"][0]["metadata"]["targetValue"] = 100
    ours, with_unknown, with_wrong = keda.problems(SCALED, unknown, wrong)
    assert ours == ""
    assert with_unknown.splitlines() == [
        ".spec.triggers[0].metadat: no such field",
        ".spec.maxReplicas: no such field",
    ]
    assert "should be a valid string" in with_wrong
    # These are the settings of KEDA's scaler metrics-api, by its source; no schema has them.
    assert SCALED["spec"]["triggers"][0]["type"] == "metrics-api"
    known = {"url", "valueLocation", "targetValue", "aggregateFromKubeServiceEndpoints", "aggregationType"}
    assert TRIGGER.keys() == known


def test_the_scaled_object_asks_what_trackers_answer():
    url = urllib.parse.urlsplit(TRIGGER["url"])
    service = TRACKERS["Service"]["metadata"]["name"]
    namespace = resources((MANIFESTS / "namespace.yaml").read_text())["Namespace"]["metadata"]["name"]
    # Of these KEDA takes the address of each pod, and the port of the pod, not of the service.
    assert url.hostname.split(".")[:2] == [service, namespace]
    assert url.port == CONTAINER["ports"][0]["containerPort"]
    assert not url.query, "KEDA asks each pod for the path alone"
    answers = []
    for depth in (7, 5):
        watched = _Watched()
        watched.metrics.owned.labels("orders").set(1)
        watched.metrics.show("orders", 0, depth=depth, overdue=1)
        watched.metrics.in_flight.labels("orders", "0").set(1000)
        server = HealthServer(watched, "127.0.0.1", 0)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}{url.path}", timeout=10) as answer:
                answers.append(json.loads(answer.read())[TRIGGER["valueLocation"]])
        finally:
            server.close()
    assert TRIGGER["aggregationType"] == "sum"
    assert sum(answers) == 14


class _Watched:
    def __init__(self) -> None:
        self.metrics = TrackerMetrics()

    def alive(self) -> bool:
        return True

    def problems(self) -> list[str]:
        return []
