r"""Permissions in EmoDB's notation: `<context>|<action>|<resource>`. Pure: no I/O.

`*` stands for any text, also within a part (`queue|post|mails-*`); `\|` and `\*` are those characters. Parts
that are left out stand for anything. Source: EmoDB 6.4.9's permissions and roles.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kmqpy.errors import ConfigError, shown

CONTEXT = "queue"
"""The context of all permissions that the gateway asks for."""
_STANDARD = ("post", "poll", "get_status")
ACTIONS = (*_STANDARD, "manage")
"""EmoDB's, and `manage`: to change and delete queues, which only SQS's clients can."""
_PARTS = 3
_SYSTEM_PREFIX = "__"
"""Names that begin so are for queue_admin, and for permissions that are given one by one."""
_PIECE = re.compile(r"\\[|*\\]|[|*]|[^|*\\]+|\\")


@dataclass(frozen=True, slots=True)
class Permission:
    """Permits an action on queues; parts match as a whole.

    text     as it was written
    parts    a pattern for context, action and resource
    exclude  names that begin so are not meant; empty: none
    """

    text: str
    parts: tuple[re.Pattern[str], ...]
    exclude: str = ""

    def permits(self, action: str, queue: str) -> bool:
        if self.exclude and queue.startswith(self.exclude):
            return False
        return all(
            part.fullmatch(value) for part, value in zip(self.parts, (CONTEXT, action, queue), strict=True)
        )


def parse_permission(text: str, *, exclude: str = "") -> Permission:
    """Parse a permission; raises ConfigError that says what is wrong."""
    parts = [[""]]  # of each part, the texts between its stars
    for piece in _PIECE.findall(text):
        if piece == "|":
            parts.append([""])
        elif piece == "*":
            parts[-1].append("")
        elif piece == "\\":
            raise ConfigError(rf"permission: {shown(text)}: after a \ must stand |, * or \ ")
        else:
            parts[-1][-1] += piece.removeprefix("\\")
    if len(parts) > _PARTS or [""] in parts:
        raise ConfigError(
            f"permission: {shown(text)} must be <context>|<action>|<resource>, for example queue|post|mails"
        )
    parts += [["", ""]] * (_PARTS - len(parts))
    return Permission(text, tuple(re.compile(_pattern(part), re.DOTALL) for part in parts), exclude)


def _pattern(texts: Sequence[str]) -> str:
    """The pattern for texts with anything between them; never tries a second place for a text.

    Otherwise a name that is long would keep the gateway busy for hours.
    """
    first, *between = map(re.escape, texts)
    if not between:
        return first
    return first + "".join(f"(?>.*?{one})" for one in between[:-1] if one) + ".*" + between[-1]


def permits_something(text: str) -> bool:
    """False if a permission permits no action of the gateway, whatever the queue; raises ConfigError."""
    context, action, _ = parse_permission(text).parts
    return bool(context.fullmatch(CONTEXT)) and any(action.fullmatch(one) for one in ACTIONS)


ROLES: dict[str, tuple[Permission, ...]] = {
    "queue_post": tuple(
        parse_permission(f"queue|{action}|*", exclude=_SYSTEM_PREFIX) for action in ("post", "get_status")
    ),
    "queue_poll": tuple(
        parse_permission(f"queue|{action}|*", exclude=_SYSTEM_PREFIX) for action in ("poll", "get_status")
    ),
    "queue_standard": tuple(
        parse_permission(f"queue|{action}|*", exclude=_SYSTEM_PREFIX) for action in _STANDARD
    ),
    "queue_admin": (parse_permission("queue|*|*"),),
}
"""EmoDB's roles for queues."""


def permissions_of(roles: Iterable[str], permissions: Iterable[str]) -> tuple[Permission, ...]:
    """The permissions of roles, and further ones; raises ConfigError for an unknown role."""
    found: list[Permission] = []
    for role in roles:
        if role not in ROLES:
            raise ConfigError(f"role: {shown(role)} is none of {', '.join(ROLES)}")
        found += ROLES[role]
    return (*found, *map(parse_permission, permissions))
