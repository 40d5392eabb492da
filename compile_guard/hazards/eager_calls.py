"""B11: a compiled function runs eager, in every thread and without a word: skipped, failed, or called once under a mode."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads


def affected() -> Affected:
    from torch._dynamo.types import ConvertFrameReturn

    if ConvertFrameReturn().apply_to_code:
        return Affected(True, "what Dynamo returns for a call that it does not compile holds for the code object, for good")
    return Affected(False, "a call that is not compiled is asked for again")


def counting(ran: list[bool]) -> Any:
    """A backend whose compiled code notes each of its runs: eager ones are missing."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return compiled

    return backend


def after_a_mode() -> str | None:
    """One thread calls a warm function once under a dispatch mode; another calls it afterwards."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    ran: list[bool] = []

    @torch.compile(backend=counting(ran))
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    step(x)

    def profiles() -> None:
        with Mode():
            step(x)

    run_threads(profiler=profiles)
    ran.clear()
    run_threads(worker=lambda: step(x))
    return None if ran else "after one call under a dispatch mode in one thread, a warm function runs eager in every thread"


def after_a_break() -> str | None:
    """A graph break where Dynamo cannot resume: the whole function is skipped."""
    import torch

    ran: list[bool] = []

    @torch.compile(backend=counting(ran))
    def breaks_in_try(x: torch.Tensor) -> torch.Tensor:
        try:
            y = x.sin()
            torch._dynamo.graph_break()
        finally:
            y = x.cos()
        return y

    run_threads(worker=lambda: [breaks_in_try(torch.ones(4)) for _ in range(2)])
    return None if ran else "a function with a graph break in a `try` block runs eager, each call"


def after_an_error() -> str | None:
    """A compile that fails once, with `suppress_errors`."""
    import torch

    def failing(graph: Any, inputs: list[Any]) -> Any:
        if not failed:
            failed.append(True)
            raise ValueError("the first compile fails")
        return counting(ran)(graph, inputs)

    failed: list[bool] = []
    ran: list[bool] = []

    @torch.compile(backend=failing)
    def fails_once(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    def work() -> None:
        with torch._dynamo.config.patch(suppress_errors=True):
            for size in (4, 5):
                fails_once(torch.ones(size))

    run_threads(worker=work)
    return None if ran else "a function whose first compile failed runs eager, with `suppress_errors` on"


def trigger() -> str | None:
    said = [after_a_mode(), after_a_break(), after_an_error()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    ran: list[bool] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()  # Dynamo resumes after it
        return y.cos()

    compiled = torch.compile(step, backend=counting(ran))
    nothing = torch.compile(lambda x: x, backend=counting(ran))
    for _ in range(2):
        run_threads(worker=lambda: (compiled(torch.ones(4)), nothing(torch.ones(4)), nothing(None)))
    if len(ran) != 4:
        raise AssertionError(f"{len(ran)} compiled parts ran in two calls of a function that has two")


HAZARD = Hazard(
    id="B11",
    name="eager_calls",
    title="A compiled function runs eager, and nothing says so",
    symptom=(
        "Slow steps and high memory with no error, in one thread or all; flex_attention warns once that it `materializes the "
        "full scores matrix`; a profile without the function's fused kernels; a warm function is never compiled again."
    ),
    mechanism=(
        "Where Dynamo does not compile a call (a graph break in a `try` or `with` block, a failed compile with "
        "`suppress_errors`, the recompile limit) it marks the code object, and every later call of any thread runs eager "
        "without asking Python. Up to 2.13 one call under a `TorchDispatchMode` does the same, for good."
    ),
    links=("pytorch#178344", "torchtitan#3898"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("eager_calls",),
    finding="eager-call",
    outcome="detected",
    fix=(
        "Read the finding: it names the call, the reason, the threads and the cost. `fullgraph=True` makes an error of a skip; "
        "the guard itself keeps a call under a dispatch mode from marking the function."
    ),
)
