"""EmoDB's own published Java client with the gateway; emodb_jvm.py runs it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from gateway_support import QUEUE, fresh_memory, running
from taps import Tap

from kmqpy.core.clock import wait_until
from kmqpy.gateway.keys.keyring import new_key
from kmqpy.gateway.keys.stores import FileKeys
from kmqpy.queue import storage_for
from kmqpy.zookeeper.session import connect

pytestmark = pytest.mark.interop
SERVERS = ("postgresql", "sqlite", "mariadb", "redis")
JVM = Path(__file__).with_name("emodb_jvm.py")
PATIENT_S = 20
"""The client's own time-outs are 500 ms, which a busy machine may need for anything."""
EMODB = "com.bazaarvoice.emodb"


class Raised(Exception):
    """What the client threw: the names and messages of the exception and its causes."""

    def __init__(self, causes):
        super().__init__(causes)
        self.name, self.text = causes[0]
        self.causes = [name for name, _ in causes]


class Jvm:
    def __init__(self):
        command = [sys.executable, str(JVM)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._clients = 0

    def ask(self, **what):
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        if "raised" in answer:
            raise Raised(answer["raised"])
        return answer["value"]

    def client(self, service="queue", *, key="key", **options):
        self._clients += 1
        self.ask(open=self._clients, service=service, key=key, **{"timeout_s": PATIENT_S, **options})
        return Client(self, self._clients)


class Client:
    """A client of one of EmoDB's two services; its methods have EmoDB's names."""

    def __init__(self, jvm, number):
        self._jvm = jvm
        self._number = number

    def __getattr__(self, method):
        return lambda *arguments: self._jvm.ask(call=self._number, method=method, arguments=arguments)

    @property
    def hosts(self):
        return self._jvm.ask(hosts=self._number)


@pytest.fixture(scope="module")
def jvm() -> Iterator[Jvm]:
    found = Jvm()
    try:
        yield found
    finally:
        found.process.stdin.close()
        found.process.wait(60)
        found.process.stdout.close()


def polled(client, queue, count, seconds=30.0):
    """Poll until so many messages came; returns the ids by payload."""
    found = {}

    def all_came():
        found.update((payload, one) for one, payload in client.poll(queue, seconds, count - len(found)))
        return len(found) == count

    assert wait_until(all_came, 20, every_s=0.02), found
    return found


def becomes(value, wanted):
    assert wait_until(lambda: value() == wanted, 60, every_s=0.05), value()


@pytest.mark.parametrize(
    "gzip", [False, pytest.param(True, marks=pytest.mark.breadth)], ids=["plain", "gzip"]
)
@pytest.mark.parametrize("service", ["queue", "dedupq"])
@pytest.mark.parametrize(
    "served",
    ["memory", "kafka", *(pytest.param(one, marks=pytest.mark.breadth) for one in SERVERS)],
    indirect=True,
    scope="module",
)
def test_every_method(served, jvm, name, service, gzip):
    if service == "dedupq" and not served.storage.capabilities.collapse:
        pytest.skip("the storage says that it can't: collapse")
    client = jvm.client(service, gzip=gzip, hosts=[served.gateway.url])
    queue, other, target = f"{name}:@", f"{name}-other", f"{name}-target"
    client.send(queue, "a")
    client.sendAll(queue, ["b", "c"])
    client.sendAll({queue: ["d"], other: ["e", "f"]})
    becomes(lambda: client.getMessageCount(queue), 4)
    becomes(lambda: client.getMessageCountUpTo(queue, 2), 4)
    assert sorted(payload for _, payload in client.peek(queue, 10)) == ["a", "b", "c", "d"]
    claimed = polled(client, queue, 4)
    becomes(lambda: client.getClaimCount(queue), 4)
    assert client.poll(queue, 30.0, 10) == []
    client.renew(queue, [claimed["a"]], 60.4)  # the client asks for 61 s
    client.renew(queue, [claimed["b"]], 0.0)
    assert polled(client, queue, 1) == {"b": claimed["b"]}
    client.acknowledge(queue, [claimed["a"], claimed["b"]])
    client.unclaimAll(queue)
    assert polled(client, queue, 2) == {one: claimed[one] for one in ("c", "d")}
    # On Kafka "b" is a copy by now, and ends only when a poll comes past it.
    becomes(lambda: (client.poll(queue, 30.0, 10), client.getMessageCount(queue)), ([], 2))
    reference = client.moveAsync(other, target)
    becomes(lambda: client.getMoveStatus(reference), [other, target, "COMPLETE"])
    assert polled(client, target, 2).keys() == {"e", "f"}
    client.purge(queue)
    becomes(lambda: client.getMessageCount(queue), 0)
    client.acknowledge(queue, [claimed["c"]])
    with pytest.raises(Raised) as unknown:
        client.getMoveStatus("0" * 40)
    assert unknown.value.name == f"{EMODB}.queue.api.UnknownMoveException"


@pytest.mark.parametrize("service", ["queue", "dedupq"])
@pytest.mark.parametrize("gzip", [False, True], ids=["plain", "gzip"])
def test_any_json_comes_back_with_the_client_s_own_time_outs(jvm, name, service, gzip):
    bodies = ["", "é\u2028\U0001f600", 10**30, -1.5e-7, None, True, [], {}, {"a": [{"b": None}, 1]}]
    with running(fresh_memory()) as served:
        client = jvm.client(service, gzip=gzip, hosts=[served.gateway.url], timeout_s=None)
        client.sendAll(name, bodies)
        client.sendAll(name, [])
        client.sendAll({})
        large = "x" * 300_000
        client.send(name, large)
        assert [payload for _, payload in client.poll(name, 30.0, 100)] == [*bodies, large]


def test_equal_messages_of_a_dedup_queue_collapse(served, jvm, name):
    client = jvm.client("dedupq", hosts=[served.gateway.url])
    client.sendAll(name, [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 2}])
    found = []
    assert wait_until(lambda: found.extend(client.poll(name, 30.0, 10)) or len(found) >= 2, 20, every_s=0.02)
    assert sorted(payload["a"] for _, payload in found) == [1, 2]
    client.acknowledge(name, [one for one, _ in found])
    becomes(lambda: (client.poll(name, 30.0, 10), client.getMessageCount(name)), ([], 0))


