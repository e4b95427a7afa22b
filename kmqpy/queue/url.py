"""Storage urls, taken apart. Pure: no I/O."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from kmqpy.core.settings import nearest
from kmqpy.errors import ConfigError

EXAMPLE = "write it like kafka://host:9092?queue=name"
_EXAMPLES = {
    "memory": "memory:",
    "sqlite": "sqlite:///relative.db",
    "postgresql": "postgresql://host/database",
    "mariadb": "mariadb://host/database",
    "zookeeper": "zookeeper://host:2181/kmqpy",
    **{scheme: f"{scheme}://host:6379/0" for scheme in ("redis", "rediss", "valkey", "valkeys")},
}
"""Examples of storages other than Kafka, by scheme."""
_SECRET = re.compile(r"pass(word|phrase)|secret|token|key", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueUrl:
    """A storage url, taken apart. Its parts are percent-decoded after they were split.

    user, password  what stands before the last `@`; None where it is not there
    address         what stands between that and the path, for example `h:9092,h2:9092`
    queue           the queue's name; empty for the url of a storage
    settings        the query parameters except `queue`; may hold secrets
    """

    scheme: str
    address: str
    path: str
    queue: str
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    settings: dict[str, str] = field(default_factory=dict, repr=False)

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """Raise ConfigError, with the nearest name, unless every setting is `known`."""
        names = [*known]
        for key in self.settings:
            if key not in names:
                raise ConfigError(
                    f"queue url: unknown setting {_named(key, self.settings)}{nearest(key, names)}"
                )


def parse_url(url: str, *, names_queue: bool = True) -> QueueUrl:
    """Take a url apart; raises ConfigError, which never shows what may be a part of a password."""
    parts = split(url)
    place = _EXAMPLES.get(parts.scheme)
    example = EXAMPLE if place is None else f"write it like {place}?queue=name"
    if "@" in parts.path + parts.query + parts.fragment:
        # What is before it may be the end of a password with a bare /, ? or #, so none of it may be shown.
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
            raise ConfigError(f"queue url: {_named(name, names)} is given more than once")
    if names_queue and not parsed.queue:
        raise ConfigError(f"queue url: it names no queue; {example}")
    if not names_queue and "queue" in names:
        raise ConfigError("queue url: that of a storage names no queue; leave queue= out")
    return parsed


def _named(name: str, names: Iterable[str]) -> str:
    """The name of a setting, for errors; not after a secret, of which it may be the part behind a bare &."""
    before = itertools.takewhile(lambda one: one != name, names)
    secret = next((one for one in before if _SECRET.search(one)), None)
    return repr(name) if secret is None else f"after {secret} (write & in a secret as %26)"


def _decoded(text: str) -> str:
    return unquote(text, errors="strict")


def split(url: str) -> SplitResult:
    """The parts of a url as they stand there; raises ConfigError."""
    if not isinstance(url, str):
        raise ConfigError(f"queue url: {type(url).__name__} is not text; {EXAMPLE}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ConfigError(f"queue url: it can't be read; {EXAMPLE}") from None
    if not parts.scheme:
        raise ConfigError(f"queue url: it has no scheme; {EXAMPLE}")
    return parts
