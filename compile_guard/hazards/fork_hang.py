"""E4: a process forked while another thread compiles inherits a compile lock that nobody will release."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait

CHILD_S = 6.0
"""How long the forked child may take to compile one tiny function (it takes far less than a second)."""


def affected() -> Affected:
    if not hasattr(os, "fork"):
        return Affected(False, "this system has no os.fork", runnable=False)
    return Affected(True, "os.fork exists here, and no torch so far has a fork handler for its compile lock")


def compile_in_a_forked_child() -> str | None:
    """Fork; the child compiles; the parent waits for it, for a bounded time."""
    import torch

    @torch.compile(backend="eager")
    def childs(x: torch.Tensor) -> torch.Tensor:
        return x.tan()

    child = os.fork()
    if child == 0:
        status = 1
        try:
            childs(torch.ones(2))
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return f"the forked child ended with exit status {code}" if code else None
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"the forked child hung in its first compile, for {CHILD_S:g} s, until it was killed"


def trigger() -> str | None:
    import torch

    compiling, forked = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiling.set()
        wait(forked)
        return graph.forward

    @torch.compile(backend=backend)
    def parents(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def fork() -> str | None:
        wait(compiling)
        try:
            return compile_in_a_forked_child()
        finally:
            forked.set()

    said: str | None = run_threads(compiler=lambda: parents(torch.ones(2)), forker=fork)["forker"]
    return said


def mirror() -> None:
    import torch

    @torch.compile(backend="eager")
    def parents(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    run_threads(compiler=lambda: parents(torch.ones(2)))
    said = compile_in_a_forked_child()
    if said:
        raise AssertionError(said)


HAZARD = Hazard(
    id="E4",
    name="fork_hang",
    title="fork while another thread compiles",
    symptom="A forked child (DataLoader worker, multiprocessing) hangs for ever in its first compiled call.",
    mechanism=(
        "A fork copies the locks as they are but only the thread that forked: a compile lock held by another "
        "thread stays locked in the child. Whatever that thread had half done to torch's globals is copied too."
    ),
    links=("pytorch#108586", "pytorch#148651"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "fork"),
    finding="fork-during-compile",
    fix="Install the guard, which lets a fork wait for the compile; or start processes with spawn, or before threads.",
    # A process that has used CUDA cannot compile in a forked child at all: that is another matter.
    environment={"CUDA_VISIBLE_DEVICES": ""},
)
