"""E2: two threads launch one autotuned Triton kernel; one tunes, and finds the other's arguments, or none."""

from __future__ import annotations

import importlib
import importlib.util
import threading
from collections.abc import Callable
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    if importlib.util.find_spec("triton") is None:
        return Affected(True, "this torch came without Triton, whose Autotuner keeps the arguments in itself", runnable=False)
    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner
    if "nargs" in tuner.run.__code__.co_names:
        return Affected(True, "Triton's `Autotuner.run` keeps the arguments of the call in `self.nargs`")
    return Affected(False, "Triton's `Autotuner.run` keeps no arguments in the kernel object")


class Kernel:
    """Stands for a jitted kernel: what the tuner calls, done by torch. The tuner is what races; no GPU is needed for it."""

    @staticmethod
    def fn(out: Any, x: Any, n: int, **config: Any) -> None:
        out.copy_(x + 1)

    def run(self, *args: Any, grid: Any, warmup: bool, **config: Any) -> None:
        self.fn(*args, **config)


def tune_beside_a_launch(*, at_once: bool) -> str | None:
    """One thread's launch must tune; while it measures, the other's launch, of a size tuned before, begins and ends."""
    import torch

    triton: Any = importlib.import_module("triton.runtime.autotuner")

    measuring, launched = threading.Event(), threading.Event()
    num_measured = 0

    def measure(kernel: Callable[[], None], quantiles: Any = None) -> list[float]:
        nonlocal num_measured
        num_measured += 1
        if num_measured == 3:  # the first of the second tuning
            measuring.set()
            if at_once:
                wait(launched)
        kernel()
        return [float(num_measured)] * 3

    tuned = triton.Autotuner(
        Kernel(),
        ["out", "x", "n"],
        [triton.Config({"BLOCK": block}) for block in (16, 32)],
        ["n"],
        reset_to_zero=["out"],
        restore_value=None,
        do_bench=measure,
    )

    def launch(size: int) -> torch.Tensor:
        x = torch.arange(size, dtype=torch.float32)
        out = torch.full((size,), -1.0)
        tuned[(1,)](out, x, size)
        return out

    launch(32)  # tunes this size

    def tune() -> str | None:
        try:
            out = launch(64)
        except (TypeError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        return None if torch.equal(out, torch.arange(64.0) + 1) else "wrong values"

    def launch_tuned() -> str | None:
        wait(measuring)
        try:
            out = launch(32)
        finally:
            launched.set()
        return None if torch.equal(out, torch.arange(32.0) + 1) else "wrong values"

    if not at_once:
        said = run_threads(tuner=tune) | run_threads(caller=launch_tuned)
    else:
        said = run_threads(tuner=tune, caller=launch_tuned)
    failed = {name: error for name, error in said.items() if error}
    if not failed:
        return None
    return "; ".join(f"the {name} of an autotuned kernel, launched by two threads: {error}" for name, error in failed.items())


def trigger() -> str | None:
    return tune_beside_a_launch(at_once=True)


def mirror() -> None:
    said = tune_beside_a_launch(at_once=False)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="E2",
    name="autotuner_race",
    title="An autotuned Triton kernel tunes on another thread's arguments",
    symptom=(
        "`TypeError: 'NoneType' object is not a mapping` out of `triton/runtime/autotuner.py`; or another thread's output "
        "set to zero, or set back, while this one tunes (`reset_to_zero`, `restore_value`)."
    ),
    mechanism=(
        "`Autotuner.run` keeps the call's arguments in `self.nargs` of the kernel object, and None when it is over; the "
        "hooks that reset or restore tensors between two measurements, and those that prune configurations, read them "
        "there. The GIL is free while the GPU is measured, so that another thread's launch comes between."
    ),
    links=("triton#11494", "triton#11509", "triton#8437", "triton#5893"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("triton_autotuner",),
    finding="autotuner-race",
    fix="Install the guard, under which each thread's launch has its own arguments; or launch each kernel once beforehand.",
)
