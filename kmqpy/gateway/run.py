"""Runs a gateway in a process of its own, with the faster event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from collections.abc import Callable, Mapping

from kmqpy.gateway.console import Entry
from kmqpy.gateway.keys.stores import KeyStore
from kmqpy.gateway.server import Gateway, GatewaySettings
from kmqpy.gateway.tracker_process import TrackerProcess
from kmqpy.queue import Storage

_GC_THRESHOLD = 20_000
"""Requests make many objects that are no garbage; looking at each 700 of them took a fifth of the time."""

_OWN_FILES = 1_000
"""Files, and connections to storages, that a gateway has beside the connections of its clients."""


def run(
    settings: GatewaySettings,
    storages: Mapping[str, Storage],
    keys: KeyStore | None,
    *,
    trackers: Mapping[str, TrackerProcess] | None = None,
    entry: Entry | None = None,
    on_ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM or Ctrl-C; `on_ready` gets the url."""

    async def main() -> None:
        gateway = Gateway(settings, storages, keys, trackers, entry)
        if not await gateway.run(on_ready=lambda: on_ready(gateway.url), handle_signals=True):
            for tracker in (trackers or {}).values():
                tracker.kill()
            logging.shutdown()
            os._exit(0)  # Python would wait for threads that wait for a storage

    _allow_connections(settings.limits.max_connections)
    gc.freeze()  # what was imported lives as long as the process
    gc.set_threshold(_GC_THRESHOLD, 10, 100)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def _allow_connections(count: int) -> None:
    """Let the process have a file for each connection, as far as it may: the usual limit is 1,024."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OWN_FILES
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # there is none for Windows
        return None
    return uvloop.new_event_loop
