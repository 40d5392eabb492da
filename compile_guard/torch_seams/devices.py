"""The device of a thread, and tensors of other devices in what it compiles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

if TYPE_CHECKING:
    import torch

_DEVICE = "_compile_guard_device"
"""Attribute of a thread: what gives it its starter's device, until it runs."""


def capture_device() -> Callable[[], None] | None:
    """Default device and current GPU of the calling thread, if they are not torch's defaults; calling the result gives
    them to the thread that calls."""
    import torch

    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    # Only where CUDA is in use: to ask for the current device would initialise it.
    current = torch.cuda.current_device() if torch.cuda.is_initialized() else 0  # type: ignore[no-untyped-call]
    if context is None and not current:
        return None

    def apply() -> None:
        if current:
            torch.cuda.set_device(current)
        if context is not None:
            torch.set_default_device(context.device)

    return apply


def _report_inherited(name: str) -> None:
    findings.report(
        Finding(
            code="thread-device",
            subject="threading.Thread",
            title="a thread is started from one that has set its default device or its current GPU",
            now=this_thread(f"starts thread {name}"),
            shared="the default device and the current GPU, which belong to each thread; a new one has torch's",
            consequence="tensors on the CPU or kernels on GPU 0; every function that makes a tensor is compiled once more",
            fix="keep compile_guard.install() or use compile_guard.Worker(device=...); or set the device in the thread",
            prevented=True,
        )
    )


def _device_inherit(patches: Patches) -> None:
    """A thread starts on the device of the one that starts it."""
    start, run_thread = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_device(self: threading.Thread) -> None:
        apply = capture_device()
        if apply is not None:
            setattr(self, _DEVICE, apply)
            _report_inherited(self.name)
        start(self)

    def bootstrap_on_device(self: threading.Thread) -> None:
        apply = self.__dict__.pop(_DEVICE, None)
        if apply is not None:
            apply()
        run_thread(self)

    patches.set_attribute(threading.Thread, "start", start_with_device)
    patches.set_attribute(threading.Thread, "_bootstrap_inner", bootstrap_on_device)


_MAX_DEPTH = 4
"""How many closures deep a captured tensor is looked for."""


def _tensors(name: str, value: Any, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a value is, holds, or closes over, each with the name by which a reader finds it."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, torch.nn.Module):
        for inner, tensor in value.state_dict(keep_vars=True).items():
            yield f"{name}.{inner}", tensor
        if depth:
            yield from _tensors(f"{name}.forward", getattr(value.forward, "__func__", None), depth - 1)
    elif isinstance(value, (list, tuple)) and depth:
        for index, each in enumerate(value):
            yield from _tensors(f"{name}[{index}]", each, depth - 1)
    elif isinstance(value, FunctionType) and depth:
        for inner, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            yield from _tensors(f"{inner} (captured by {value.__name__})", content, depth - 1)


def explain_devices(name: str, variables: dict[str, Any], error: RuntimeError) -> None:
    """After a compile that failed on devices: say which tensor of the frame, or of its closures, is where."""
    if "device" not in str(error):
        return
    found: dict[str, list[str]] = {}
    for variable, value in variables.items():
        for where, tensor in _tensors(variable, value):
            found.setdefault(str(tensor.device), []).append(where)
    if len(found) < 2:
        return
    places = "; ".join(f"{', '.join(dict.fromkeys(names))} on {device}" for device, names in found.items())
    findings.report(
        Finding(
            code="captured-device",
            subject=name,
            title=f"`{name}` is compiled with tensors of several devices",
            now=this_thread(f"compiles {name}"),
            shared=places,
            consequence="the error that follows, in every thread but those on the device of the captured tensor",
            fix="make what the function captures (block mask, bias) once for each device, or pass it in as an argument",
            prevented=False,
        )
    )


SEAMS = (Seam("device_inherit", "a thread starts on the device of its starter", _device_inherit),)
