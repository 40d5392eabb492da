"""D6: a checkpointed block that spans two devices is recomputed by both devices' autograd threads at once."""

from __future__ import annotations

import threading

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import wait


def affected() -> Affected:
    import torch
    from torch.utils import checkpoint

    if not hasattr(checkpoint, "_checkpoint_hook"):
        return Affected(False, "non-reentrant checkpoint has no `_checkpoint_hook`, whose unpacking is not locked")
    because = "`_checkpoint_hook` asks and notes without a lock whether its block is recomputed in this backward"
    return Affected(True, because, runnable=torch.cuda.is_available())


def recomputes(*, devices: tuple[str, str]) -> tuple[int, str | None]:
    """Train one checkpointed block with an input on each device; how often was it recomputed, and with what error?"""
    import torch
    from torch.utils.checkpoint import checkpoint

    runs: list[str] = []
    second_begun = threading.Event()

    def block(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(threading.current_thread().name)
        if len(runs) == 2 and devices[0] != devices[1]:
            wait(second_begun)  # the other device's thread must not come: this recompute serves both
        elif len(runs) > 2:
            second_begun.set()
        return a.sin(), b.sin()

    a, b = (torch.ones(4, device=device, requires_grad=True) for device in devices)
    outputs = checkpoint(block, a, b, use_reentrant=False)
    error = None
    try:
        torch.autograd.backward([each.sum() for each in outputs])
    except (RuntimeError, AssertionError) as raised:
        error = f"{type(raised).__name__}: {str(raised).splitlines()[0]}"
    else:
        if not all(each.grad is not None and torch.allclose(each.grad.cpu(), torch.ones(4).cos()) for each in (a, b)):
            error = "gradients are wrong"
    return len(runs) - 1, error


def trigger() -> str | None:
    num_recomputes, error = recomputes(devices=("cpu", "cuda"))
    if num_recomputes == 1 and error is None:
        return None
    said = f"a checkpointed block on the CPU and a GPU was recomputed {num_recomputes} times in one backward"
    return said if error is None else f"{said}: {error}"


def mirror() -> None:
    num_recomputes, error = recomputes(devices=("cuda", "cuda"))
    if (num_recomputes, error) != (1, None):
        raise AssertionError(f"a block on one device was recomputed {num_recomputes} times; {error}")


HAZARD = Hazard(
    id="D6",
    name="double_recompute",
    title="A checkpointed block that spans two devices is recomputed twice at once",
    symptom=(
        "`CheckpointError: ... trying to save more tensors during recomputation than during the original forward pass`, "
        "an internal assertion, or silently twice the work, in a model that is split over devices."
    ),
    mechanism=(
        "`_checkpoint_hook.unpack_hook` tests `frame.is_recomputed[gid]`, recomputes, then sets it, with no lock. Each "
        "device has an autograd thread of its own: both find it unset, and both fill the same `recomputed` and "
        "`recomp_counter` of the frame."
    ),
    links=("pytorch#96764", "pytorch#97436"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("recompute_once",),
    finding="double-recompute",
    fix="Install the guard: the second thread waits for the first one's recompute. Or end the block where the device changes.",
)
