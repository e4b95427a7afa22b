"""Runs the background thread of a client, which works while the user's code handles messages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kmqpy.core import garbage
from kmqpy.kafka.client.read_ahead import ReadAhead
from kmqpy.kafka.client.receiver import MIN_LEASE_LEFT, Receiver
from kmqpy.kafka.settings import QueueSettings

_log = logging.getLogger(__name__)

_MAX_PAUSE_S = 0.1
"""The housekeeper pauses for at most this long between two rounds of work. The pause is short, so that
commits are not late and close() does not wait long. The pause is a tenth of lease_ms where that is
less."""


class Housekeeper:
    """A thread that commits offsets, and keeps the client in its group, while the user's code is busy.

    The thread also gives back messages that were read ahead and have less than half of their leases left,
    notices that topics were recreated, replaces clients of librdkafka that are cut off (never reach Kafka
    again), and looks for transactions that nobody ends.

    follow_topics       changes to recreated topics; the thread holds `receiving` when it calls this
    close_if_abandoned  closes the client if nobody can use it any more
    receiving           the lock for `receiver`
    closed              the thread ends once this event is set
    """

    def __init__(
        self,
        queue: QueueSettings,
        receiver: Receiver,
        read_ahead: ReadAhead,
        *,
        follow_topics: Callable[[], None],
        close_if_abandoned: Callable[[], None],
        receiving: threading.RLock,
        closed: threading.Event,
    ) -> None:
        self._queue = queue
        self._receiver = receiver
        self._read_ahead = read_ahead
        self._follow_topics = follow_topics
        self._close_if_abandoned = close_if_abandoned
        self._receiving = receiving
        self._closed = closed
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def is_started(self) -> bool:
        """True once somebody has begun to start the thread."""
        return self._thread is not None

    def ensure_started(self) -> None:
        """Start the thread, unless it was started or the client is closed."""
        if self._thread is not None:
            return
        with self._starting:
            if self._closed.is_set() or self._thread is not None:
                return
            self._thread = thread = threading.Thread(target=self._run, name="kmq-client", daemon=True)
            try:
                thread.start()
            except BaseException:  # no thread left, or a signal handler raised: the next call tries again
                if thread.ident is None:
                    self._thread = None
                raise

    def join(self) -> None:
        """Wait until the thread has ended, if it was started. Set `closed` before, or this never returns.

        Does not wait in the thread itself, which closes abandoned clients.
        """
        # Not alive yet is a thread in whose start() a signal handler raised. It ends at once, by `closed`.
        thread = self._thread
        if thread is not None and thread.is_alive() and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        every_s = min(_MAX_PAUSE_S, self._queue.lease_ms / 1000 * MIN_LEASE_LEFT / 5)
        while not self._closed.wait(every_s):
            garbage.resume()
            try:
                self._read_ahead.give_back_stale()
                if self._receiving.acquire(blocking=False):
                    try:
                        self._follow_topics()
                        self._receiver.keep_alive()
                    finally:
                        self._receiving.release()
                self._replace_cut_off()
                self._receiver.look_for_hanging()
                self._close_if_abandoned()
            except Exception:  # the thread must live; receive() meets the same error and raises it
                _log.exception("housekeeping failed", extra={"queue": self._queue.name})
        garbage.resume()

    def _replace_cut_off(self) -> None:
        found = self._receiver.find_cut_off()
        if found and not self._closed.is_set():
            with self._receiving:
                self._receiver.replace(found)
