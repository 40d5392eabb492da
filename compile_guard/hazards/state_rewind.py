"""B10: a compile puts back the random generators and numeric switches that it found, whoever has used them meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from torch._dynamo import convert_frame

    if hasattr(convert_frame, "preserve_global_state"):
        return Affected(True, "each compile saves and puts back state of the process: `convert_frame.preserve_global_state`")
    return Affected(False, "there is no `convert_frame.preserve_global_state`")


def during_a_compile(first: Callable[[], Any], then: Callable[[], Any]) -> tuple[Any, Any]:
    """Run `first` in another thread while this one compiles, and `then` in that same thread when the compile is over."""
    import torch

    compiling, done, over = threading.Event(), threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiling.set()
        wait(done)
        return graph.forward

    def compiles() -> None:
        try:
            torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(4))
        finally:
            over.set()

    def draws() -> tuple[Any, Any]:
        wait(compiling)
        before = first()
        done.set()
        wait(over, 30.0)
        return before, then()

    results: tuple[Any, Any] = run_threads(compiler=compiles, drawer=draws)["drawer"]
    return results


def replayed(what: str, draw: Callable[[], Any]) -> str | None:
    """Whether a thread draws the same numbers during another's compile and after it."""
    before, after = during_a_compile(draw, draw)
    return f"{what} drawn during another thread's compile were drawn again after it" if before == after else None


def undone(what: str, value: Any, write: Callable[[Any], None], read: Callable[[], Any]) -> str | None:
    """Whether what a thread sets during another's compile is set back by it."""
    prior = read()
    try:
        _, after = during_a_compile(lambda: write(value), read)
    finally:
        write(prior)
    return None if after == value else f"{what} set during another thread's compile was {after} after it, not {value}"


def trigger() -> str | None:
    import torch

    said = [
        replayed("CPU random numbers", lambda: torch.rand(4).tolist()),
        replayed("numbers of Python's random", lambda: [random.random() for _ in range(4)]),
        undone("the default dtype", torch.float64, torch.set_default_dtype, torch.get_default_dtype),
        undone("determinism", True, torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled),
    ]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw() -> Any:
        return torch.rand(4, generator=generator).tolist()

    before, after = during_a_compile(draw, draw)
    if before == after:
        raise AssertionError("a generator of the thread's own was rewound")
    torch.manual_seed(0)
    state = torch.get_rng_state()
    drawn = torch.rand(4)
    torch.set_rng_state(state)
    if not torch.equal(torch.rand(4), drawn):
        raise AssertionError("a state that the program itself puts back is not put back")


HAZARD = Hazard(
    id="B10",
    name="state_rewind",
    title="A compile rewinds the random numbers and numeric switches of other threads",
    symptom=(
        "Noise, dropout masks or shuffles that repeat, without an error; a default dtype or determinism that falls back; "
        "`AssertionError: Global ... state changed while dynamo tracing, please report a bug`."
    ),
    mechanism=(
        "Each compile saves the CPU's generator, the current GPU's, Python's `random`, default dtype, determinism "
        "and tf32, and puts all of it back at its end. They belong to the process: what other threads drew meanwhile is drawn "
        "again, and what they set is undone."
    ),
    links=("pytorch#145329", "pytorch#145435", "pytorch#198247"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("random_state", "numeric_switches"),
    finding="state-rewind",
    fix=(
        "Install the guard: a compile puts back no CPU generator that other threads may draw from, and what they set holds. A "
        "GPU's generator is put back as in bare torch: give each thread its own GPU (`compile_guard.Worker(device=)`)."
    ),
)
