"""A gateway in this process."""

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from kmqpy.gateway.server import Gateway, GatewaySettings
from kmqpy.queue import Storage
from kmqpy.testing import memory_storage


@contextmanager
def running_gateway(
    settings: GatewaySettings | None = None, storages: dict[str, Storage] | None = None
) -> Iterator[Gateway]:
    """A gateway that serves on free ports of its own, over memory unless `storages` says otherwise."""
    started, stop = threading.Event(), lambda: None
    gateways: list[Gateway] = []

    async def serve(given: dict[str, Storage]) -> None:
        nonlocal stop
        gateway = Gateway(settings or GatewaySettings(port=0, admin_port=0, drain_s=0), given)
        gateways.append(gateway)
        loop = asyncio.get_running_loop()
        stop = lambda: loop.call_soon_threadsafe(gateway.request_stop)  # noqa: E731
        await gateway.run(on_ready=started.set)

    def work() -> None:
        with memory_storage() as memory:
            asyncio.run(serve(storages or {"": memory}))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert started.wait(60)
        yield gateways[0]
    finally:
        stop()
        thread.join(60)
    assert not thread.is_alive()


def metrics_of(gateway: Gateway) -> dict[str, float]:
    """What its /metrics shows, by name and labels, these by name: `kmq_gateway_refused_total{why="key"}`."""
    url = f"http://127.0.0.1:{gateway.admin_port}/metrics"
    with urllib.request.urlopen(url, timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        samples = [sample for family in families for sample in family.samples]
    return {_written(sample.name, sample.labels): sample.value for sample in samples}


def _written(name: str, labels: dict[str, str]) -> str:
    inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
    return f"{name}{{{inside}}}" if inside else name
