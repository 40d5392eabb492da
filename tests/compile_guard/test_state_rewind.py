"""A compile puts back nothing that another thread has changed meanwhile; with one thread it does as bare torch."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard.hazards.state_rewind import during_a_compile
from tests.compile_guard.test_install import said


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random()]


def test_draws_of_another_thread_during_a_compile_are_not_replayed(guard: Any) -> None:
    before, after = during_a_compile(draw, draw)
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert {found.subject for found in guard.findings()} == {"torch's CPU generator", "Python's random"}
    assert all(found.prevented for found in guard.findings())


def test_compile_that_draws_is_undone_while_the_process_has_one_thread() -> None:
    program = """
import random, torch, compile_guard
compile_guard.install("record")
draw = lambda: [torch.rand(3).tolist(), random.random()]
def backend(graph, inputs):
    draw()
    return graph.forward
def seed():
    torch.manual_seed(3)
    random.seed(3)
seed()
expected = draw()
seed()
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
print(draw() == expected, compile_guard.findings())
"""
    assert said(program) == "True []"


def test_program_may_put_a_state_back_itself_beside_other_threads(guard: Any) -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.wait, args=(30,))
    thread.start()
    try:
        states = torch.get_rng_state(), random.getstate()
        drawn = draw()
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        assert draw() == drawn
    finally:
        done.set()
        thread.join(30)
    assert guard.findings() == []


@pytest.mark.parametrize(
    ("write", "read", "value"),
    [
        (torch.set_default_dtype, torch.get_default_dtype, torch.float64),
        (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode, 1),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision, "high"),
    ],
)
def test_switch_that_another_thread_sets_during_a_compile_holds(
    guard: Any, write: Callable[[Any], None], read: Callable[[], Any], value: Any
) -> None:
    prior = read()
    try:
        assert during_a_compile(lambda: write(value), read)[1] == value
    finally:
        write(prior)
    assert all(found.prevented for found in compile_guard.findings())


def test_switch_that_is_set_and_set_back_during_a_compile_is_silent(guard: Any) -> None:
    def sets() -> None:
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)

    assert during_a_compile(sets, torch.get_default_dtype)[1] == torch.float32
    assert guard.findings() == []
