"""Where keys are kept: in a file, or in the storage itself, as messages that nobody takes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from kmqpy.errors import ConfigError, NotSupported, QueueNotFound
from kmqpy.gateway.keys.keyring import ApiKey
from kmqpy.gateway.service.hub import make_queue
from kmqpy.queue import Queue, Storage

_log = logging.getLogger(__name__)

KEYS_QUEUE = "KMQ.keys"
"""The queue that holds the keys; no queue of a dialect has this name (see names.py)."""
_MAX_KEYS = 10_000


class KeyStore(Protocol):
    """Keeps keys; used from any thread."""

    def read(self) -> Sequence[ApiKey] | None:
        """All keys, one of each id; None if none was ever kept, so that nobody asks for keys.

        Raises ConfigError for a damaged store, and Unavailable.
        """
        ...

    def put(self, key: ApiKey) -> None:
        """Add a new key."""
        ...

    def replace(self, key: ApiKey) -> bool:
        """Replace the key with its id; returns False if there is none, perhaps since it was just removed."""
        ...

    def remove(self, key_id: str) -> bool:
        """Remove a key; returns False if there is none with this id."""
        ...


class FileKeys:
    """Keys in a JSON file that only its owner can read; who writes replaces it as a whole."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Sequence[ApiKey]:
        """See KeyStore.read; a file that does not exist holds no keys, and what is not a key is left out."""
        found = []
        for entry in self._entries():
            try:
                found.append(ApiKey.from_json(json.dumps(entry).encode()))
            except ConfigError as error:
                _log.error(
                    "what is stored among the keys is none",
                    extra={"file": str(self._path), "error": str(error)},
                )
        return found

    def put(self, key: ApiKey) -> None:
        with self._locked():
            self._write([*self._entries(), json.loads(key.to_json())])

    def replace(self, key: ApiKey) -> bool:
        return self._change(key.id, [json.loads(key.to_json())])

    def remove(self, key_id: str) -> bool:
        return self._change(key_id, [])

    def _change(self, key_id: str, new: Sequence[object]) -> bool:
        """Put `new` in the place of what has this id; returns False if nothing has."""
        with self._locked():
            entries = self._entries()
            left = [one for one in entries if not (isinstance(one, dict) and one.get("id") == key_id)]
            if len(left) < len(entries):
                self._write([*left, *new])
            return len(left) < len(entries)

    def _entries(self) -> Sequence[object]:
        """What stands in the file; raises ConfigError for one that `kmq key` has not written."""
        try:
            text = self._path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"keys file {str(self._path)!r}: {error.strerror}") from None
        try:
            return [*json.loads(text)["keys"]]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(f"keys file {str(self._path)!r}: not a file of kmq key") from None

    def _write(self, entries: Sequence[object]) -> None:
        text = json.dumps({"keys": entries}, indent=1)
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Let one process write at a time; on Windows, which has no such lock, the last one wins."""
        try:
            with Path(f"{self._path}.lock").open("w") as lock:
                with suppress(ImportError):
                    import fcntl

                    fcntl.flock(lock, fcntl.LOCK_EX)
                yield
        except OSError as error:
            raise ConfigError(f"keys file {str(self._path)!r}: {error.strerror}") from None


class StorageKeys:
    """Keys in a queue of the storage.

    Raises NotSupported where nobody can acknowledge a message that was not taken (on Kafka).
    """

    def __init__(self, storage: Storage) -> None:
        if not storage.capabilities.immediate:
            raise NotSupported("keys: this storage can't keep keys; keep them in a file (--keys FILE)")
        self._storage = storage

    def read(self) -> Sequence[ApiKey] | None:
        """See KeyStore.read."""
        try:
            with self._storage.open(KEYS_QUEUE) as queue:
                keys = [key for _, key in _entries(queue)]
        except QueueNotFound:
            return None
        # While put() replaces a key, and after it was killed, there are two of its id.
        return list({key.id: key for key in sorted(keys, key=lambda one: one.created_ms)}.values())

    def put(self, key: ApiKey) -> None:
        make_queue(self._storage, KEYS_QUEUE, {"max_redeliveries": None})
        with self._storage.open(KEYS_QUEUE) as queue:
            queue.send(key.to_json())

    def replace(self, key: ApiKey) -> bool:
        try:
            with self._storage.open(KEYS_QUEUE) as queue:
                former = _ids_of(queue, key.id)
                if not former:
                    return False
                new = queue.send(key.to_json())
                left = [one for one in _ids_of(queue, key.id) if one in former]
                # Without any left it was revoked meanwhile, by somebody who may not have seen the new one.
                queue.ack([queue.receipt(one) for one in left or [new]], confirmed=True)
        except QueueNotFound:
            return False
        return bool(left)

    def remove(self, key_id: str) -> bool:
        is_removed = False
        try:
            with self._storage.open(KEYS_QUEUE) as queue:
                while found := _ids_of(queue, key_id):  # again: somebody may replace it meanwhile
                    queue.ack([queue.receipt(one) for one in found], confirmed=True)
                    is_removed = True
        except QueueNotFound:
            return False
        return is_removed


def _ids_of(queue: Queue, key_id: str) -> list[str]:
    """The ids of the messages that hold the key with this id."""
    return [message_id for message_id, one in _entries(queue) if one.id == key_id]


def _entries(queue: Queue) -> list[tuple[str, ApiKey]]:
    """The keys, each with the id of the message that holds it.

    What is no key is left out: by it nobody may keep a key that was revoked.
    """
    found = []
    for message in queue.peek(_MAX_KEYS):
        try:
            found.append((message.id, ApiKey.from_json(message.body)))
        except ConfigError as error:
            _log.error(
                "what is stored among the keys is none",
                extra={"queue": KEYS_QUEUE, "id": message.id, "error": str(error)},
            )
    return found
