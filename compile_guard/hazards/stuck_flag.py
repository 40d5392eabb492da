"""A2: two overlapping traces leave the FX flag set for ever."""

from __future__ import annotations

import contextlib
import threading

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait
from compile_guard.hazards.fx_race import affected as affected_by_a_global_flag


def affected() -> Affected:
    return affected_by_a_global_flag()


def trigger() -> str | None:
    import torch

    @torch.compile(backend="eager")
    def innocent(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    innocent(x)

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def traced_first(x: torch.Tensor) -> torch.Tensor:
        first_in.set()
        wait(second_in)
        return x.cos()

    def traced_second(x: torch.Tensor) -> torch.Tensor:
        second_in.set()
        wait(first_out)
        return x.tan()

    def first() -> None:
        torch.fx.symbolic_trace(traced_first)
        first_out.set()

    def second() -> None:
        wait(first_in)
        # The overlap itself may raise here: "CURRENT_PATCHER is None in finally block" (that part is hazard A3).
        with contextlib.suppress(AssertionError):
            torch.fx.symbolic_trace(traced_second)

    # First in (saves False), second in (saves True), first out (writes False), second out (writes True).
    run_threads(first=first, second=second)
    try:
        innocent(x)
    except RuntimeError as error:
        if "using FX to symbolically trace" not in str(error):
            raise
        return f"both traces have ended, and a warm compiled call still raises RuntimeError: {error}"
    return None


def mirror() -> None:
    import torch

    @torch.compile(backend="eager")
    def innocent(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    first_out = threading.Event()

    def first() -> None:
        torch.fx.symbolic_trace(traced)
        first_out.set()

    def second() -> None:
        wait(first_out)
        torch.fx.symbolic_trace(traced)

    run_threads(first=first, second=second)
    innocent(torch.ones(4))


HAZARD = Hazard(
    id="A2",
    name="stuck_flag",
    title="FX flag left set by overlapping traces",
    symptom=(
        "From some moment on every compiled call of the process raises `Detected that you are using FX to "
        "symbolically trace a dynamo-optimized function` (or runs eager), until it is started anew."
    ),
    mechanism=(
        "`fx.Tracer.trace` saves the process-wide flag in a local variable and writes it back at its end. Of two "
        "traces that overlap, the later to begin saves True; if it is also the later to end, True is what stays."
    ),
    links=("pytorch#126024", "pytorch#168999"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "fx_tracer", "fx_flag"),
    finding="stuck-flag",
    fix="Install the guard, which lets one trace run at a time, or put every trace under one lock of your own.",
)
