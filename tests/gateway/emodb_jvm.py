"""Runs EmoDB's published Java client, emodb-queue-client 6.4.9, in a process of its own.

Each line of JSON on stdin asks for one thing, and one on stdout answers:

{"open": 0, "service": "queue", "key": …, "gzip": …, "hosts": ["http://…"], "timeout_s": …}   opens client 0,
    of a service, "queue" or "dedupq", with fixed hosts; or by discovery: "zookeeper": …, "cluster": …
{"call": 0, "method": "poll", "arguments": ["q", 30.0, 10]}   calls it; answers {"value": …}, or
    {"raised": …} with the classes of the exception and its causes, and what they say
{"hosts": 0}   answers the end points that discovery has found

What a reader needs to know of its classes:

QueueClientFactory.forCluster(cluster, metrics): the client as EmoDB's readme shows it. It waits 500 ms for a
    connection, and for an answer; its bodies come in chunks. …AndHttpConfiguration: with other time-outs.
    …AndHttpClient: with a client of Dropwizard's JerseyClientBuilder, which compresses bodies by default.
ServicePoolBuilder (Ostrich): retries, goes from end point to end point; ZooKeeperHostDiscovery finds them.

The jars are pinned in jars.json beside this file; their parent POM is not published, so each stands there.
To pin them anew: relock(["emodb-client"], Path("tests/gateway/jars.json")) of kmqpy.dev.jars.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jpype

from kmqpy.dev.jars import jar_set
from kmqpy.dev.java import find_java

LOCK = Path(__file__).with_name("jars.json")
EMODB = "com.bazaarvoice.emodb"
OSTRICH = "com.bazaarvoice.ostrich"


def start_jvm() -> None:
    home = find_java().resolve().parent.parent
    library = next(path for path in home.rglob("*jvm.*") if path.suffix in {".so", ".dylib", ".dll"})
    jpype.startJVM(
        str(library),
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        "-Xmx256m",
        "-Dzookeeper.sasl.client=false",
        "--add-opens=java.base/java.lang=ALL-UNNAMED",  # for Jackson's Afterburner
        classpath=[str(jar) for jar in jar_set("emodb-client", LOCK)],
    )
    root = jpype.JClass("org.slf4j.LoggerFactory").getLogger("ROOT")
    root.setLevel(jpype.JClass("ch.qos.logback.classic.Level").OFF)  # it would log to stdout


class Clients:
    """The clients, and what they are called with."""

    def __init__(self) -> None:
        self._clients: dict[int, Any] = {}
        self._discoveries: dict[int, Any] = {}
        self._metrics: Any = None
        self._json = jpype.JClass("io.dropwizard.jackson.Jackson").newObjectMapper()
        self._object = jpype.JClass("java.lang.Object").class_
        self._duration = jpype.JClass("java.time.Duration")
        self._list = jpype.JClass("java.util.ArrayList")

    def open(
        self,
        open: int,  # noqa: A002
        service: str,
        key: str,
        *,
        gzip: bool = False,
        hosts: list[str] | None = None,
        zookeeper: str = "",
        cluster: str = "cluster",
        timeout_s: int | None = None,
    ) -> None:
        kind = {"queue": "Queue", "dedupq": "DedupQueue"}[service]
        self._metrics = jpype.JClass("com.codahale.metrics.MetricRegistry")()  # of this client alone
        factories = jpype.JClass(f"{EMODB}.queue.client.{kind}ClientFactory")
        if gzip:
            client = self._zipping_client(f"client-{open}", timeout_s)
            factory = factories.forClusterAndHttpClient(cluster, client)
        elif timeout_s is None:
            factory = factories.forCluster(cluster, self._metrics)
        else:
            configuration = self._configuration("HttpClientConfiguration", timeout_s)
            factory = factories.forClusterAndHttpConfiguration(cluster, configuration, self._metrics)
        builder = (
            jpype.JClass(f"{OSTRICH}.pool.ServicePoolBuilder")
            .create(jpype.JClass(f"{EMODB}.queue.api.{kind}Service").class_)
            .withServiceFactory(factory.usingCredentials(key))
            .withMetricRegistry(self._metrics)
        )
        if hosts is None:
            retry = jpype.JClass("org.apache.curator.retry.RetryOneTime")(100)
            curator = jpype.JClass("org.apache.curator.framework.CuratorFrameworkFactory").newClient(
                zookeeper, retry
            )
            curator.start()
            discovery = jpype.JClass(f"{OSTRICH}.discovery.zookeeper.ZooKeeperHostDiscovery")(
                curator, factory.getServiceName(), self._metrics
            )
            self._discoveries[open] = discovery
            builder = builder.withHostDiscovery(discovery)
        else:
            source = jpype.JClass(f"{EMODB}.queue.client.{kind}FixedHostDiscoverySource")
            builder = builder.withHostDiscoverySource(source(jpype.JArray(jpype.JString)(hosts)))
        milliseconds = jpype.JClass("java.util.concurrent.TimeUnit").MILLISECONDS
        retries = jpype.JClass(f"{OSTRICH}.retry.ExponentialBackoffRetry")(5, 50, 1000, milliseconds)
        self._clients[open] = builder.buildProxy(retries)

    def hosts(self, hosts: int) -> list[str]:
        return sorted(str(one.getId()) for one in self._discoveries[hosts].getHosts())

    def call(self, call: int, method: str, arguments: list[Any]) -> Any:
        client = self._clients[call]
        match method, arguments:
            case "send", [queue, body]:
                return client.send(queue, self._java(body))
            case "sendAll", [queue, bodies]:
                return client.sendAll(queue, self._java(bodies))
            case "sendAll", [bodies_by_queue]:
                return client.sendAll(self._java(bodies_by_queue))
            case "poll", [queue, seconds, limit]:
                return self._messages(client.poll(queue, self._seconds(seconds), limit))
            case "peek", [queue, limit]:
                return self._messages(client.peek(queue, limit))
            case "renew", [queue, ids, seconds]:
                return client.renew(queue, self._list(ids), self._seconds(seconds))
            case "acknowledge", [queue, ids]:
                return client.acknowledge(queue, self._list(ids))
            case "getMessageCount" | "getClaimCount", [queue]:
                return int(getattr(client, method)(queue))
            case "getMessageCountUpTo", [queue, limit]:
                return int(client.getMessageCountUpTo(queue, limit))
            case "moveAsync", [origin, target]:
                return str(client.moveAsync(origin, target))
            case "getMoveStatus", [reference]:
                found = client.getMoveStatus(reference)
                return [str(found.getFrom()), str(found.getTo()), str(found.getStatus())]
            case "unclaimAll" | "purge", [queue]:
                return getattr(client, method)(queue)
        raise ValueError(method)

    def _seconds(self, seconds: float) -> Any:
        return self._duration.ofMillis(int(seconds * 1000))

    def _java(self, value: Any) -> Any:
        """A value as the client gets it from a program in Java."""
        return self._json.readValue(json.dumps(value), self._object)

    def _messages(self, messages: Any) -> list[list[Any]]:
        return [
            [str(one.getId()), json.loads(str(self._json.writeValueAsString(one.getPayload())))]
            for one in messages
        ]

    def _zipping_client(self, name: str, timeout_s: int | None) -> Any:
        threads = jpype.JClass("java.util.concurrent.Executors").newCachedThreadPool()
        builder = jpype.JClass("io.dropwizard.client.JerseyClientBuilder")(self._metrics)
        builder = builder.using(self._configuration("JerseyClientConfiguration", timeout_s))
        return builder.using(threads, self._json).build(name)

    def _configuration(self, name: str, timeout_s: int | None) -> Any:
        configuration = jpype.JClass(f"io.dropwizard.client.{name}")()
        if timeout_s is not None:
            seconds = jpype.JClass("io.dropwizard.util.Duration").seconds(timeout_s)
            configuration.setTimeout(seconds)
            configuration.setConnectionTimeout(seconds)
        return configuration


def raised(error: Any) -> dict[str, Any]:
    causes = []
    while error is not None:
        causes.append([str(error.getClass().getName()), str(error.getMessage())])
        error = error.getCause()
    return {"raised": causes}


def serve() -> None:
    clients = Clients()
    for line in sys.stdin:
        asked = json.loads(line)
        do = next(getattr(clients, name) for name in ("open", "call", "hosts") if name in asked)
        try:
            answer = {"value": do(**asked)}
        except jpype.JException as error:
            answer = raised(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    start_jvm()
    serve()
    jpype.JClass("java.lang.Runtime").getRuntime().halt(0)  # threads of the clients would keep it waiting
