"""`with` for objects that hold connections."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closeable(ABC):
    """An object that `with` closes at the end of its block, also after an error."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """Release connections and threads; a second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
