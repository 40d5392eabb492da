"""The trace lock in place of torch's compile lock, and what is mended as it falls idle."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compile_guard import tracing
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam
from compile_guard.tracing import TRACE_LOCK


def on_own_thread(then: Callable[[], None] = lambda: None) -> Callable[[], None]:
    """Make every backward of the calling thread run on the thread itself; returns what undoes it, and does `then`.

    A holder of the trace lock that waited for an autograd device thread would wait for ever where that thread, running
    somebody else's backward, waits for the lock to compile it.
    """
    import torch

    prior: bool = torch._C._is_multithreading_enabled()

    def leaving() -> None:
        torch._C._set_multithreading_enabled(prior)
        then()

    try:
        torch._C._set_multithreading_enabled(False)
        return leaving
    except BaseException:  # a KeyboardInterrupt: the lock is not taken, and nobody else would put this back
        torch._C._set_multithreading_enabled(prior)
        raise


def _trace_lock(patches: Patches) -> None:
    from torch._dynamo import convert_frame

    original = convert_frame.compile_lock
    TRACE_LOCK.core = original
    TRACE_LOCK.entered = functools.partial(on_own_thread, heal)
    TRACE_LOCK.on_contention = tracing.report_contention
    patches.set_attribute(convert_frame, "compile_lock", TRACE_LOCK)

    def restore() -> None:
        TRACE_LOCK.entered = TRACE_LOCK.on_contention = None

    patches.on_undo("the trace lock", restore)


def heal() -> None:
    """Mend the FX flag, the `is compiling` flags and FX's patches of `nn.Module`, if no trace is alive and they are left set.

    Only what a tracer wrote is touched: a user's own patch of `nn.Module.__call__` stays.
    """
    import torch
    from torch.fx import _symbolic_trace as fx

    if tracing.num_live_traces():
        return
    for mend in tracing.when_idle:
        mend()
    healed = []
    if getattr(fx, "_is_fx_tracing_flag", False):
        fx._is_fx_tracing_flag = False
        healed.append("FX's tracing flag")
    for name in ("_is_compiling_flag", "_is_exporting_flag"):
        if getattr(torch.compiler, name, False):
            setattr(torch.compiler, name, False)
            healed.append(f"torch.compiler.{name}")
    for name, pristine in (("__call__", fx._orig_module_call), ("__getattr__", fx._orig_module_getattr)):
        current = getattr(torch.nn.Module, name)
        if current is not pristine and _left_by_a_tracer(current):
            setattr(torch.nn.Module, name, pristine)
            healed.append(f"nn.Module.{name}")
            fx.CURRENT_PATCHER = None
    if healed:
        findings.report(
            Finding(
                code="stuck-flag" if healed[0].startswith("FX") else "module-patch",
                subject=", ".join(healed),
                title="a trace that is over had left its marks on the process; they were taken off",
                now=this_thread("finds no trace alive"),
                shared=", ".join(healed),
                consequence="every later compiled call or module call fails, or runs eager, until the process ends",
                fix="call compile_guard.install() before the first thread traces",
                prevented=True,
            )
        )


def _left_by_a_tracer(function: Any) -> bool:
    from torch.fx import _symbolic_trace as fx

    if hasattr(function, "_compile_guard_shim"):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == fx.__file__ and code.co_name.endswith("_wrapper")


SEAMS = (
    Seam(
        "trace_lock",
        "one owner-aware lock in place of torch's compile lock; autograd stays on the holder's thread",
        _trace_lock,
    ),
)
