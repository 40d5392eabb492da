"""A weak mapping by identity: code objects compare by value, and one with a dict among its constants cannot be hashed."""

from __future__ import annotations

import weakref
from typing import Any, Generic, TypeVar

_V = TypeVar("_V")


class _Item(weakref.ref[Any], Generic[_V]):
    """A key, held weakly, with its value: one object an item, since torch keeps alive whatever it has compiled."""

    __slots__ = ("ident", "items", "value")

    items: dict[int, _Item[_V]]
    ident: int
    value: _V


def _forget(item: _Item[Any]) -> None:
    item.items.pop(item.ident, None)


class ByIdentity(Generic[_V]):
    """Values of objects, each as long as its object lives. Reads and writes are single dictionary operations."""

    def __init__(self) -> None:
        self._items: dict[int, _Item[_V]] = {}

    def __setitem__(self, key: Any, value: _V) -> None:
        item: _Item[_V] = _Item(key, _forget)
        item.items, item.ident, item.value = self._items, id(key), value
        self._items[item.ident] = item

    def get(self, key: Any, default: _V | None = None) -> _V | None:
        """The value of `key`, else `default`."""
        found = self._items.get(id(key))
        return default if found is None or found() is not key else found.value
