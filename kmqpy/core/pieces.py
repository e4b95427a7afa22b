"""Cuts what is too much for one request, or one step, into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

S = TypeVar("S", bound=Sequence[Any])


def pieces(items: S, size: int) -> Iterator[S]:
    """The items, `size` at a time, in their order; the last piece may be shorter."""
    sliced: Any = items  # a slice of a list is a list, of bytes, bytes
    return (sliced[at : at + size] for at in range(0, len(items), size))
