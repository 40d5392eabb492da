"""What a trace writes into the process belongs to the thread that traces: flags, patches, and the lock around it all.

Nothing here names private parts of torch: each function takes the original that `torch_seams` found, and returns what
stands in its place.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from compile_guard.events import span
from compile_guard.findings import Finding, findings, other_thread, stack_of, this_thread
from compile_guard.trace_lock import TraceLock

TRACE_LOCK = TraceLock("the trace lock")
"""The one lock. `install()` puts torch's own compile lock into it as its core."""

EXPORT, EXPORT_LOAD = "torch.export", "torch.export.load"
"""What the lock is taken for by an export, and by the load of an exported program."""

NESTED_TRACE_MESSAGE = "using FX to symbolically trace a dynamo-optimized function"


class _Here(threading.local):
    """FX traces of this thread, innermost last: True for a live one, False where a higher-order op suspended it."""

    def __init__(self) -> None:
        self.traces: list[bool] = []


_here = _Here()
_num_live = 0
"""Live FX traces of all threads. Written under the trace lock only; read without."""

LIVE = "__compile_guard_live"
when_idle: list[Callable[[], None]] = []
"""Called as the trace lock falls idle, by the thread that gives it back."""
mirrors_of_live: list[dict[str, Any]] = []
"""Namespaces in which `LIVE` says whether any trace is alive: read on the warm path of every compiled call."""


def _mirror() -> None:
    for namespace in mirrors_of_live:
        namespace[LIVE] = _num_live > 0


def tracing_here() -> bool:
    """Whether the calling thread is inside an FX trace (and no higher-order op has suspended it)."""
    if not _num_live:
        return False
    traces = _here.traces
    return bool(traces) and traces[-1]


def num_live_traces() -> int:
    """FX traces alive in the process."""
    return _num_live


def locked_tracer(original: Callable[..., Any], what: str) -> Callable[..., Any]:
    """A tracer's entry point that holds the trace lock; for tracers that leave the FX flag alone."""

    @functools.wraps(original)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with TRACE_LOCK.hold(what), span("trace", what=what):
            return original(*args, **kwargs)

    return locked


def owned_fx_trace(original: Callable[..., Any]) -> Callable[..., Any]:
    """`fx.Tracer.trace` under the trace lock, with the calling thread noted as the one that traces."""

    @functools.wraps(original)
    def trace(*args: Any, **kwargs: Any) -> Any:
        global _num_live
        with TRACE_LOCK.hold("fx.Tracer.trace"), span("trace", what="fx.Tracer.trace"):
            traces = _here.traces
            # In and out without a call between, where Ctrl-C would strike and leave one of the two behind.
            traces += (True,)
            _num_live += 1
            try:
                _mirror()
                return original(*args, **kwargs)
            except RuntimeError as error:
                if NESTED_TRACE_MESSAGE in str(error) and len(traces) == 1:
                    _explain_nested_trace(error)
                raise
            finally:
                del traces[-1]
                _num_live -= 1
                _mirror()

    return trace


def _explain_nested_trace(error: RuntimeError) -> None:
    """A6: one thread traces over a compiled function. It stays an error; the finding says which call and what to do."""
    trace = error.__traceback__
    assert trace is not None
    while trace.tb_next is not None:
        trace = trace.tb_next
    # The innermost frame is torch's check; the program's own frame outside it is the call to explain.
    stack = stack_of(trace.tb_frame)
    caller = next((row for row in reversed(stack) if f"{os.sep}torch{os.sep}" not in row), stack[-1])
    findings.report(
        Finding(
            code="nested-trace",
            subject=caller.rsplit(" in ", 1)[-1],
            title="an FX trace ran into a compiled function, in one and the same thread",
            now=this_thread(f"traces, and calls the compiled function at {caller}"),
            shared="the trace of this thread: no other thread is involved",
            consequence="the RuntimeError that follows; it is not a race and no lock can cure it",
            fix="trace the function before compiling it (`fn._torchdynamo_orig_callable`), or make the compiled part a "
            "leaf of the tracer",
            prevented=False,
        )
    )


def fx_flag_of_this_thread(is_compiling: Callable[[], bool] | None) -> Callable[[], bool]:
    """`is_fx_tracing` (or, given `is_compiling`, `is_fx_symbolic_tracing`) that speaks of the calling thread.

    Called only while a trace is alive: see `LIVE`.
    """

    def flag() -> bool:
        traces = _here.traces
        if traces:
            return traces[-1] and not (is_compiling is not None and is_compiling())
        _report_foreign_trace()
        return False

    return flag


def _report_foreign_trace() -> None:
    findings.report(
        Finding(
            code="fx-flag",
            subject="compiled call",
            title="a compiled function was called while another thread traces",
            now=this_thread("calls a compiled function"),
            other=other_thread(TRACE_LOCK.owner, f"is inside {TRACE_LOCK.doing}", TRACE_LOCK.held_s),
            shared="FX's process-wide `is tracing` flag, which this torch reads before every compiled call",
            consequence="RuntimeError `Detected that you are using FX to symbolically trace a dynamo-optimized function`, "
            "or a silent eager run where `error_on_nested_fx_trace` is off (pytorch#126024)",
            fix="keep compile_guard.install(), or trace and warm up before the threads start",
            prevented=True,
        )
    )


