"""B5: a function is compiled again because another thread has an older thread count; in a recompute that is an error."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from torch._C._dynamo.guards import GlobalStateGuard

    names = GlobalStateGuard().__getstate__() if hasattr(GlobalStateGuard, "__getstate__") else ""
    if "num_threads" in str(names):
        return Affected(True, "GLOBAL_STATE guards the intra-op thread count, which each thread has for itself")
    return Affected(False, "GLOBAL_STATE does not guard the intra-op thread count")


def behind(before: Callable[[], Any], work: Callable[[Any], Any]) -> Any:
    """Run `work` in a thread that has computed with two intra-op threads, on what `before` returned here with one."""
    import torch

    started, ready = threading.Event(), threading.Event()
    made: list[Any] = []
    prior = torch.get_num_threads()

    def old_thread() -> Any:
        torch.get_num_threads()  # from now on the thread has the count that was set last
        started.set()
        wait(ready)
        return work(made[0])

    def here() -> None:
        wait(started)
        torch.set_num_threads(1)
        made.append(before())
        ready.set()

    torch.set_num_threads(2)
    try:
        return run_threads(old_thread=old_thread, here=here)["old_thread"]
    finally:
        torch.set_num_threads(prior)


def compiled_again() -> str | None:
    """A warm function, called in a thread that is older than the thread count."""
    import torch

    num_compiles = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    behind(lambda: step(torch.ones(4)), lambda _: step(torch.ones(4)))
    return f"a warm function was compiled {num_compiles} times, once for each thread count" if num_compiles > 1 else None


def other_code_in_the_recompute() -> str | None:
    """A checkpointed block whose backward runs in the other thread, where its compiled function has no entry left."""
    import torch
    from torch.utils.checkpoint import CheckpointError, checkpoint

    @torch.compile(backend="aot_eager_decomp_partition", dynamic=False)
    def block(x: torch.Tensor) -> torch.Tensor:
        return x.reshape(2, 2).sin().cos()

    def forward() -> Any:
        return checkpoint(block, torch.ones(4, requires_grad=True), use_reentrant=False).sum()

    def backward(loss: Any) -> str | None:
        try:
            with torch._dynamo.config.patch(recompile_limit=1):
                loss.backward()
        except CheckpointError as error:
            return f"a recompute in the other thread ran other code: CheckpointError: {str(error).splitlines()[0]}"
        return None

    said: str | None = behind(forward, backward)
    return said


def trigger() -> str | None:
    said = [compiled_again(), other_code_in_the_recompute()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    num_compiles = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        return graph.forward

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    prior = torch.get_num_threads()
    torch.set_num_threads(2)  # before any thread computes
    try:
        step(torch.ones(4))
        run_threads(worker=lambda: step(torch.ones(4)))
        run_threads(other=lambda: step(torch.ones(4)))
    finally:
        torch.set_num_threads(prior)
    if num_compiles != 1:
        raise AssertionError(f"compiled {num_compiles} times for one thread count")


HAZARD = Hazard(
    id="B5",
    name="global_state",
    title="A function is compiled again because another thread has another thread count or autocast",
    symptom=(
        "`TORCH_LOGS=recompiles` says `GLOBAL_STATE changed: num_threads` (or autocast, grad_mode); with checkpointing "
        "`CheckpointError: ... tensors have different metadata than during the forward pass`, or `A different number of "
        "tensors was saved`, on some ranks."
    ),
    mechanism=(
        "Every compiled function guards the intra-op thread count, autocast and grad mode. They belong to the thread: an "
        "autograd or pool thread keeps the count that was in force when it first computed, and begins without autocast. It "
        "misses the cache, and at the recompile limit runs eager; in a recompute other code saves other tensors."
    ),
    links=("ecmwf/anemoi-core#1330", "pytorch#111569", "pytorch#113246"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("thread_count", "single_flight"),
    finding="global-state",
    fix=(
        "Install the guard, under which such a thread catches up; a lost autocast is reported: enter it inside the thread, or "
        "use `compile_guard.Worker`. Else call `torch.set_num_threads` once, before any thread computes."
    ),
)
