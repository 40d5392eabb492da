"""The weak mapping by identity: what it holds, and what it lets go."""

from __future__ import annotations

import gc
import types
import weakref

from compile_guard.by_identity import ByIdentity


class _Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def test_objects_that_are_equal_have_values_of_their_own() -> None:
    one, two = _Unhashable(), _Unhashable()
    values: ByIdentity[int] = ByIdentity()
    values[one] = 1
    values[two] = 2
    assert (values.get(one), values.get(two), values.get(_Unhashable(), 3)) == (1, 2, 3)


def test_a_value_set_again_is_the_last_one_and_outlives_the_first() -> None:
    key = _Unhashable()
    values: ByIdentity[int] = ByIdentity()
    values[key] = 1
    values[key] = 2
    gc.collect()
    assert values.get(key) == 2


def test_a_value_goes_with_its_object() -> None:
    key, value = _Unhashable(), _Unhashable()
    told = weakref.ref(value)
    values: ByIdentity[_Unhashable] = ByIdentity()
    values[key] = value
    del value
    assert told() is not None
    del key
    assert told() is None
    assert not values._items


def test_the_mapping_goes_although_its_objects_live() -> None:
    key = _Unhashable()
    values: ByIdentity[int] = ByIdentity()
    values[key] = 1
    gone = weakref.ref(values)
    del values
    gc.collect()
    assert gone() is None


def test_an_item_makes_no_function_of_its_own() -> None:
    """torch keeps what it has compiled, so that items stay: a closure for each was a twentieth of what a compile leaves."""
    keys = [_Unhashable() for _ in range(1000)]
    values: ByIdentity[int] = ByIdentity()
    gc.collect()
    before = sum(type(each) is types.FunctionType for each in gc.get_objects())
    for key in keys:
        values[key] = 1
    assert sum(type(each) is types.FunctionType for each in gc.get_objects()) - before < len(keys) // 2
