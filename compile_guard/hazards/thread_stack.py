"""F6: a thread with a small stack ends the process with a segmentation fault when it compiles a nested model."""

from __future__ import annotations

import threading

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads

SMALL = 128 * 1024
"""Bytes; what musl gives every thread that asks for nothing, and what programs with very many threads set."""
NUM_NESTED = 40


def affected() -> Affected:
    try:
        threading.stack_size(threading.stack_size())
    except (ValueError, RuntimeError) as error:
        return Affected(True, f"the size of a thread's stack cannot be set here ({error})", runnable=False)
    return Affected(True, "Dynamo recurses in C for each nested module; how deep it may, no torch asks the thread's stack")


def compile_nested() -> None:
    """Compile a model of 40 nested modules and run it, forward and backward."""
    import torch

    class Nested(torch.nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.inner = Nested(depth - 1) if depth else torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y + 1

    torch.compile(Nested(NUM_NESTED), backend="eager")(torch.ones(2, 2)).sum().backward()


def trigger() -> str | None:
    before = threading.stack_size(SMALL)
    try:
        run_threads(worker=compile_nested)  # ends the process
    finally:
        threading.stack_size(before)
    return None


def mirror() -> None:
    run_threads(worker=compile_nested)


HAZARD = Hazard(
    id="F6",
    name="thread_stack",
    title="A compile in a thread with a small stack is a segmentation fault",
    symptom="SIGSEGV without a message in the first compile of a worker thread; the same compile works in the main thread.",
    mechanism=(
        "Compiling nested modules recurses through C, as deep as they are nested. The main thread has 8 MiB of stack; a "
        "thread has what `threading.stack_size` said, or the C library's default: 128 KiB with musl. Python's recursion "
        "limit counts calls, not bytes. From 512 KiB on nothing overflowed before Python's own RecursionError."
    ),
    links=("pytorch#167789",),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("thread_stack",),
    finding="thread-stack",
    fix="Install the guard; or give threads that compile at least 1 MiB: `threading.stack_size(8 * 2**20)` before they start.",
)