def suspended_trace(original: Callable[..., Generator[Any, Any, Any]], heal: Callable[[], None]) -> Callable[..., Any]:
    """The generator in which a higher-order op takes the FX flag away while it compiles, for this thread only."""

    def suspended(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        traces = _here.traces
        traces.append(False)
        try:
            return (yield from original(*args, **kwargs))
        finally:
            traces.pop()
            if not _num_live:
                heal()  # the original put back what it had read, which may have been another thread's True

    return suspended


def flag_of_the_owner(name: str) -> Callable[[], bool]:
    """A process-wide `is compiling` flag that is set, read as False by every thread that does not hold the trace lock."""

    def flag() -> bool:
        if TRACE_LOCK.owned():
            return True
        findings.report(
            Finding(
                code="is-compiling",
                subject=name,
                title=f"{name}() was asked while another thread compiles",
                now=this_thread(f"asks {name}()"),
                other=other_thread(TRACE_LOCK.owner, f"is inside {TRACE_LOCK.doing}", TRACE_LOCK.held_s),
                shared="the process-wide flag behind it, set for the whole compile since torch 2.13 (pytorch#184614)",
                consequence="eager code takes its compiling branch, silently, as long as the other thread compiles",
                fix="keep compile_guard.install(), or compile before the threads start",
                prevented=True,
            )
        )
        return False

    return flag


class OwnerOnly:
    """Makes the functions that FX patches in act for the tracing thread alone."""

    def __init__(self) -> None:
        self._reported: set[int] = set()

    def shim(self, patched: Callable[..., Any], stood_there: Callable[..., Any], name: str) -> Callable[..., Any]:
        """`patched` for the calling thread, `stood_there` for every other."""
        me = threading.get_ident()

        @functools.wraps(patched)
        def owner_only(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == me:
                return patched(*args, **kwargs)
            self._report(me, name)
            return stood_there(*args, **kwargs)

        owner_only._compile_guard_shim = stood_there  # type: ignore[attr-defined]
        return owner_only

    def _report(self, owner: int, name: str) -> None:
        trace = TRACE_LOCK.statistics().num_acquired
        if trace in self._reported:  # a forward pass calls hundreds of modules: one report for each trace says it
            return
        self._reported = {trace}
        findings.report(
            Finding(
                code="module-patch",
                subject=name,
                title=f"{name} was called while another thread traces through it",
                now=this_thread(f"calls {name}"),
                other=other_thread(owner, f"is inside {TRACE_LOCK.doing}", TRACE_LOCK.held_s),
                shared=f"{name}, which FX replaces for the whole process while it traces",
                consequence="`NameError: module is not installed as a submodule`, or this thread's calls recorded in the "
                "other one's graph (pytorch#187589)",
                fix="keep compile_guard.install(), or trace before the threads start",
                prevented=True,
            )
        )


owner_only = OwnerOnly()


class _Overlap(NamedTuple):
    """What two traces at once would have done to each other; the fields are those of `Finding`."""

    code: str
    title: str
    shared: str
    consequence: str


_TRACES = _Overlap(
    "stuck-flag",
    "two traces overlap",
    "FX's `is tracing` flag and its patches of nn.Module, saved and put back by each trace on its own",
    "the flag or the patches of the first trace stay for ever, and every later module call or compiled call fails; or a "
    "compile strips the other trace of its patches and its graph changes",
)
_EXPORTS = _Overlap(
    "export-threads",
    "a model is exported while another thread traces",
    "the dispatch mode and module hierarchy of the export in progress, and the flags of the trace: the process has one of each",
    "`ProxyTorchDispatchMode slot already occupied`, `Trying to pop empty mode stack` or `_EXPORT_MODULE_HIERARCHY must not "
    "be None`, in either thread",
)
_LOADS = _Overlap(
    "export-threads",
    "two threads load exported programs",
    "the current deserializer, one for the process (pytorch#195099)",
    "`AssertionError: _CURRENT_DESERIALIZER is already set` in the second thread",
)
_MAKE_FX = _Overlap(
    "make-fx",
    "two make_fx traces overlap",
    "`_CURRENT_MAKE_FX_TRACER`, the one tracer to which higher-order ops (cond, flex_attention) go back",
    "`Cannot reenter make_fx when we're not under a make_fx tracing session`; or, silently, a branch or score function that is "
    "traced with the other thread's modes and decompositions",
)
_LAZY_BACKWARD = _Overlap(
    "lazy-backward",
    "a backward was compiled lazily while another thread compiles",
    "AOTAutograd's tracing context and metrics, and the autograd device thread",
    "errors such as `Metric(s) {'is_forward'} have already been set`, and a backward compiled twice",
)
_DEVICE_THREAD_WAIT = _LAZY_BACKWARD._replace(
    code="device-thread-wait",
    consequence="for ever: the compiling thread asks autograd for a gradient, which this device thread would have to compute",
)


def _overlap(what: str, doing: str) -> _Overlap | None:
    """None where the two may overlap in bare torch as well, or exclude each other there: two Dynamo compiles do."""
    if what.startswith("a lazy backward"):
        return _DEVICE_THREAD_WAIT if isinstance(threading.current_thread(), threading._DummyThread) else _LAZY_BACKWARD
    if what == EXPORT_LOAD:
        return _LOADS if doing == EXPORT_LOAD else None
    if what == EXPORT:
        return _EXPORTS
    if what == "make_fx" and TRACE_LOCK.is_inside("make_fx"):
        return _MAKE_FX
    return _TRACES if "fx.Tracer.trace" in (what, doing) else None


def report_contention(what: str, owner: int | None, doing: str | None) -> None:
    """A thread is about to wait for the trace lock: say so where overlapping would have done harm."""
    overlap = None if doing is None else _overlap(what, doing)
    if overlap is None:
        return
    findings.report(
        Finding(
            **overlap._asdict(),
            subject=what,
            now=this_thread(f"enters {what}"),
            other=other_thread(owner, f"is inside {doing}", TRACE_LOCK.held_s),
            fix="keep compile_guard.install(); to avoid the wait, compile and trace before the threads start",
            prevented=True,
        )
    )
