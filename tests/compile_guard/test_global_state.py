"""Thread count and autocast of a thread: a stale count catches up, one's own stays, a lost autocast is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import compile_guard
from tests.threads import run_in_threads, wait

x = torch.ones(4)


@pytest.fixture(autouse=True)
def _two_threads(guard: Any) -> Iterator[None]:
    prior = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(prior)


@pytest.fixture
def compiles() -> list[bool]:
    return []


@pytest.fixture
def step(compiles: list[bool]) -> Callable[[torch.Tensor], torch.Tensor]:
    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(True)
        return graph.forward

    return torch.compile(lambda x: x.sin() + 1, backend=backend)


def in_an_older_thread(work: Callable[[], Any], *, own_count: int | None = None) -> int:
    """Run `work` in a thread that has computed with two threads, after this one has set one; returns its count then."""
    started, ready = threading.Event(), threading.Event()

    def old() -> int:
        if own_count is not None:
            torch.set_num_threads(own_count)
        torch.get_num_threads()
        started.set()
        wait(ready)
        work()
        return torch.get_num_threads()

    def here() -> None:
        wait(started)
        torch.set_num_threads(1)
        work()
        ready.set()

    count: int = run_in_threads(old, here)[0]
    return count


def test_stale_count_catches_up_where_an_entry_then_fits(step: Any, compiles: list[bool]) -> None:
    assert in_an_older_thread(lambda: step(x)) == 1
    assert len(compiles) == 1
    (found,) = compile_guard.findings()
    assert (found.code, found.prevented) == ("global-state", True)
    assert "was 2 here and has been set to 1" in found.shared


def test_count_that_a_thread_has_set_itself_stays(step: Any, compiles: list[bool]) -> None:
    assert in_an_older_thread(lambda: step(x), own_count=2) == 2
    assert len(compiles) == 2
    assert compile_guard.findings() == []


def test_lost_autocast_is_told_once_it_costs_a_compile(step: Any, compiles: list[bool]) -> None:
    """In a thread that was there before the block: one that is started inside has its starter's autocast."""
    compiled = threading.Event()

    def here() -> None:
        with torch.autocast("cpu"):
            step(x)
        compiled.set()

    def old() -> None:
        wait(compiled)
        step(x)

    run_in_threads(old, here)
    assert len(compiles) == 2
    (found,) = compile_guard.findings()
    assert (found.code, found.prevented) == ("global-state", False)
    assert "autocast for cpu" in found.shared
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("state", ["autocast in the worker alone", "no_grad in the worker", "another shape"])
def test_compiles_for_other_reasons_are_silent(step: Any, compiles: list[bool], state: str) -> None:
    def other() -> None:
        if state == "another shape":
            step(torch.ones(5, 2))
        elif state == "no_grad in the worker":
            with torch.no_grad():
                step(x)
        else:
            with torch.autocast("cpu"):
                step(x)

    step(x)
    run_in_threads(other)
    assert len(compiles) == 2
    assert compile_guard.findings() == []