def test_a_gzip_client_compresses_and_both_send_chunks(jvm, name):
    """Or else the tests above would be of the same client."""
    with running(fresh_memory()) as served, Tap(served.gateway.port) as tap:
        for gzip in (False, True):
            client = jvm.client(gzip=gzip, hosts=[f"http://127.0.0.1:{tap.port}"])
            client.send(name, "a")
            sent = bytes(tap.sent).lower()
            assert b"\r\ntransfer-encoding: chunked\r\n" in sent
            assert (b"\r\ncontent-encoding: gzip\r\n" in sent) is gzip
            del tap.sent[:]


def test_errors_are_those_that_emodb_s_programs_catch(jvm, name, tmp_path):
    keys = FileKeys(tmp_path / "keys")
    poller, secret = new_key("poller", ["queue_poll"], [])
    slow, slow_secret = new_key("slow", ["queue_admin"], [], requests_per_s=0.001)
    keys.put(poller)
    keys.put(slow)
    with running(fresh_memory(), keys, admin_port=None) as served:
        hosts = [served.gateway.url]
        client = jvm.client(key=secret, hosts=hosts)
        assert client.poll(name, 30.0, 10) == []
        for call in (
            lambda: client.send(name, "a"),
            lambda: client.send(f"__{name}", "a"),
            lambda: client.poll(f"__{name}", 30.0, 10),
            lambda: jvm.client(key="unknown", hosts=hosts).peek(name, 10),
        ):
            with pytest.raises(Raised) as refused:
                call()
            assert refused.value.name == f"{EMODB}.common.api.UnauthorizedException"
        # Checked by the server: the client itself checks limits and times only roughly.
        for call, text in (
            (lambda: client.poll("UPPER", 30.0, 10), "Queue name must be a lowercase ASCII string"),
            (lambda: client.poll("a/b", 30.0, 10), "Queue name must be a lowercase ASCII string"),
            (lambda: client.poll(name, 30.0, 1001), "Limit must be <=1000"),
            (lambda: client.poll(name, 3601.0, 10), "ClaimTtl must be <=1 hour"),
            (lambda: client.acknowledge(name, ["00"]), "Invalid event ID."),
            (lambda: client.acknowledge(name, ["0" * 40]), "Invalid event ID checksum."),
        ):
            with pytest.raises(Raised) as illegal:
                call()
            assert illegal.value.name == "java.lang.IllegalArgumentException"
            assert illegal.value.text.startswith(text)
        limited = jvm.client(key=slow_secret, hosts=hosts)
        limited.send(name, "a")
        with pytest.raises(Raised) as overload:  # thrown at once, and not tried five times
            limited.send(name, "b")
        assert overload.value.name == f"{EMODB}.common.api.ServiceUnavailableException"
        assert client.getMessageCount(name) == 1


