"""Switches of the process: two writers are told of, blocks of `sdpa_kernel` leave the backends as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.threads import Puppet

cuda: Any = torch.backends.cuda


def codes(guard: Any) -> list[str]:
    return [each.subject for each in guard.findings() if each.code == "numeric-switch"]


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_overlapping_blocks_leave_the_backends_as_they_were(
    guard: Any, puppet: Callable[[], Puppet], first_ends_first: bool
) -> None:
    def enabled() -> tuple[bool, bool, bool]:
        return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), cuda.mem_efficient_sdp_enabled()

    before = enabled()
    first, second = puppet(), puppet()
    math, flash = sdpa_kernel(SDPBackend.MATH), sdpa_kernel(SDPBackend.FLASH_ATTENTION)
    first.do(math.__enter__)
    second.do(flash.__enter__)
    assert enabled() == (True, False, False)
    if first_ends_first:
        first.do(math.__exit__, None, None, None)
        assert enabled() == (True, False, False)  # the block that is still open
        second.do(flash.__exit__, None, None, None)
    else:
        second.do(flash.__exit__, None, None, None)
        assert enabled() == (False, True, False)
        first.do(math.__exit__, None, None, None)
    assert enabled() == before
    assert codes(guard) == ["sdpa_kernel"]


def test_nested_blocks_of_one_thread_and_blocks_one_after_the_other_are_silent(
    guard: Any, puppet: Callable[[], Puppet]
) -> None:
    def nested() -> list[bool]:
        seen = []
        with sdpa_kernel(SDPBackend.MATH):
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION], set_priority=True):
                seen.append(cuda.math_sdp_enabled())
            seen.append(cuda.math_sdp_enabled())
        return seen

    for _ in range(2):
        assert puppet().do(nested) == [False, True]
    with pytest.raises(ZeroDivisionError), sdpa_kernel(SDPBackend.MATH):
        raise ZeroDivisionError
    assert cuda.flash_sdp_enabled()
    assert codes(guard) == []


def test_two_writers_of_a_switch_are_told_of_and_one_is_not(guard: Any, puppet: Callable[[], Puppet]) -> None:
    first, second = puppet(), puppet()
    try:
        first.do(torch.set_default_dtype, torch.float64)
        first.do(torch.set_default_dtype, torch.float16)
        second.do(torch.set_default_dtype, torch.float16)  # changes nothing
        assert codes(guard) == []
        second.do(torch.set_default_dtype, torch.float32)
        assert codes(guard) == ["torch.set_default_dtype"]
    finally:
        torch.set_default_dtype(torch.float32)


def test_each_of_the_switches_is_watched(guard: Any, puppet: Callable[[], Puppet]) -> None:
    def set_all(value: bool) -> None:
        torch.backends.cudnn.benchmark = value
        cuda.matmul.allow_tf32 = value
        torch.use_deterministic_algorithms(value)

    try:
        puppet().do(set_all, True)
        puppet().do(set_all, False)
    finally:
        set_all(False)
    assert {each.rsplit(".", 1)[-1].rsplit(" ", 1)[-1] for each in codes(guard)} == {
        "cudnn_benchmark",
        "allow_tf32",
        "use_deterministic_algorithms",
    }


def test_who_holds_the_lock_is_alone(guard: Any, puppet: Callable[[], Puppet]) -> None:
    def build() -> torch.dtype:
        with guard.exclusive():
            torch.set_default_dtype(torch.float64)
            try:
                return torch.ones(1).dtype
            finally:
                torch.set_default_dtype(torch.float32)

    assert [puppet().do(build) for _ in range(2)] == [torch.float64] * 2
    assert codes(guard) == []
