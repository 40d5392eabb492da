"""B1: all wrappers of one function share one cache and its limit; past it they run eager, without a word."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard


def affected() -> Affected:
    import torch._dynamo.config as config

    if hasattr(config, "recompile_limit"):
        return Affected(True, f"entries hang on the code object; `recompile_limit` of all wrappers is {config.recompile_limit}")
    return Affected(False, "there is no `torch._dynamo.config.recompile_limit`")


def eager_wrappers(num_wrappers: int) -> int:
    """Compile one function once per "device" (each stands for itself by a shape of its own); how many end up eager?"""
    import torch

    ran: list[bool] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return compiled

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    num_eager = 0
    for device in range(num_wrappers):
        wrapper = torch.compile(step, backend=backend, dynamic=False)
        x = torch.ones(device + 2)
        wrapper(x)
        ran.clear()
        wrapper(x)
        num_eager += not ran
    return num_eager


def trigger() -> str | None:
    num_eager = eager_wrappers(12)
    if num_eager:
        return f"{num_eager} of 12 torch.compile wrappers of one function, one per device, run eager from now on"
    return None


def mirror() -> None:
    if eager_wrappers(3):
        raise AssertionError("a wrapper ran eager below the limit")


HAZARD = Hazard(
    id="B1",
    name="recompile_limit",
    title="One compile cache and limit for all wrappers, devices and threads",
    symptom=(
        "`torch._dynamo hit config.recompile_limit (8)`, once, then silent eager for the rest of the run; with "
        "`fullgraph=True` `FailOnRecompileLimitHit`; with flex_attention the unfused path, and memory runs out."
    ),
    mechanism=(
        "Compiled entries hang on the function's code object, so one `torch.compile` wrapper per device isolates "
        "nothing. Past the limit the code object is marked run-only: no thread compiles it again."
    ),
    links=("pytorch#91777", "pytorch#178344", "pytorch#114511", "vllm#27178", "torchtitan#3898"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=(),
    finding="recompile-limit",
    outcome="explained",
    fix="Use `compile_guard.compile`: one cache and limit per wrapper and device. Or raise `recompile_limit`.",
)
