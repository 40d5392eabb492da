"""Switches of the whole process that threads set for themselves: default dtype, tf32, determinism, attention backends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compile_guard import tracing
from compile_guard.findings import Actor, Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code
from compile_guard.tracing import TRACE_LOCK


def _report(switch: str, other: int, doing: str, did: str) -> None:
    findings.report(
        Finding(
            code="numeric-switch",
            subject=switch,
            title=f"two threads set {switch}, of which the process has one",
            now=this_thread(doing),
            other=other_thread(other, did),
            shared=f"{switch}, read by every operation of every thread and guarded by every compiled function",
            consequence="the other thread computes in another precision or with another kernel, and recompiles; what is put "
            "back last stays",
            fix="set it once, before the threads start; to build modules in a dtype, hold compile_guard.exclusive()",
            prevented=False,
        )
    )


class _Writers:
    """Which thread has set which switch last. Who holds the trace lock is alone, and is not noted."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._meanwhile: dict[str, tuple[Callable[[], Any], Any, Callable[[], None], Actor]] = {}
        """Switches that were set while another thread compiles, which puts back what it found: how each is read, what it was
        set to, how, and by whom."""

    def setting(self, switch: str, read: Callable[[], Any], write: Callable[[], None]) -> None:
        """Write a switch, and report if that changes what another living thread has set."""
        before = read()
        write()
        if TRACE_LOCK.owned() or read() == before:
            return
        if TRACE_LOCK.owner is not None:
            self._meanwhile[switch] = (read, read(), write, this_thread(f"sets {switch} while another thread compiles"))
        me = threading.get_ident()
        last, self._last[switch] = self._last.get(switch, me), me
        if last != me and any(thread.ident == last for thread in threading.enumerate()):
            _report(switch, last, f"sets {switch}", "has set it before")


    def set_again(self) -> None:
        """A compile is over: what another thread has set meanwhile holds, not what the compile put back."""
        while self._meanwhile:
            switch, (read, value, write, writer) = self._meanwhile.popitem()
            if read() == value:
                continue
            write()
            report_rewind(switch, writer, f"the {switch} of another thread is undone, in the middle of its run")


def report_rewind(what: str, now: Actor, consequence: str) -> None:
    """A compile would have put back what another thread had changed meanwhile."""
    findings.report(
        Finding(
            code="state-rewind",
            subject=what,
            title=f"{what}: a compile would have put back what another thread has changed meanwhile",
            now=now,
            shared=f"{what}, of which the process has one; a compile saves it and puts it back",
            consequence=consequence,
            fix="keep compile_guard.install(); compile before the threads start; draw from a torch.Generator of one's own",
            prevented=True,
        )
    )


def _numeric_switches(patches: Patches) -> None:
    import torch
    from torch import backends

    writers = _Writers()
    tracing.when_idle.append(writers.set_again)
    patches.on_undo("switches set during a compile", lambda: tracing.when_idle.remove(writers.set_again))

    def watched(function: Any, read: Callable[[], Any]) -> None:
        original: list[Callable[..., None]] = []
        name = f"torch.{function.__name__}"

        def watch(*args: Any, **kwargs: Any) -> None:
            writers.setting(name, read, lambda: original[0](*args, **kwargs))

        original.append(patches.swap_code(function, watch))
        for each in (function, watch):
            skip_code(each.__code__)

    watched(torch.set_default_dtype, torch.get_default_dtype)
    watched(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision)
    for function in (torch.use_deterministic_algorithms, torch.set_deterministic_debug_mode):
        watched(function, torch.get_deterministic_debug_mode)

    set_property: Any = backends.ContextProp.__set__
    set_cublas: Any = backends.cuda.cuBLASModule.__setattr__

    def set_property_watched(self: Any, module: Any, value: Any) -> None:
        name = f"torch.backends: {getattr(self.setter, '__name__', 'a switch').removeprefix('_set_')}"
        writers.setting(name, self.getter, lambda: set_property(self, module, value))

    def set_cublas_watched(self: Any, name: str, value: Any) -> None:
        switch = f"torch.backends.cuda.matmul.{name}"
        writers.setting(switch, lambda: getattr(self, name, None), lambda: set_cublas(self, name, value))

    patches.set_attribute(backends.ContextProp, "__set__", set_property_watched)
    patches.set_attribute(backends.cuda.cuBLASModule, "__setattr__", set_cublas_watched)


@dataclass(slots=True, eq=False)
class _Scope:
    """One `with sdpa_kernel(...)` that has begun and not ended."""

    thread: int
    backends: Any


class _Scopes:
    def __init__(self) -> None:
        self.open: list[_Scope] = []
        self.outside: Any = None
        """Backends as they were when no block was open."""
        self.overlap = False
        """Blocks of two threads have been open since: what each puts back may be the other's."""


def _sdpa_blocks(patches: Patches) -> None:
    """Blocks of two threads that overlap leave the backends as they were; inside, each has those of the last to begin."""
    from torch.nn import attention

    scopes = _Scopes()
    original: list[Callable[..., Iterator[Any]]] = []

    def suspended(*args: Any, **kwargs: Any) -> Iterator[Any]:
        me = threading.get_ident()
        if not scopes.open:
            scopes.outside, scopes.overlap = attention._cur_sdpa_kernel_backends(), False
        other = next((scope.thread for scope in scopes.open if scope.thread != me), None)
        if other is not None:
            scopes.overlap = True
            _report("sdpa_kernel", other, "enters sdpa_kernel", "is inside a block of its own")
        try:
            with contextmanager(original[0])(*args, **kwargs) as entered:
                scope = _Scope(me, attention._cur_sdpa_kernel_backends())
                scopes.open.append(scope)
                try:
                    yield entered
                finally:
                    scopes.open.remove(scope)
        finally:
            if scopes.overlap:
                attention._sdpa_kernel(scopes.open[-1].backends if scopes.open else scopes.outside)

    function = attention.sdpa_kernel.__wrapped__  # type: ignore[attr-defined]
    original.append(patches.swap_code(function, suspended))
    for each in (function, suspended):
        skip_code(each.__code__)


SEAMS = (
    Seam("numeric_switches", "a switch that two threads set is reported", _numeric_switches),
    Seam("sdpa_blocks", "overlapping `sdpa_kernel` blocks leave the backends as they were", _sdpa_blocks),
)
