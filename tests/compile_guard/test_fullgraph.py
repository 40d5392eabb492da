"""`fullgraph=True` calls of several threads are not taken for calls without compiled frames; real ones still are."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from compile_guard.torch_seams.fullgraph import frames_are_counted
from tests.threads import run_in_threads

x = torch.ones(4)
needs_count = pytest.mark.skipif(not frames_are_counted(), reason="this torch counts no frames")


def skipped(x: torch.Tensor) -> torch.Tensor:
    return x + 1


@needs_count
def test_call_without_compiled_frames_still_fails(guard: Any) -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(RuntimeError, match="no compiled frames"):
        torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x)
    torch.compile(lambda x: x * 3, backend="eager", fullgraph=True)(x)  # the count is as before


def test_many_threads_with_warm_fullgraph_calls(guard: Any) -> None:
    steps = [torch.compile(lambda x, n=n: x * n, backend="eager", fullgraph=True) for n in range(4)]
    for step in steps:
        step(x)
    together = threading.Barrier(4)

    def work(step: Any) -> bool:
        together.wait(30)
        for _ in range(300):
            step(x)
        return True

    assert all(run_in_threads(*[lambda step=step: work(step) for step in steps]))


@needs_count
def test_exception_in_a_call_ends_its_count(guard: Any) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise ValueError("in the compiled code")

        return run

    step = torch.compile(skipped, backend=failing, fullgraph=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the compiled code"):
            step(x)

    def other() -> bool:
        torch.compile(lambda x: x - 1, backend="eager", fullgraph=True)(x)
        return True

    assert run_in_threads(other) == [True]
    assert guard.findings() == []