def test_a_storage_that_is_away_sends_the_client_to_another_gateway(jvm, name, database_url):
    url = database_url("redis")
    with Tap(urlsplit(url).port) as tap:
        away = storage_for(f"redis://127.0.0.1:{tap.port}/0?prefix={name}&timeout_ms=300")
        with running(fresh_memory(), admin_port=None) as good, running(away, admin_port=None) as bad:
            client = jvm.client(hosts=[bad.gateway.url, good.gateway.url])
            alone = jvm.client(hosts=[bad.gateway.url])
            alone.send(name, 1)
            tap.close()
            for number in range(10):
                client.send(f"{name}-{number}", number)
                assert [payload for _, payload in client.peek(f"{name}-{number}", 1)] == [number]
            assert bad.admin("/healthcheck", "HEAD").status == 503
            answer = bad.ask("POST", f"{QUEUE}/{name}/send", 1)
            assert (answer.status, answer.exception, answer.headers["retry-after"]) == (503, None, "1")
            assert answer.json == {"message": "the storage does not answer", "retryAfterSeconds": 1}
            with pytest.raises(Raised) as exhausted:
                alone.send(name, 2)
            assert exhausted.value.name.startswith("com.bazaarvoice.ostrich.exceptions.")


@contextmanager
def registered(zookeeper, cluster):
    settings = {"admin_port": None, "discovery": zookeeper, "cluster": cluster}
    with running(fresh_memory(), **settings) as served:
        yield served


@pytest.mark.parametrize(("service", "gzip"), [("queue", False), ("dedupq", True)])
def test_clients_find_gateways_by_discovery(jvm, zookeeper, name, service, gzip):
    def ids(*served):
        return sorted(f"127.0.0.1:{one.gateway.port}" for one in served)

    with registered(zookeeper, name) as first:
        client = jvm.client(service, gzip=gzip, zookeeper=zookeeper.hosts, cluster=name)
        becomes(lambda: client.hosts, ids(first))
        client.send("q", 1)
        assert list(polled(client, "q", 1)) == [1]
        with registered(zookeeper, name) as second:
            becomes(lambda: client.hosts, ids(first, second))
        becomes(lambda: client.hosts, ids(first))  # the second has withdrawn
        client.send("q", 2)
        assert list(polled(client, "q", 1)) == [2]


def test_a_registration_that_somebody_removes_comes_back(jvm, zookeeper, name):
    folder = f"/ostrich/{name}-emodb-queue-1"
    with registered(zookeeper, name) as served, connect(zookeeper) as other:
        client = jvm.client(zookeeper=zookeeper.hosts, cluster=name)
        hosts = [f"127.0.0.1:{served.gateway.port}"]
        becomes(lambda: client.hosts, hosts)
        (removed,) = other.get_children(folder)
        other.delete(f"{folder}/{removed}")
        assert wait_until(lambda: removed not in other.get_children(folder) != [], 20, every_s=0.05)
        becomes(lambda: client.hosts, hosts)
        client.send("q", 1)
        assert list(polled(client, "q", 1)) == [1]
