"""F3: `sdpa_kernel`, tf32, the default dtype are the process's; threads that set them for themselves set them for all."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    return Affected(True, "the flags are those of torch's one global context; the trigger is the test")


def overlapping_blocks() -> str | None:
    """Two threads choose a backend of attention, each in a block; the first to begin is the first to end."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda: Any = torch.backends.cuda
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    before = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()

    def first() -> bool:
        with sdpa_kernel(SDPBackend.MATH):
            first_in.set()
            wait(second_in)
            allowed: bool = cuda.math_sdp_enabled()
        first_out.set()
        return allowed

    def second() -> bool:
        wait(first_in)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            second_in.set()
            wait(first_out)
            allowed: bool = cuda.flash_sdp_enabled()
        return allowed

    has_its_own = run_threads(first=first, second=second)
    said = [
        f"the {name} of two threads, inside its own sdpa_kernel block, does not have the backend that it chose"
        for name, own in has_its_own.items()
        if not own
    ]
    after = cuda.flash_sdp_enabled(), cuda.math_sdp_enabled()
    if after != before:
        said.append(f"with both blocks over, flash and math attention are {after} for good, not {before}")
    return "; ".join(said) or None


def set_for_all() -> str | None:
    """This thread has chosen a precision; another chooses one for itself."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        run_threads(other=lambda: torch.set_float32_matmul_precision("highest"))
        found = torch.get_float32_matmul_precision()
    finally:
        torch.set_float32_matmul_precision(before)
    return None if found == "high" else f"float32_matmul_precision set to high is {found}: another thread set it for itself"


def trigger() -> str | None:
    return "; ".join(filter(None, [overlapping_blocks(), set_for_all()])) or None


def mirror() -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cuda: Any = torch.backends.cuda
    torch.set_float32_matmul_precision("high")  # once, before the threads start

    def attend() -> bool:
        with sdpa_kernel(SDPBackend.MATH), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            torch.set_float32_matmul_precision("high")  # changes nothing
            return not cuda.math_sdp_enabled()

    for _ in range(2):
        if not run_threads(worker=attend)["worker"] or not cuda.math_sdp_enabled():
            raise AssertionError("nested sdpa_kernel blocks of one thread are not in force, or are not undone")


HAZARD = Hazard(
    id="F3",
    name="numeric_switches",
    title="Numeric switches and attention backends set in one thread hold in all",
    symptom=(
        "Attention that takes another kernel than its block chose, or `No available kernel`; flash attention off for the rest "
        "of the run; results in another precision, and `GLOBAL_STATE changed` recompiles in other threads."
    ),
    mechanism=(
        "The flags of scaled-dot-product attention, tf32 and matmul precision, determinism and the default dtype live in one "
        "global context. `sdpa_kernel` saves, sets and puts back: of two overlapping blocks the last to end leaves what the "
        "other had set."
    ),
    links=("pytorch#111569", "anemoi-core#1330"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("numeric_switches", "sdpa_blocks"),
    finding="numeric-switch",
    outcome="detected",
    fix="Set them once, before the threads start. The guard leaves the backends as they were after overlapping blocks.",
)
