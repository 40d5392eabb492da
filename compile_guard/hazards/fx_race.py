"""A1: the FX flag of one thread's trace is seen by another thread, which calls a warm compiled function."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    import torch.fx._symbolic_trace as symbolic_trace

    if hasattr(symbolic_trace, "_is_fx_tracing_flag"):
        return Affected(True, "the FX flag is a module global, `torch.fx._symbolic_trace._is_fx_tracing_flag`")
    return Affected(False, "there is no global `_is_fx_tracing_flag`: each thread has a flag of its own")


def trigger() -> str | None:
    import torch

    ran_compiled: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran_compiled.append(True)
            return graph.forward(*args)

        return compiled

    @torch.compile(backend=backend)
    def innocent(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    innocent(x)  # warm: from here on the call needs no compile

    tracing, called = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        tracing.set()
        wait(called)
        return x.cos()

    def call() -> list[str]:
        said = []
        wait(tracing)
        ran_compiled.clear()
        try:
            innocent(x)
        except RuntimeError as error:
            if "using FX to symbolically trace" not in str(error):
                raise
            said.append(f"raised RuntimeError: {error}")
        with torch._dynamo.config.patch(error_on_nested_fx_trace=False):
            innocent(x)
        if not ran_compiled:
            said.append("with error_on_nested_fx_trace=False ran eager, silently")
        return said

    def call_and_tell() -> list[str]:
        try:
            return call()
        finally:
            called.set()

    said = run_threads(tracer=lambda: torch.fx.symbolic_trace(traced), caller=call_and_tell)["caller"]
    if not said:
        return None
    return f"in a thread that traces nothing the call of a warm compiled function {'; '.join(said)}"


def mirror() -> None:
    import torch

    @torch.compile(backend="eager")
    def innocent(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    innocent(x)
    done = threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x.cos()

    def trace() -> None:
        torch.fx.symbolic_trace(traced)
        done.set()

    def call() -> None:
        wait(done)
        innocent(x)

    run_threads(tracer=trace, caller=call)


HAZARD = Hazard(
    id="A1",
    name="fx_race",
    title="FX flag seen by a thread that traces nothing",
    symptom=(
        "`RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function` out of a "
        "call of a warm compiled function; with `error_on_nested_fx_trace=False` the call silently runs eager."
    ),
    mechanism=(
        "`compile_wrapper` asks whether FX is tracing before it looks into the cache, and takes no lock. Up to 2.13 "
        "the answer is one flag for the whole process, set by `fx.Tracer.trace`, through which each make_fx, "
        "symbolic_trace and lazy backward compile of any thread goes."
    ),
    links=("pytorch#126024", "pytorch#118387", "pytorch#168042", "pytorch#168999"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "fx_tracer", "fx_flag"),
    finding="fx-flag",
    fix="Install the guard, or let no thread call compiled functions while another traces; torch 2.14 cured it.",
)
