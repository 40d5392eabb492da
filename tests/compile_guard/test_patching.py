"""Replacements of other people's functions, and their way back."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest

from compile_guard.patching import Patches


def double(x: int, *, times: int = 2) -> int:
    return x * times


def nothing() -> str:
    return "nothing"


@pytest.fixture
def patches() -> Patches:
    return Patches()


def test_swapped_code_reaches_holders_of_the_function_and_the_original_still_works(patches: Patches) -> None:
    held_since_before = double
    code = double.__code__
    original = patches.swap_code(double, lambda *args, **kwargs: ("ours", args, kwargs))
    assert held_since_before(3, times=4) == ("ours", (3,), {"times": 4})
    assert original(3) == 6
    assert original(3, times=4) == 12
    assert patches.undo() == []
    assert double.__code__ is code
    assert double(3) == 6
    assert not [name for name in globals() if "compile_guard_double" in name]


def test_swapped_code_keeps_file_line_and_source(patches: Patches) -> None:
    before = inspect.getsource(nothing), nothing.__code__.co_filename, nothing.__code__.co_firstlineno
    patches.swap_code(nothing, lambda: "ours")
    assert nothing() == "ours"
    assert (inspect.getsource(nothing), nothing.__code__.co_filename, nothing.__code__.co_firstlineno) == before
    patches.undo()


def test_swapped_code_keeps_the_signature(patches: Patches) -> None:
    before = inspect.signature(double)
    patches.swap_code(double, lambda *args, **kwargs: None)
    assert inspect.signature(double) == before
    patches.undo()
    assert inspect.signature(double) == before
    assert "__signature__" not in vars(double)


def test_code_that_closes_over_variables_is_refused(patches: Patches) -> None:
    captured = 1

    def closes() -> int:
        return captured

    with pytest.raises(ValueError, match=r"closes over \('captured',\)"):
        patches.swap_code(closes, lambda: 2)
    assert closes() == 1


def test_swapped_twice_runs_the_last_one_over_the_first_and_comes_back_whole(patches: Patches) -> None:
    code = double.__code__
    first = patches.swap_code(double, lambda x: first(x) + 1)
    second = patches.swap_code(double, lambda x: second(x) * 10)
    assert double(1) == 30
    assert patches.undo() == []
    assert double.__code__ is code
    assert double(1) == 2


class Owner:
    value = "own"

    @staticmethod
    def static() -> str:
        return "static"

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__


class Heir(Owner):
    pass


@pytest.mark.parametrize("name", ["value", "static", "of_class"])
def test_attribute_comes_back_as_the_very_object_it_was(patches: Patches, name: str) -> None:
    before = vars(Owner)[name]
    returned = patches.set_attribute(Owner, name, "ours")
    assert Owner.__dict__[name] == "ours"
    assert returned is not None
    assert patches.undo() == []
    assert vars(Owner)[name] is before


def test_inherited_attribute_is_taken_off_again(patches: Patches) -> None:
    patches.set_attribute(Heir, "value", "ours")
    assert Heir.value == "ours"
    patches.undo()
    assert "value" not in vars(Heir)
    assert Heir.value == "own"


def test_attribute_that_was_not_there_is_taken_off_again(patches: Patches) -> None:
    module: Any = types.ModuleType("a_module")
    patches.set_attribute(module, "new", 1)
    assert module.new == 1
    patches.undo()
    assert not hasattr(module, "new")


def test_what_somebody_patched_over_ours_is_left_and_named(patches: Patches) -> None:
    code = nothing.__code__
    patches.set_attribute(Owner, "value", "ours")
    original = patches.swap_code(nothing, lambda: "ours")
    over_ours = Patches()
    over_theirs = over_ours.swap_code(nothing, lambda: f"theirs over {over_theirs()}")
    Owner.value = "theirs"
    try:
        assert set(patches.undo()) == {"Owner.value", f"{__name__}.nothing"}
        assert Owner.value == "theirs"
        assert nothing() == "theirs over ours"
        assert original() == "nothing"
    finally:
        Owner.value = "own"
        nothing.__code__ = code


def test_undo_runs_everything_once_in_reverse(patches: Patches) -> None:
    order: list[str] = []
    patches.on_undo("first", lambda: order.append("first"))
    patches.on_undo("second", lambda: order.append("second"))
    assert patches.undo() == []
    assert patches.undo() == []
    assert order == ["second", "first"]
