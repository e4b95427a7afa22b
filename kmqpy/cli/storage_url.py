"""`StorageUrl`: the storage that --queue-url or KMQ_QUEUE_URL names for commands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from kmqpy.errors import ConfigError
from kmqpy.kafka.settings import is_secret
from kmqpy.queue import Queue, Storage, queue_for, storage_for
from kmqpy.queue.storage import QUEUE_SETTINGS
from kmqpy.queue.url import parse_url

URL_VARIABLE = "KMQ_QUEUE_URL"
OF_GATEWAYS = ("http:", "https:", "http+zk:")
"""What the urls of gateways begin with; what they serve may be on Kafka."""
_QUEUE_KEYS = {"queue", *QUEUE_SETTINGS}
"""Parameters of a url that are about a queue, not about the storage."""


@dataclass(frozen=True)
class StorageUrl:
    """A url that names a storage, and maybe one of its queues.

    text      the url; it may hold a password, so it is never shown
    queue     the name of the queue; empty if the url has no parameter `queue`
    settings  the queue's settings in the url
    """

    text: str = field(repr=False)
    queue: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, *, on_command_line: bool) -> StorageUrl:
        """Parse a url.

        Raises ConfigError for a url that can't be parsed, and for one with a secret `on_command_line`, where
        whoever may list processes could read it.
        """
        names_queue = any(part.partition("=")[0] == "queue" for part in _parameters(text))
        url = parse_url(text, names_queue=names_queue)
        if on_command_line and (url.password or any(map(is_secret, url.settings))):
            raise ConfigError(
                f"--queue-url: a secret must not stand on a command line; give it as {URL_VARIABLE}"
            )
        of_queue = QUEUE_SETTINGS - {"create"}
        return cls(text, url.queue, {key: url.settings[key] for key in url.settings.keys() & of_queue})

    @property
    def is_of_gateway(self) -> bool:
        """Whether it is the url of a gateway."""
        return self.text.lower().startswith(OF_GATEWAYS)

    def kafka_connection(self) -> dict[str, Any] | None:
        """The settings of the connection to Kafka, for build_connections(); None for another storage.

        Raises ConfigError for settings of the queue: commands have options for them.
        """
        if not self.text.lower().startswith("kafka:"):
            return None
        from kmqpy.kafka.storage import connection_in

        return connection_in(replace(parse_url(self.text, names_queue=bool(self.queue)), queue=""))

    def storage(self, *, for_create: bool = False) -> Storage:
        """Open the storage, by the url without the parameters that are about a queue.

        Raises QueueNotFound if SQLite's file does not exist, unless a queue is to be created (`for_create`).
        """
        base, _, _ = self.text.partition("?")
        rest = "&".join(part for part in _parameters(self.text) if part.partition("=")[0] not in _QUEUE_KEYS)
        url = f"{base}?{rest}" if rest else base
        if base.lower().startswith("sqlite:") and not for_create:
            from kmqpy.storages.sql.opening import refuse_missing_file  # needs an extra

            refuse_missing_file(parse_url(url, names_queue=False))
        return storage_for(url)

    @contextmanager
    def opened(self, name: str) -> Iterator[Queue]:
        """Open the url's queue, or else the queue `name`; closes it, and the storage, at the end."""
        if self.queue:
            with queue_for(self.text) as queue:
                yield queue
        else:
            with self.storage() as storage, storage.open(name) as queue:
                yield queue


def _parameters(url: str) -> list[str]:
    return url.partition("?")[2].split("&")
