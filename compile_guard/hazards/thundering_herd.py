"""B3: N threads that call one cold function compile it N times."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import PATIENCE_S, run_threads

NUM_THREADS = 6


def affected() -> Affected:
    # Nothing in torch's Python text tells: the look-up is in C++, before the lock. The trigger is the test.
    return Affected(True, "no torch so far looks the cache up again after the compile lock is won")


def count_compiles(*, warm: bool) -> int:
    """Call one function from six threads at once, cold or after one call alone; how often was it compiled?"""
    import torch

    num_compiles = 0
    about_to_call = threading.Semaphore(0)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_compiles
        num_compiles += 1  # under torch's compile lock
        if num_compiles == 1 and not warm:
            for _ in range(NUM_THREADS):
                about_to_call.acquire(timeout=PATIENCE_S)
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    if warm:
        step(x)

    def call() -> None:
        about_to_call.release()
        step(x)

    calls: dict[str, Callable[[], None]] = {f"caller_{number}": call for number in range(NUM_THREADS)}
    run_threads(**calls)
    return num_compiles


def trigger() -> str | None:
    num_compiles = count_compiles(warm=False)
    if num_compiles > 1:
        return f"{NUM_THREADS} threads called one cold function with one input: compiled {num_compiles} times"
    return None


def mirror() -> None:
    num_compiles = count_compiles(warm=True)
    if num_compiles != 1:
        raise AssertionError(f"a warm function was compiled {num_compiles} times")


HAZARD = Hazard(
    id="B3",
    name="thundering_herd",
    title="N threads compile one cold function N times",
    symptom=(
        "A cold start N times as long, N entries where one would do, and with more than eight threads the "
        "recompile limit hit in the first step."
    ),
    mechanism=(
        "The cache is looked up in C++ before `compile_lock` is taken, and not again after it is won: each thread "
        "that waited for the first compile then compiles the same frame for the same inputs."
    ),
    links=("pytorch#123177",),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "single_flight"),
    finding="duplicate-compile",
    fix="Install the guard, whose waiting threads look again; or make each first call in one thread (`warmup`).",
)
