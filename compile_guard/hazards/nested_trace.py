"""A6: one thread traces over a compiled function. An error by right; what the guard adds is the explanation."""

from __future__ import annotations

from compile_guard.hazards._hazard import Affected, Hazard


def affected() -> Affected:
    import torch._dynamo.config as config

    if hasattr(config, "error_on_nested_fx_trace"):
        return Affected(True, "`torch._dynamo.config.error_on_nested_fx_trace` exists: tracing over compiled code is an error")
    return Affected(False, "there is no `torch._dynamo.config.error_on_nested_fx_trace`")


def trigger() -> str | None:
    import torch

    @torch.compile(backend="eager")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    inner(torch.ones(4))
    try:
        torch.fx.symbolic_trace(outer)
    except RuntimeError as error:
        if "using FX to symbolically trace" not in str(error):
            raise
        return f"symbolic_trace of a function that calls a compiled one raised RuntimeError: {error}"
    return None


def mirror() -> None:
    import torch

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    # Traced first, compiled afterwards: the order that always worked.
    graph = torch.fx.symbolic_trace(outer)
    torch.compile(graph, backend="eager")(torch.ones(4))


HAZARD = Hazard(
    id="A6",
    name="nested_trace",
    title="One thread traces over a compiled function",
    symptom="`RuntimeError: Detected that you are using FX to symbolically trace a dynamo-optimized function`.",
    mechanism=(
        "FX can only record Python that runs, and a compiled function runs generated code. The message is the one "
        "of A1 and says nothing about threads, so the two are easily taken for each other."
    ),
    links=("pytorch#167116", "pytorch#179836", "pytorch#111321"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("fx_flag",),
    finding="nested-trace",
    outcome="explained",
    fix="Trace the function that is not compiled, or compile what the trace returned.",
)
