"""A3: what FX patches into `nn.Module` for one trace acts on all threads, is stripped by others, or stays for ever."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    import torch.fx._symbolic_trace as symbolic_trace

    if hasattr(symbolic_trace, "CURRENT_PATCHER"):
        return Affected(True, "`fx.Tracer.trace` patches the class `nn.Module`, and `CURRENT_PATCHER` is one global")
    return Affected(False, "there is no global `torch.fx._symbolic_trace.CURRENT_PATCHER`")


def caught_by_an_innocent_forward() -> str | None:
    """One thread runs an eager layer while another stands inside `symbolic_trace`."""
    import torch

    layer = torch.nn.Linear(2, 2)
    tracing, called = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        tracing.set()
        wait(called)
        return x.cos()

    def call() -> str | None:
        wait(tracing)
        try:
            layer(torch.ones(2))
        except NameError as error:
            return f"an eager nn.Linear called while another thread traces raised NameError: {error}"
        finally:
            called.set()
        return None

    said: str | None = run_threads(tracer=lambda: torch.fx.symbolic_trace(traced), caller=call)["caller"]
    return said


def stripped_by_a_compile() -> str | None:
    """One thread compiles while another stands inside `symbolic_trace` of a module."""
    import torch

    paused, tracing, compiling, traced = (threading.Event() for _ in range(4))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tracing.set()
            wait(compiling)
            y: torch.Tensor = self.layer(x)
            return y

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pause() -> None:
        paused.set()
        wait(tracing)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        if tracing.is_set():
            compiling.set()
            wait(traced)
        return graph.forward

    @torch.compile(backend=backend)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        pause()  # a graph break: what follows is compiled after it, inside a call that began before the trace
        return x.cos()

    def trace() -> list[str]:
        wait(paused)
        try:
            return [node.op for node in torch.fx.symbolic_trace(Model()).graph.nodes]
        finally:
            traced.set()

    operations = run_threads(tracer=trace, compiler=lambda: compiled(torch.ones(2)))["tracer"]
    if "call_module" in operations:
        return None
    return f"a compile in another thread changed what symbolic_trace recorded: no call_module in {operations}"


def left_behind_for_ever() -> str | None:
    """Two traces overlap; the first to begin is the first to end."""
    import torch

    before = torch.nn.Module.__call__
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

    def second() -> str | None:
        wait(first_in)
        try:
            torch.fx.symbolic_trace(traced_second)
        except AssertionError as error:
            return f"the second of two overlapping traces raised AssertionError: {error}"
        return None

    said = [run_threads(first=first, second=second)["second"]]
    if torch.nn.Module.__call__ is not before:
        said.append("both traces have ended, and nn.Module.__call__ is still the first one's wrapper")
        try:
            torch.nn.Linear(2, 2)(torch.ones(2))
        except NameError as error:
            said.append(f"every later forward raises NameError: {error}")
    return "; ".join(filter(None, said)) or None


def trigger() -> str | None:
    # The last leaves the process unusable, so its place is at the end.
    said = [caught_by_an_innocent_forward(), stripped_by_a_compile(), left_behind_for_ever()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    trace_done, forward_done = threading.Event(), threading.Event()

    def trace() -> None:
        torch.fx.symbolic_trace(model)
        trace_done.set()
        wait(forward_done)
        torch.fx.symbolic_trace(model)

    def forward() -> None:
        wait(trace_done)
        model(torch.ones(2))
        compiled(torch.ones(2))
        forward_done.set()

    run_threads(tracer=trace, caller=forward)


HAZARD = Hazard(
    id="A3",
    name="module_patch",
    title="nn.Module patches of a trace act on other threads, or stay for ever",
    symptom=(
        "`NameError: module is not installed as a submodule` out of an ordinary forward; a traced graph that "
        "silently lacks its submodules; after two overlapping traces every forward of the process fails until it "
        "is started anew."
    ),
    mechanism=(
        "`fx.Tracer.trace` replaces `nn.Module.__call__` and `__getattr__` for the whole process, and reverts "
        "whatever is in the global `CURRENT_PATCHER`: with two traces that is the other's. A Dynamo compile "
        "reverts the patches of whichever trace is alive for as long as it runs (`_maybe_revert_all_patches`)."
    ),
    links=("pytorch#187589", "pytorch#189884", "alibaba/TorchEasyRec#615"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "fx_tracer", "module_patches"),
    finding="module-patch",
    fix="Install the guard, or trace only while no other thread runs a model, traces or compiles.",
)
