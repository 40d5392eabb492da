"""B2: `isolate_recompiles=True` isolates by a number that is one for all threads."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.isolated_regions import region_is_global, there_are_regions

    if not there_are_regions():
        return Affected(False, "`torch.compile` has no `isolate_recompiles`")
    if region_is_global():
        return Affected(True, "a region number that one thread sets is read by another")
    return Affected(False, "the number of the current region is a thread-local")


def isolated_function(backend: Any, between: Any) -> Any:
    """A compiled function with a region of its own, and a graph break in the middle, where `between` is called."""
    import torch

    outside = torch.compiler.disable(between)  # type: ignore[no-untyped-call]

    def isolated(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        outside()
        return y.sin()

    options: Any = {"isolate_recompiles": True}  # not in every torch's signature
    return torch.compile(isolated, backend=backend, **options)


def compiles_while_another_thread_calls(overlap: bool) -> int:
    """How often parts of a warm function are compiled again, called with another thread's call in its middle, or after it."""
    import torch

    num_compiles = 0
    concurrent = False
    at_the_break, inside_other, over = threading.Event(), threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        return graph.forward

    def between() -> None:
        if concurrent:
            at_the_break.set()
            wait(inside_other)

    def hold() -> None:
        if concurrent:
            inside_other.set()
            wait(over)

    isolated = isolated_function(backend, between)
    plain = torch.compile(torch.compiler.disable(hold), backend="eager")  # type: ignore[no-untyped-call]
    x = torch.ones(3)
    isolated(x)
    plain()
    num_compiles = 0
    concurrent = overlap

    def first() -> None:
        isolated(x)
        over.set()

    def second() -> None:
        wait(at_the_break if overlap else over)
        plain()

    run_threads(first=first, second=second)
    return num_compiles


def trigger() -> str | None:
    import inspect

    import torch

    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return None
    num_compiles = compiles_while_another_thread_calls(overlap=True)
    if not num_compiles:
        return None
    return (
        f"a warm function with `isolate_recompiles=True` was compiled again ({num_compiles} graph), outside its region, "
        "because another thread called a compiled function meanwhile"
    )


def mirror() -> None:
    import inspect

    import torch

    if "isolate_recompiles" not in inspect.signature(torch.compile).parameters:
        return
    if compiles_while_another_thread_calls(overlap=False):
        raise AssertionError("a warm function was compiled again")


HAZARD = Hazard(
    id="B2",
    name="isolated_region",
    title="`isolate_recompiles=True` does not isolate threads",
    symptom=(
        "A warm function with `isolate_recompiles=True` is compiled again, and another function runs into its "
        "recompile limit, when several threads call compiled functions."
    ),
    mechanism=(
        "Compiled code is kept by region. The current region is one C variable: each compiled call sets its own and puts back "
        "what it found. What a function still has to look up after another thread's call has begun (code after a graph "
        "break) is looked up, compiled and kept in that one's region."
    ),
    links=("pytorch#195355", "pytorch#196495", "pytorch#178347"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("isolated_regions",),
    finding="isolated-region",
    outcome="detected",
    fix=(
        "Use `compile_guard.compile`, which isolates by a code object for each wrapper and device, in place of "
        "`isolate_recompiles=True`."
    ),
)
