"""A4: `torch.compiler.is_compiling()` is True in threads that compile nothing."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    import torch

    if not hasattr(torch.compiler, "_is_compiling_flag"):
        return Affected(False, "there is no global `torch.compiler._is_compiling_flag`")
    if hasattr(torch.compiler, "_compile_session_context"):
        return Affected(True, "`torch.compiler._is_compiling_flag` is a global, set by each Dynamo compile and each export")
    return Affected(True, "`torch.compiler._is_compiling_flag` is a global, set by each export")


def seen_beside_a_compile() -> str | None:
    import torch

    compiling, asked = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiling.set()
        wait(asked)
        return graph.forward

    @torch.compile(backend=backend)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def ask() -> bool:
        wait(compiling)
        try:
            return torch.compiler.is_compiling()
        finally:
            asked.set()

    if run_threads(compiler=lambda: compiled(torch.ones(2)), innocent=ask)["innocent"]:
        return "torch.compiler.is_compiling() was True in a thread that compiles nothing, beside another's compile"
    return None


def seen_beside_an_export() -> str | None:
    import torch

    exporting, asked = threading.Event(), threading.Event()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            exporting.set()
            wait(asked)
            return x.sin()

    def ask() -> bool:
        wait(exporting)
        try:
            return torch.compiler.is_compiling()
        finally:
            asked.set()

    def export() -> None:
        torch.export.export(Model(), (torch.ones(2),), strict=False)

    if run_threads(exporter=export, innocent=ask)["innocent"]:
        return "torch.compiler.is_compiling() was True in a thread that compiles nothing, beside another's export"
    return None


def trigger() -> str | None:
    return "; ".join(filter(None, [seen_beside_a_compile(), seen_beside_an_export()])) or None


def mirror() -> None:
    import torch

    seen: dict[str, bool] = {}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        seen["backend"] = torch.compiler.is_compiling()
        return graph.forward

    @torch.compile(backend=backend)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        # Folded while it is traced: compiled code takes the compiling branch, whatever a guard does to the function.
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen["export"] = torch.compiler.is_compiling()
            return x.sin()

    x = torch.ones(2)
    if not torch.equal(compiled(x), x.sin()):
        raise AssertionError("compiled code no longer sees is_compiling() True")
    torch.export.export(Model(), (x,), strict=False)
    if not seen["export"]:
        raise AssertionError("an export no longer sees is_compiling() True")
    if torch.compiler.is_compiling():
        raise AssertionError("is_compiling() stayed True")


HAZARD = Hazard(
    id="A4",
    name="is_compiling_leak",
    title="is_compiling() is True in threads that compile nothing",
    symptom=(
        "No error: eager code that branches on `torch.compiler.is_compiling()` takes the other branch, now and "
        "then, while another thread compiles or exports."
    ),
    mechanism=(
        "`torch.compiler._is_compiling_flag` is one global. Export sets it while it runs, since 2.13 each Dynamo "
        "compile too; every thread reads it. It also switches off the check of A1 for all threads meanwhile."
    ),
    links=("pytorch#184614", "pytorch#184547"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "compiling_flags", "export"),
    finding="is-compiling",
    fix="Install the guard, which answers for the calling thread; or compile and export before threads start.",
)
