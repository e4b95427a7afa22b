"""Who uses a queue through a gateway by its url as any other: workers, `kmq`; found in ZooKeeper, too."""

import asyncio

import pytest
from click.testing import CliRunner
from gateway_support import fresh_memory, running

from kmqpy import Worker, queue_for
from kmqpy.cli.app import kmq
from kmqpy.core.clock import wait_until
from kmqpy.errors import ConfigError, Unavailable
from kmqpy.queue import storage_for
from kmqpy.worker.asyncio import AsyncWorker
from kmqpy.zookeeper.session import connect


def test_workers_and_commands():
    with running(fresh_memory()) as served, storage_for(served.gateway.url) as storage:
        storage.create("jobs", max_redeliveries=0)
        with queue_for(f"{served.gateway.url}?queue=jobs") as queue:
            queue.send_many([b"bad", *[b"%d" % n for n in range(30)]])
            done = []

            def handle(message):
                if message.body == b"bad":
                    raise ValueError("bad")
                done.append(message.body)

            with Worker(queue, handle, handle_signals=False):
                assert wait_until(lambda: len(done) == 30 and queue.dead_letters.peek(), 30)
            assert queue.size() == 0

            async def work():
                async def handle(message):
                    done.append(message.body)

                worker = AsyncWorker(queue, handle, handle_signals=False)
                running = asyncio.ensure_future(worker.run())
                await asyncio.to_thread(wait_until, lambda: len(done) == 50, 30)
                worker.stop()
                await running

            queue.send_many([b"a"] * 20)
            asyncio.run(work())
            assert (len(done), queue.size()) == (50, 0)
        found = CliRunner().invoke(kmq, ["--queue-url", f"{served.gateway.url}?queue=jobs", "dlq", "list"])
        assert (found.exit_code, "bad" in found.output) == (0, True), found.output


def test_gateways_are_found_in_zookeeper(zookeeper, queue_name):
    folder = f"/ostrich/{queue_name}-emodb-queue-1"
    url = f"http+zk://{zookeeper.hosts}?cluster_name={queue_name}"
    with pytest.raises(Unavailable, match=f"none is registered in {folder}"):
        storage_for(url)
    with pytest.raises(ConfigError, match="cluster_nam"):
        storage_for(f"http+zk://{zookeeper.hosts}?cluster_nam=a")
    settings = {"discovery": zookeeper, "cluster": queue_name, "advertise": "127.0.0.1"}
    with connect(zookeeper) as zk:
        zk.create(f"{folder}/forged", b'{"payload": "[]"}', makepath=True)

        def registered():
            return len(zk.get_children(folder)) == 2

        with running(fresh_memory(), **settings):
            assert wait_until(registered, 30)
            remote = storage_for(url)
            remote.create("q")
        with remote, running(fresh_memory(), **settings):  # at another port
            assert wait_until(registered, 30)
            assert remote.list() == []
