"""A cache of bounded size: what was not used for longest leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Keeps values while the sum of their sizes is at most `limit`; the newest value is always kept."""

    def __init__(self, limit: int, size: Callable[[T], int] = lambda value: 1) -> None:
        self.limit, self.size = limit, size
        self._held: OrderedDict[Hashable, T] = OrderedDict()
        self._total = 0

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `key`, made when it is not here."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = make()
        self._held[key] = value
        self._total += self.size(value)
        while self._total > self.limit and len(self._held) > 1:
            self._total -= self.size(self._held.popitem(last=False)[1])
        return value
