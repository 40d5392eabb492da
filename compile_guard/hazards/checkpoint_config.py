"""C2: configuration set in one thread is lost in another, and in a checkpoint's recompute on the GPU's thread."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads

LIMIT = 64


def affected() -> Affected:
    from contextvars import ContextVar

    import torch._dynamo.config as config

    entry = config._config["recompile_limit"]
    if isinstance(entry.user_override, ContextVar):
        return Affected(True, "config values are ContextVars: a new thread, and a backward thread, starts from defaults")
    return Affected(False, "config values are plain globals, the same in each thread")


def counting(ran: list[bool]) -> Any:
    """A backend whose compiled code notes each of its runs: eager ones are missing."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return compiled

    return backend


def lost_in_a_worker() -> str | None:
    """Raise the limit in this thread, then compile twelve variants of one function in a new one."""
    import torch

    ran: list[bool] = []

    @torch.compile(backend=counting(ran), dynamic=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def work() -> tuple[int, int]:
        for size in range(2, 14):
            step(torch.ones(size))
        return torch._dynamo.config.recompile_limit, 12 - len(ran)

    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        limit, num_eager = run_threads(worker=work)["worker"]
    if limit == LIMIT:
        return None
    return f"recompile_limit set to {LIMIT} was {limit} in a new thread, where {num_eager} of 12 variants ran eager"


def lost_in_a_recompute(*, use_reentrant: bool) -> str | None:
    """Raise the limit around a whole training step with a checkpointed block on a GPU."""
    import torch
    from torch.utils.checkpoint import checkpoint

    seen: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch._dynamo.config.recompile_limit)
        return x.sin()

    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        x = torch.ones(4, device="cuda", requires_grad=True)
        y: Any = checkpoint(block, x, use_reentrant=use_reentrant)
        y.sum().backward()
    if seen == [LIMIT, LIMIT]:
        return None
    return f"recompile_limit set to {LIMIT} was {seen[-1]} in a checkpoint's recompute (use_reentrant={use_reentrant})"


def lost_in_a_hook() -> str | None:
    """Raise the limit around a backward on a GPU, and compile twelve variants of one function in a gradient's hook."""
    import torch

    ran: list[bool] = []

    @torch.compile(backend=counting(ran), dynamic=False)
    def norm(gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sin().sum()

    def hook(gradient: torch.Tensor) -> None:
        for size in range(2, 14):
            norm(gradient[:size])

    with torch._dynamo.config.patch(recompile_limit=LIMIT):
        x: Any = torch.ones(16, device="cuda", requires_grad=True)
        x.register_hook(hook)
        x.sin().sum().backward()
    num_eager = 12 - len(ran)
    return f"recompile_limit set to {LIMIT}: {num_eager} of 12 variants ran eager in a gradient's hook" if num_eager else None


def trigger() -> str | None:
    import torch

    said = [lost_in_a_worker()]
    if torch.cuda.is_available():  # on the CPU a backward runs in the thread that calls it, and loses nothing
        said += [lost_in_a_recompute(use_reentrant=use_reentrant) for use_reentrant in (False, True)]
        said.append(lost_in_a_hook())
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    @torch.compile(backend="eager", dynamic=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    def work() -> int:
        with torch._dynamo.config.patch(recompile_limit=LIMIT):
            step(torch.ones(2))
            limit: int = torch._dynamo.config.recompile_limit
            return limit

    if run_threads(worker=work)["worker"] != LIMIT:
        raise AssertionError("config set in a thread is not what that thread reads")


HAZARD = Hazard(
    id="C2",
    name="checkpoint_config",
    title="Config set in one thread is lost in another, and in a recompute",
    symptom=(
        "`torch._dynamo hit config.recompile_limit (8)` although it was set to 1024; silent eager, or "
        "`FailOnRecompileLimitHit`, in a worker thread or at the first backward with gradient checkpointing."
    ),
    mechanism=(
        "Since 2.12 each config value is a ContextVar, and a new thread starts with an empty context. The autograd "
        "threads re-enter the caller's context in compiled backwards only: not in hooks, custom `backward`s, or the "
        "recompute of a checkpoint."
    ),
    links=("pytorch#186537", "pytorch#186583", "pytorch#173568"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("config_inherit", "checkpoint", "single_flight"),
    finding="config-lost",
    fix="Install the guard; or set config in each thread and in the recomputed function; or pass `recompile_limit=`.",
)
