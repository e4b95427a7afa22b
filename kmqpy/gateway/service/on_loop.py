"""An executor for storages that never wait, those in memory: their calls run on the event loop itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class OnLoop(Executor):
    """Runs calls on the running event loop a moment later, so that those of concurrent requests are gathered.

    Only for calls that take microseconds: the loop does nothing else meanwhile. A thread would cost more.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See Executor.submit; called on the event loop."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args, **kwargs))
                except BaseException as error:
                    future.set_exception(error)

        asyncio.get_running_loop().call_soon(run)
        return future
