"""An administration client that is not freed by a thread of librdkafka's."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from confluent_kafka.admin import AdminClient

from kmqpy.core.forks import keep_in_children

_dropped: SimpleQueue[CollectableAdminClient] = SimpleQueue()


class CollectableAdminClient(AdminClient):
    """Python's garbage collector may find it in any thread.

    The results of administration requests are handed over in a background thread of the client, where the
    collector may run. If it freed the client there, librdkafka would abort the process, since no thread may
    wait for its own end (confluent-kafka-python's pull requests 2129 and 2131). So a client that is found in
    a thread which Python did not start is kept, and free_dropped() frees it in another one.
    """

    def __del__(self) -> None:
        if not _is_started_by_python(threading.get_ident()):
            keep_in_children(self)  # the collector has made that note void
            _dropped.put(self)


def free_dropped() -> None:
    """Free the clients that could not be freed where they were found."""
    try:
        while True:
            _dropped.get_nowait()
    except Empty:
        pass


def _is_started_by_python(thread_id: int) -> bool:
    """Return True for the main thread and those of `threading`."""
    return any(
        one.ident == thread_id and not isinstance(one, threading._DummyThread)
        for one in threading.enumerate()
    )
