"""Keeps web pages out of a gateway that asks for no keys. Pure: no I/O.

A browser on the gateway's machine reaches it, too, for whatever page it shows: such a page can't read
answers, but a POST without a body, or a poll, has done its work by then. With a name of its own that points
to 127.0.0.1 (DNS rebinding) it even reads them. Browsers tell where a request comes from; programs do not.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable
from functools import lru_cache

_HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
_OF_NO_PAGE = {"", "none", "same-origin"}
"""Values of Sec-Fetch-Site: of a program, of what a user has typed in, and of the gateway's own answers."""


def objection(header: Callable[[str], str], own_names: Iterable[str]) -> str:
    """Why a request must be refused where nobody needs a key; empty if it must not.

    header     gives a header of the request, empty if it is missing
    own_names  of the gateway, beside those of every machine for itself
    """
    host, origin = header("host"), header("origin")
    if origin and origin.partition("://")[2] != host:
        return f"a web page of {origin} must not use a gateway without keys; make one: kmq key create"
    if header("sec-fetch-site").lower() not in _OF_NO_PAGE:
        return "a web page of another site must not use a gateway without keys; make one: kmq key create"
    name = _name(host)
    if name and not is_loopback(name) and name not in map(_name, own_names):
        return (
            f"Host {host} is not a name of this gateway, so a web page may have chosen it; without keys, ask "
            "it as localhost, or start it with --advertise and that name"
        )
    return ""


@lru_cache(1_000)
def _name(host: str) -> str:
    """The name or address in a Host header, without its port."""
    found = _HOST.fullmatch(host)
    return (found[1] if found else host).strip("[]").rstrip(".").lower()


@lru_cache(1_000)
def is_loopback(name: str) -> bool:
    """True for a name or address by which a machine means itself."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")
