"""B7: `with torch.compiler.set_stance(...)` in one thread acts in all, and blocks that overlap leave it in force for ever."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.stance import stance_is_global

    if stance_is_global():
        return Affected(True, "the stance is one object of the process: `torch._dynamo.eval_frame._stance`")
    return Affected(False, "there is no `torch._dynamo.eval_frame._stance` of the process")


def compiled_and_ran(ran: list[bool]) -> Any:
    """A compiled function whose compiled code notes each of its runs: eager ones are missing."""
    import torch

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return compiled

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    step(torch.ones(4))
    ran.clear()
    return step


def beside_a_block() -> str | None:
    """One thread is inside a block; another calls a warm compiled function."""
    import torch

    ran: list[bool] = []
    step = compiled_and_ran(ran)
    inside, called = threading.Event(), threading.Event()

    def debugs() -> None:
        with torch.compiler.set_stance("force_eager"):
            inside.set()
            wait(called)

    def trains() -> None:
        wait(inside)
        step(torch.ones(4))
        called.set()

    run_threads(debugger=debugs, trainer=trains)
    return None if ran else "a warm compiled function ran eager beside another thread's `with set_stance('force_eager')`"


def overlapping_blocks() -> str | None:
    """The first block to begin is the first to end."""
    import torch

    ran: list[bool] = []
    step = compiled_and_ran(ran)
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with torch.compiler.set_stance("force_eager"):
            first_in.set()
            wait(second_in)
        first_out.set()

    def second() -> None:
        wait(first_in)
        with torch.compiler.set_stance("eager_on_recompile"):
            second_in.set()
            wait(first_out)

    run_threads(first=first, second=second)
    step(torch.ones(4))
    return None if ran else "with two overlapping blocks over, every compiled function of the process runs eager for good"


def trigger() -> str | None:
    said = [beside_a_block(), overlapping_blocks()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    ran: list[bool] = []
    step = compiled_and_ran(ran)
    over = threading.Event()

    def debugs() -> None:
        with torch.compiler.set_stance("force_eager"):
            step(torch.ones(4))
        over.set()

    def trains() -> None:
        wait(over)
        step(torch.ones(4))

    run_threads(debugger=debugs, trainer=trains)
    if len(ran) != 1:
        raise AssertionError(f"compiled code ran {len(ran)} times, not in the thread without a stance alone")


HAZARD = Hazard(
    id="B7",
    name="stance",
    title="A compiler stance set in one thread acts in all",
    symptom=(
        "Compiled functions run eager, or raise `Detected recompile when torch.compile stance is 'fail_on_recompile'`, though "
        "their thread has set no stance; or everything stays eager after two threads have used `set_stance` at once."
    ),
    mechanism=(
        "`torch.compiler.set_stance` writes one object of the process, which every compiled call reads. A `with` block puts "
        "back what it found when it was made: of two that overlap, the last to end puts back the other one's stance."
    ),
    links=(),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("stance",),
    finding="stance",
    fix="Install the guard: a block acts for its own thread. A plain `set_stance(...)` still sets the process; make it once.",
)
