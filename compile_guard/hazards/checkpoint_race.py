"""D2: in threads that share a device, a checkpoint's recompute draws other random numbers than its forward did."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import meet, run_threads

NUM_THREADS = 3


def affected() -> Affected:
    # One generator per device is how torch works; that checkpoint saves and restores it shows in the trigger alone.
    return Affected(True, "all threads draw from one generator per device, which checkpoint saves and sets back")


def different_recomputes(*, use_reentrant: bool, at_once: bool) -> int:
    """Train a checkpointed block with dropout in three threads; in how many did the recompute draw another mask?"""
    import torch
    from torch.utils.checkpoint import checkpoint

    device = "cuda" if torch.cuda.is_available() else "cpu"
    all_saved, one_backward = threading.Barrier(NUM_THREADS), threading.Lock()
    masks: dict[int, list[torch.Tensor]] = {number: [] for number in range(NUM_THREADS)}

    def block(x: torch.Tensor, number: int) -> torch.Tensor:
        # The state that recompute starts from was saved just before. Once all three have saved the same state, at
        # most one of them draws what follows from it.
        if at_once and not masks[number]:
            meet(all_saved)
        y = torch.nn.functional.dropout(x, 0.5)
        masks[number].append(y.detach() != 0)
        return y.sin()  # saves y: a recompute that stops early comes this far

    def train(number: int) -> None:
        x = torch.ones(1000, device=device, requires_grad=True)
        y: Any = checkpoint(block, x, number, use_reentrant=use_reentrant)
        # One recompute at a time: two that interleave could come out equal by chance.
        with one_backward:
            y.sum().backward()

    bodies: dict[str, Callable[[], None]] = {f"trainer_{i}": partial(train, i) for i in range(NUM_THREADS)}
    if at_once:
        run_threads(**bodies)
    else:
        for name, body in bodies.items():
            run_threads(**{name: body})
    return sum(not torch.equal(*masks[number]) for number in range(NUM_THREADS))


def trigger() -> str | None:
    said = []
    for use_reentrant in (False, True):
        num_different = different_recomputes(use_reentrant=use_reentrant, at_once=True)
        if num_different:
            said.append(f"in {num_different} of {NUM_THREADS} threads with use_reentrant={use_reentrant}")
    return f"dropout under checkpoint: forward and recompute drew different masks {', '.join(said)}" if said else None


def mirror() -> None:
    for use_reentrant in (False, True):
        num_different = different_recomputes(use_reentrant=use_reentrant, at_once=False)
        if num_different:
            raise AssertionError(f"{num_different} recomputes differ in threads that ran one after the other")


HAZARD = Hazard(
    id="D2",
    name="checkpoint_race",
    title="Checkpoint recomputes with other random numbers than forward drew",
    symptom="No error: wrong gradients wherever a checkpointed block draws random numbers (dropout, noise).",
    mechanism=(
        "`torch.utils.checkpoint` saves the state of the device's generator before the block and sets it back for "
        "the recompute. The generator is one per device: what other threads draw between the saving and the "
        "block's own draw is in the forward and not in the recompute; and setting it back rewinds the other "
        "threads."
    ),
    links=("pytorch#96764", "pytorch#97436", "pytorch#148023"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("checkpoint",),
    finding="checkpoint-rng",
    fix="Install the guard, which replays what forward drew; or give each thread a device of its own, not the CPU.",
)
