"""`config.patch` where torch's configuration belongs to the process (up to 2.11): each block has its values for itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo import config
from torch._higher_order_ops import utils as hop_utils

from compile_guard.torch_seams.configuration import config_is_per_thread
from tests.threads import Puppet

pytestmark = [
    pytest.mark.usefixtures("guard"),
    pytest.mark.skipif(config_is_per_thread(), reason="this torch keeps the configuration of each thread apart"),
]


def limit() -> Any:
    return config.recompile_limit


def test_a_thread_without_a_block_sees_the_one_that_another_has_open(puppet: Callable[[], Puppet]) -> None:
    other, block = puppet(), config.patch(recompile_limit=64)
    before = limit()
    other.do(block.__enter__)
    assert limit() == 64  # as without the guard: a program may patch in one thread and compile in another
    other.do(block.__exit__, None, None, None)
    assert limit() == before


def test_each_of_two_overlapping_blocks_has_its_value_whichever_ends_first(puppet: Callable[[], Puppet]) -> None:
    for first_ends_first in (True, False):
        first, second, before = puppet(), puppet(), limit()
        blocks = {first: config.patch(recompile_limit=64), second: config.patch(recompile_limit=32)}
        for each, block in blocks.items():
            each.do(block.__enter__)
        assert (first.do(limit), second.do(limit)) == (64, 32)
        order = [first, second] if first_ends_first else [second, first]
        order[0].do(lambda block=blocks[order[0]]: block.__exit__(None, None, None))
        assert order[1].do(limit) == {first: 64, second: 32}[order[1]]
        order[1].do(lambda block=blocks[order[1]]: block.__exit__(None, None, None))
        assert limit() == before


def test_an_assignment_inside_a_block_ends_with_it_and_one_outside_stays(puppet: Callable[[], Puppet]) -> None:
    other, before = puppet(), limit()
    try:
        with config.patch(recompile_limit=64):
            config.recompile_limit = 48
            assert limit() == 48
            other.do(setattr, config, "recompile_limit", 16)
            assert limit() == 48
        assert limit() == 16
    finally:
        config.recompile_limit = before


def test_an_alias_is_patched_at_its_target_and_an_unknown_name_is_refused() -> None:
    before = limit()
    with config.patch(cache_size_limit=5):
        assert (config.cache_size_limit, limit()) == (5, 5)
    assert limit() == before
    with pytest.raises(AttributeError, match="no_such_value does not exist"):
        config.patch(no_such_value=1).__enter__()
    assert limit() == before


def test_as_a_decorator_and_nested_in_itself() -> None:
    seen = []

    @config.patch(recompile_limit=7)
    def inner(again: bool) -> None:
        seen.append(limit())
        if again:
            inner(False)
            seen.append(limit())

    inner(True)
    assert seen == [7, 7, 7]


def test_torchs_own_save_and_restore_of_two_threads_leaves_nothing_behind(puppet: Callable[[], Puppet]) -> None:
    """Eager flex_attention goes through both contexts; the first to begin ends first."""
    before = {name: getattr(config, name) for name in ("recompile_limit", "allow_empty_graphs", "capture_scalar_outputs")}
    for make in (torch._dynamo.utils.disable_cache_limit, hop_utils._set_compilation_env):
        first, second = puppet(), puppet()
        blocks = {each: make() for each in (first, second)}
        for each, block in blocks.items():
            each.do(block.__enter__)
        first.do(lambda block=blocks[first]: block.__exit__(None, None, None))
        if make is torch._dynamo.utils.disable_cache_limit:
            assert second.do(limit) == sys.maxsize
        second.do(lambda block=blocks[second]: block.__exit__(None, None, None))
    assert {name: getattr(config, name) for name in before} == before


def test_uninstall_leaves_what_was_assigned(guard: Any) -> None:
    before = limit()
    try:
        config.recompile_limit = 21
        guard.uninstall()
        assert limit() == 21
        with config.patch(recompile_limit=3):
            assert limit() == 3
        assert limit() == 21
    finally:
        config.recompile_limit = before
