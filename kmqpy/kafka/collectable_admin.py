"""An administration client that is never freed in a thread of librdkafka, which would abort the process."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from confluent_kafka.admin import AdminClient

from kmqpy.core.forks import keep_in_children

_dropped: SimpleQueue[CollectableAdminClient] = SimpleQueue()
"""Clients that the garbage collector found in a thread of librdkafka; free_dropped() frees them."""


class CollectableAdminClient(AdminClient):
    """An administration client that Python's garbage collector may find in any thread.

    A background thread of the client hands over the results of requests, and the collector may run in this
    thread. If the collector freed the client there, librdkafka would abort the process, because no thread may
    wait for its own end (confluent-kafka-python's pull requests 2129 and 2131). So the client keeps itself
    alive if a thread that Python did not start drops it. free_dropped() frees the client in another thread.
    """

    def __del__(self) -> None:
        if not _is_started_by_python(threading.get_ident()):
            keep_in_children(self)  # the collector has removed the weak reference of the first call
            _dropped.put(self)


def free_dropped() -> None:
    """Free the clients that were dropped in threads of librdkafka; called in a thread of Python's."""
    try:
        while True:
            _dropped.get_nowait()
    except Empty:
        pass


def _is_started_by_python(thread_id: int) -> bool:
    """Return True for the main thread and for threads that the module `threading` has started."""
    return any(
        one.ident == thread_id and not isinstance(one, threading._DummyThread)
        for one in threading.enumerate()
    )
