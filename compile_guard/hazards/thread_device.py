"""E3: a new thread starts on device 0, and without the default device that its starter has set."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads


def affected() -> Affected:
    # That a thread starts so is documented for CUDA's current device; for `set_default_device` the trigger is the test.
    return Affected(True, "the default device (a thread-local) and the current device of a new thread are torch's defaults")


def default_device_lost() -> str | None:
    """Set the default device in this thread, and let a new one make a tensor and call a warm compiled function."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "meta")
    num_compiles = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        return graph.forward

    @torch.compile(backend=backend)
    def make() -> torch.Tensor:
        return torch.ones(4) + 1

    torch.set_default_device(device)
    try:
        make()
        found: torch.Tensor = run_threads(worker=make)["worker"]
    finally:
        torch.set_default_device(None)
    if found.device.type == device.type:
        return None
    return (
        f"with the default device set to {device}, a new thread made its tensors on {found.device}; one function was "
        f"compiled {num_compiles} times for it"
    )


def current_device_lost() -> str | None:
    """Make the last GPU current in this thread, and ask a new one."""
    import torch

    last = torch.cuda.device_count() - 1
    before = torch.cuda.current_device()
    torch.cuda.set_device(last)
    try:
        current: int = run_threads(worker=torch.cuda.current_device)["worker"]
    finally:
        torch.cuda.set_device(before)
    if current == last:
        return None
    return f"started from a thread whose current device is cuda:{last}, a new thread works on cuda:{current}"


def trigger() -> str | None:
    import torch

    said = [default_device_lost()]
    if torch.cuda.device_count() > 1:
        said.append(current_device_lost())
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch

    def make() -> torch.device:
        with torch.device("meta"):
            return torch.ones(4).device

    # Nobody has set a default: a new thread has nothing to lose, and what it sets ends with its block.
    if run_threads(worker=make)["worker"].type != "meta" or torch.ones(4).device.type != "cpu":
        raise AssertionError("a device context is not that of its thread")


HAZARD = Hazard(
    id="E3",
    name="thread_device",
    title="A new thread does not have the device of the thread that started it",
    symptom=(
        "Tensors on the CPU or on GPU 0; `Pointer argument (at 0) cannot be accessed from Triton (cpu tensor?)`; kernels "
        "of all threads on GPU 0; a second compile of every function that makes a tensor."
    ),
    mechanism=(
        "CUDA's current device and torch's default device (`set_default_device`, contrary to common belief) belong to "
        "each thread. Triton launches user kernels on the current device, whatever the tensors' device; compiled "
        "functions guard on the default device."
    ),
    links=("triton#2441", "triton#2925", "pytorch#91777", "pytorch#196150"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("device_inherit",),
    finding="thread-device",
    fix="Install the guard, whose threads start on their starter's device; or `Worker(device=...)`, or `set_device` in each.",
)
