"""A weak mapping by identity: code objects compare by value, and one with a dict among its constants cannot be hashed."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class ByIdentity(Generic[_V]):
    """Values of objects, each as long as its object lives. Reads and writes are single dictionary operations."""

    def __init__(self) -> None:
        self._items: dict[int, tuple[weakref.ref[Any], _V]] = {}

    def __setitem__(self, key: Any, value: _V) -> None:
        ident, items = id(key), self._items
        items[ident] = (weakref.ref(key, lambda _: items.pop(ident, None)), value)

    def get(self, key: Any, default: _V | None = None) -> _V | None:
        """The value of `key`, else `default`."""
        found = self._items.get(id(key))
        return default if found is None or found[0]() is not key else found[1]
