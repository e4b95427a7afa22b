"""`--queue-url` and KMQ_QUEUE_URL: the storage that commands work on, where that is not Kafka."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import is_secret
from kmqpy.queue import Queue, Storage, queue_for, storage_for
from kmqpy.queue.storage import QUEUE_SETTINGS
from kmqpy.queue.url import parse_url

VARIABLE = "KMQ_QUEUE_URL"
_OF_A_QUEUE = {"queue", *QUEUE_SETTINGS}


@dataclass(frozen=True)
class StorageUrl:
    """A storage, and a queue of it where the url names one (`queue=`).

    text      the url; it may hold a password, so it is never shown
    settings  what it says of the queue beside the name
    """

    text: str = field(repr=False)
    queue: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, *, on_command_line: bool) -> StorageUrl:
        """Take a url apart.

        Raises ConfigError, for one with a password on the command line as well: whoever may list processes
        could read it.
        """
        names_queue = any(part.partition("=")[0] == "queue" for part in _parameters(text))
        url = parse_url(text, names_queue=names_queue)
        if on_command_line and (url.password or any(map(is_secret, url.settings))):
            raise ConfigError(
                f"--queue-url: a secret must not stand on a command line; give it as {VARIABLE}"
            )
        if url.scheme == "kafka":
            raise ConfigError("--queue-url: queues on Kafka are named by --bootstrap and QUEUE")
        of_queue = QUEUE_SETTINGS - {"create"}
        return cls(text, url.queue, {key: url.settings[key] for key in url.settings.keys() & of_queue})

    def storage(self, *, for_create: bool = False) -> Storage:
        """Open the storage; what the url says of a queue is left out.

        Raises QueueNotFound if SQLite's file does not exist, unless it is opened `for_create` of a queue.
        """
        base, _, _ = self.text.partition("?")
        rest = "&".join(part for part in _parameters(self.text) if part.partition("=")[0] not in _OF_A_QUEUE)
        url = f"{base}?{rest}" if rest else base
        if base.lower().startswith("sqlite:") and not for_create:
            from kmqpy.storages.sql.opening import refuse_missing_file  # needs an extra

            refuse_missing_file(parse_url(url, names_queue=False))
        return storage_for(url)

    @contextmanager
    def opened(self, name: str) -> Iterator[Queue]:
        """Open a queue, and close it with its storage."""
        if self.queue:
            with queue_for(self.text) as queue:
                yield queue
        else:
            with self.storage() as storage, storage.open(name) as queue:
                yield queue


def _parameters(url: str) -> list[str]:
    return url.partition("?")[2].split("&")
