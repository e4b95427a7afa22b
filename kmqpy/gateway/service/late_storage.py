"""Opens a storage that may be away when the gateway starts: it serves as soon as the storage answers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, cast

from kmqpy.core.backoff import Backoff
from kmqpy.errors import KmqError, Unavailable
from kmqpy.queue import Capabilities, Storage

_log = logging.getLogger(__name__)

_PATIENCE_S = 10.0
"""Seconds for which the start of the gateway waits for a storage."""
_ALL = Capabilities()
"""Of a storage that nobody knows yet: until it is open, every operation raises Unavailable anyway."""


def opened_or_late(open_storage: Callable[[], Storage]) -> Storage:
    """Open a storage; if it does not answer, return one that raises Unavailable until it does.

    Raises the errors of `open_storage` but Unavailable. Errors that come later are logged, and it is tried
    again: a server that starts may begin with errors of any kind.
    """
    late = _LateStorage(open_storage)
    late.wait(_PATIENCE_S)
    return late.storage or cast("Storage", late)


class _LateStorage:
    """A storage that a thread opens; all that a Storage has is that of the opened one."""

    def __init__(self, open_storage: Callable[[], Storage]) -> None:
        self._open_storage = open_storage
        self._backoff = Backoff(first=0.2, maximum=2)
        self._closing = threading.Event()
        self._tried = threading.Event()
        self._is_started = False
        self._lock = threading.Lock()
        self._first_error: BaseException | None = None
        self.storage: Storage | None = None
        threading.Thread(target=self._open, name="kmq-storage", daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for the first try; raises what it raised, unless the storage is away."""
        self._tried.wait(seconds)
        with self._lock:
            self._is_started = self._first_error is None
        if self._first_error is not None:
            raise self._first_error

    @property
    def capabilities(self) -> Capabilities:
        return _ALL if self.storage is None else self.storage.capabilities

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            storage = self.storage
        if storage is not None:
            storage.close()

    def __getattr__(self, name: str) -> Any:
        storage = self.storage
        if storage is None:
            raise Unavailable("the storage has not answered since the gateway started")
        return getattr(storage, name)

    def _open(self) -> None:
        failures = 0
        while not self._closing.is_set():
            try:
                storage = self._open_storage()
            except Exception as error:
                failures += 1
                with self._lock:
                    if not self._is_started and not isinstance(error, Unavailable):
                        self._first_error = error
                        self._tried.set()
                        return
                text = str(error) if isinstance(error, KmqError) else repr(error)
                _log.warning("a storage can't be opened yet", extra={"error": text})
                self._tried.set()
                self._closing.wait(self._backoff.delay(failures))
                continue
            with self._lock:
                if not self._closing.is_set():
                    self.storage = storage
            if self.storage is None:
                storage.close()
            elif failures:
                _log.info("the storage is open")
            self._tried.set()
            return
