"""Parses the urls of queues and storages. Pure: no I/O."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError

EXAMPLE = "write it like kafka://host:9092?queue=name"
"""The advice in errors about a url without a scheme, or of a scheme without an example in _EXAMPLES."""
_EXAMPLES = {
    "memory": "memory:",
    "sqlite": "sqlite:///relative.db",
    "postgresql": "postgresql://host/database",
    "mariadb": "mariadb://host/database",
    "mysql": "mysql://host/database",
    "zookeeper": "zookeeper://host:2181/kmqpy",
    "http+zk": "http+zk://host:2181",
    **{scheme: f"{scheme}://host:8080" for scheme in ("http", "https")},
    **{scheme: f"{scheme}://host:6379/0" for scheme in ("redis", "rediss", "valkey", "valkeys")},
}
"""Examples for errors: urls of storages other than Kafka, by scheme."""
_SECRET_NAME = re.compile(r"pass(word|phrase)|secret|token|key", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUrl:
    """The parts of the url of a queue or storage. The url is split first, then each part is percent-decoded.

    Attributes:
        scheme: The storage, for example `kafka`.
        address: Hosts and ports, for example `h:9092,h2:9092`: the text between the last `@` and the path.
        path: The text from the `/` after the address on.
        queue: The name of the queue; empty for the url of a storage.
        user: The text before the last `@`, up to its first `:`; None if the url has none.
        password: The rest of that text; None if the url has none.
        settings: The query parameters except `queue`; may hold secrets.
    """

    scheme: str
    address: str
    path: str
    queue: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    settings: dict[str, str] = field(default_factory=dict, repr=False)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise ConfigError unless all settings are known.

        Args:
            known: Names of settings.

        Raises:
            ConfigError: A setting is unknown; the text has the most similar known name.
        """
        names = [*known]
        for key in self.settings:
            if key not in names:
                hint = nearest(key, [*names, "queue"])
                raise ConfigError(f"queue url: unknown setting {_shown_name(key, self.settings)}{hint}")


def parse_url(url: str, *, names_queue: bool = True) -> QueueUrl:
    """Parse the url of a queue, or of a storage.

    Args:
        url: The text.
        names_queue: False: it is the url of a storage, without `queue=`.

    Raises:
        ConfigError: The url is wrong; the text never shows what may be a part of a password.
    """
    parts = split(url)
    storage_example = _EXAMPLES.get(parts.scheme)
    example = EXAMPLE if storage_example is None else f"write it like {storage_example}?queue=name"
    if "@" in parts.path + parts.query + parts.fragment:
        # The text before the @ may be the end of a password that holds /, ? or #, so the error shows no text.
        raise ConfigError(
            "queue url: an @ stands after the address; write / ? # @ in a password as %2F %3F %23 %40, and @ "
            "in a path or setting as %40"
        )
    try:
        pairs = parse_qsl(
            parts.query, keep_blank_values=True, strict_parsing=bool(parts.query), errors="strict"
        )
        userinfo, at, address = parts.netloc.rpartition("@")
        user, colon, password = userinfo.partition(":")
        settings = dict(pairs)
        parsed = QueueUrl(
            scheme=parts.scheme,
            user=_decoded(user) if at else None,
            password=_decoded(password) if colon else None,
            address=_decoded(address),
            path=_decoded(parts.path),
            queue=settings.pop("queue", ""),
            settings=settings,
        )
    except ValueError:
        raise ConfigError(f"queue url: it can't be read; {example}") from None
    if parts.fragment:
        raise ConfigError(f"queue url: nothing may follow a #; {example}")
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"queue url: {_shown_name(name, names)} is given more than once")
    if names_queue and not parsed.queue:
        raise ConfigError(f"queue url: it names no queue; {example}")
    if not names_queue and "queue" in names:
        raise ConfigError("queue url: that of a storage names no queue; leave queue= out")
    return parsed


def _shown_name(name: str, names: Iterable[str]) -> str:
    """The name of a setting, for errors.

    After a secret the name is not shown: it may be the rest of a secret that holds an unencoded `&`.
    """
    before = itertools.takewhile(lambda one: one != name, names)
    secret = next((one for one in before if _SECRET_NAME.search(one)), None)
    return repr(name) if secret is None else f"after {secret} (write & in a secret as %26)"


def _decoded(text: str) -> str:
    return unquote(text, errors="strict")


def split(url: str) -> SplitResult:
    """Split a url into parts, without decoding them. Raises ConfigError if that fails."""
    if not isinstance(url, str):
        raise ConfigError(f"queue url: {type(url).__name__} is not text; {EXAMPLE}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"queue url: it can't be read; {EXAMPLE}") from None
    if not parts.scheme:
        raise ConfigError(f"queue url: it has no scheme; {EXAMPLE}")
    return parts
