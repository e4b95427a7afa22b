"""The base class of objects that hold connections or threads and can be used in a `with` block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """Closes itself at the end of a `with` block, even after an error."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """Release connections and threads; a second close does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
