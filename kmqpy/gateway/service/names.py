"""Names that queues of a dialect have in a storage. Pure: no I/O.

A name that a storage can have is kept, so that workers find queue `jobs` of the gateway as queue `jobs`.
What stands for the rest holds both a `.` and a capital letter: no name of EmoDB has capitals, none of SQS has
a `.` before them. So no two queues of dialects have one name in the storage.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

_ESCAPES = {":": ".C.", "@": ".A."}
"""For storages with rules of their own for names (Kafka)."""
_MAX_LENGTH = 200
"""The most characters of a name, in any storage of kmqpy."""
_KEPT = 140
"""Characters that are kept of a longer name; a digest of the whole name follows."""


def is_reserved(stored: str) -> bool:
    """True for a name in the storage that only the gateway's own queues have: its keys, its jobs.

    No dialect has a name that is stored so, except the one that takes names as they are.
    """
    return stored.strip().casefold().startswith("kmq.")


@lru_cache(10_000)
def stored_name(name: str, *, prefix: str = "", any_name: bool) -> str:
    """The name in the storage of the queue that a dialect calls `name`.

    prefix    tells kinds of queues apart that may share names, for example `DEDUP.`
    any_name  whether the storage allows any characters in names
    """
    if not any_name:
        for character, escape in _ESCAPES.items():
            name = name.replace(character, escape)
    stored = prefix + name
    if len(stored) <= _MAX_LENGTH:
        return stored
    return f"{stored[:_KEPT]}.H.{hashlib.sha256(stored.encode()).hexdigest()[:40]}"
