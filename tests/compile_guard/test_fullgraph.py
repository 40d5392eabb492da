"""`fullgraph=True` calls of several threads are not taken for calls without compiled frames; real ones still are."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_guard.hazards.fullgraph_count import break_beside_a_call
from compile_guard.torch_seams.fullgraph import frames_are_counted
from tests.threads import run_in_threads

ROOT = Path(__file__).parents[2]

x = torch.ones(4)
needs_count = pytest.mark.skipif(not frames_are_counted(), reason="this torch counts no frames")


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-W", "ignore", "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120, check=False)


def skipped(x: torch.Tensor) -> torch.Tensor:
    return x + 1


PROGRAM = """
import threading, torch, compile_guard
compile_guard.install(mode="record")
x = torch.ones(4)
def says():
    try:
        with torch._dynamo.config.patch(disable=True):
            torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(x)
    except RuntimeError as error:
        return "no compiled frames" in str(error)
    return None
torch.compile(lambda x: x * 4, backend={backend!r})(x)
first = says()
torch.compile(lambda x: x * 3, backend="eager", fullgraph=True)(x)  # the count is as before
thread = threading.Thread(target=lambda: None)
thread.start()
thread.join()
print(first, says())
"""


@needs_count
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_call_without_compiled_frames_still_fails_until_the_program_starts_a_thread(backend: str) -> None:
    """torch's own threads, of which inductor has several, are none of the program."""
    done = run_python(PROGRAM.format(backend=backend))
    assert done.stdout == "True None\n", done.stderr[-3000:]


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


@needs_count
def test_a_graph_break_beside_a_fullgraph_call_runs_compiled_on_both_sides(guard: Any) -> None:
    assert break_beside_a_call() is None
