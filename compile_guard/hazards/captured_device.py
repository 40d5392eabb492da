"""E10: a compiled function that captures a tensor of one device (a block mask, a score_mod's bias) is called on another."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads


def devices() -> tuple[str, str]:
    """Two devices: the first two GPUs; one GPU and the CPU; else the CPU and `meta`, which stands for another GPU."""
    import torch

    if torch.cuda.device_count() > 1:
        return "cuda:0", "cuda:1"
    return ("cuda:0", "cpu") if torch.cuda.is_available() else ("cpu", "meta")


def affected() -> Affected:
    return Affected(True, "a closure's tensors stay on the device where they were made; no torch moves them")


def call_on_each(devices: tuple[str, str], *, captured_for_each: bool) -> str | None:
    """One thread for each device calls a scoring function whose bias was made on the first device, or on each."""
    import torch

    def make_scorer(device: str) -> Any:
        bias = torch.ones(4, 4, device=device)

        def score_mod(score: torch.Tensor) -> torch.Tensor:
            return score + bias

        class Attention(torch.nn.Module):
            def forward(self, query: torch.Tensor) -> torch.Tensor:
                return score_mod(query @ query.T).softmax(-1)

        return Attention()

    shared = torch.compile(make_scorer(devices[0]), backend="eager")
    for device in devices:
        scorer = torch.compile(make_scorer(device), backend="eager") if captured_for_each else shared
        query = torch.ones(4, 4, device=device)

        def work(scorer: Any = scorer, query: torch.Tensor = query) -> str | None:
            try:
                scorer(query)
            except RuntimeError as raised:
                return f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
            return None

        failed: str | None = run_threads(worker=work)["worker"]
        if failed is not None:
            return f"a thread on {device} called a function that captured a tensor on {devices[0]}: {failed}"
    return None


def trigger() -> str | None:
    return call_on_each(devices(), captured_for_each=False)


def mirror() -> None:
    said = call_on_each(devices(), captured_for_each=True)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="E10",
    name="captured_device",
    title="A compiled function shared by devices captures a tensor of one of them",
    symptom=(
        "`TorchRuntimeError: ... Expected all tensors to be on the same device`, `found two different devices`, or "
        "`MultiOutput object has no attribute inner_fn` out of a compiled flex_attention, in all threads but one."
    ),
    mechanism=(
        "A `score_mod` or `mask_mod` closure, or a module-level BlockMask, holds tensors of the device where it was made. "
        "One such function for all threads works on that device alone; where it does not fail, it recompiles for each."
    ),
    links=("attention-gym#135", "pytorch#91777"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("single_flight",),
    finding="captured-device",
    outcome="explained",
    fix="Make what the function captures once for each device (a dictionary by device), or pass it in as an argument.",
)
