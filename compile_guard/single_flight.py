"""One compile where N threads miss the same cache: after winning the lock, look again.

The lock is the flight. It ends with the compile, not with the call, and when its leader fails the next waiter tries.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import CodeType, FrameType
from typing import Any, Protocol

from compile_guard import waits
from compile_guard.by_identity import ByIdentity
from compile_guard.eager_calls import EAGER, Fallback
from compile_guard.entry import RetryCompiledCall, may_retry
from compile_guard.events import span
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.tracing import TRACE_LOCK

device_of_clone: ByIdentity[str] = ByIdentity()
"""The device of each clone that `compile_guard.compile` has made, by the clone's code."""


class DynamoFrame(Protocol):
    """What Dynamo hands to its callback."""

    f_code: CodeType
    f_globals: dict[str, Any]
    f_locals: dict[str, Any]


class CompileSeam(Protocol):
    """What single-flight has to know of torch; `torch_seams` answers."""

    def passing_entry(self, frame: DynamoFrame) -> CodeType | None:
        """Code of the first cache entry whose guards hold for this frame."""

    def backend(self, converter: Any) -> object:
        """The backend behind Dynamo's converter, by which the cache tells wrappers apart."""

    def passing_entry_in_step(self, frame: DynamoFrame) -> tuple[CodeType, str] | None:
        """The same, once what belongs to the thread and fell behind the process has caught up; and what that was."""

    def note_state(self, frame: DynamoFrame) -> None:
        """A compile is about to begin: reports if it is for a state that this thread has lost, and notes that state."""

    def compiled_code(self, result: Any) -> CodeType | None:
        """The code that a compile has made; None when it made none."""

    def ran_into_limit(self, result: Any) -> bool:
        """Whether a compile was refused because the function has too many entries."""

    def limit_reason(self, code: CodeType) -> str:
        """The limit that was hit and the number of entries, for people."""

    def calls_flex(self, frame: DynamoFrame) -> bool:
        """Whether the function calls flex_attention, as far as its names tell."""

    def settings(self, code: CodeType) -> AbstractContextManager[Any]:
        """Puts in force what is asked for this compile alone: the code object's own recompile limit, and `dynamic=`."""

    def explain(self, frame: DynamoFrame, error: RuntimeError) -> None:
        """Reports what is known of why a compile failed."""

    def is_in_callback(self, frame: FrameType | None) -> bool:
        """Whether the thread with this innermost frame is inside Dynamo's callback."""

    def entry_of_first_frame(self, frame: FrameType | None) -> FrameType | None:
        """Our entry's frame where, seen from Dynamo's callback, the frame is the first of its call: nothing has happened
        in it yet."""


class _Converting(threading.local):
    def __init__(self) -> None:
        self.now = False


_converting = _Converting()


def is_converting() -> bool:
    """Whether the calling thread is inside Dynamo's converter."""
    return _converting.now


class SingleFlight:
    """Stands around Dynamo's converter, inside the compile lock."""

    def __init__(self, seam: CompileSeam, on_compile: Callable[[str], None]) -> None:
        self._seam = seam
        self._on_compile = on_compile
        self._compiled_by: ByIdentity[int] = ByIdentity()
        self._backend_of: ByIdentity[object] = ByIdentity()

    def wrap(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`ConvertFrame.__call__` that compiles nothing that another thread has compiled meanwhile."""

        def convert(converter: Any, frame: DynamoFrame, *args: Any, **kwargs: Any) -> Any:
            if _converting.now:  # ConvertFrame calls ConvertFrameAssert: one look is enough
                return original(converter, frame, *args, **kwargs)
            backend = self._seam.backend(converter)
            self._look_again(frame, backend)
            self._seam.note_state(frame)
            TRACE_LOCK.describe(f"torch.compile of {frame.f_code.co_name}")
            where = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}"
            self._on_compile(f"{frame.f_code.co_name} ({where})")
            with span("compile", what=frame.f_code.co_name, where=where) as logged:
                _converting.now = True
                try:
                    with self._seam.settings(frame.f_code):
                        result = original(converter, frame, *args, **kwargs)
                except RuntimeError as error:
                    self._seam.explain(frame, error)
                    raise
                finally:
                    _converting.now = False
                code = self._seam.compiled_code(result)
                limited = code is None and self._seam.ran_into_limit(result)
                logged.fields["outcome"] = "compiled" if code is not None else "limit" if limited else "skipped"
            if code is not None:
                self._backend_of[code] = backend
                self._compiled_by[frame.f_code] = threading.get_ident()
            elif limited:
                self._report_limit(frame)
            return result

        return convert

    def _look_again(self, frame: DynamoFrame, backend: object) -> None:
        passing = self._seam.passing_entry(frame)
        if passing is None and self._waited_for_the_entry(frame.f_code):
            passing = self._seam.passing_entry(frame)
        caught_up = None
        if passing is None:
            in_step = self._seam.passing_entry_in_step(frame)
            if in_step is None:
                return
            passing, caught_up = in_step
        made_by = self._backend_of.get(passing)
        if made_by is None or not (made_by is backend or made_by == backend):
            return
        # Frames further in have begun: their callers' side effects would happen twice.
        entry = self._seam.entry_of_first_frame(sys._getframe(2))
        retry = entry is not None and may_retry(entry)
        if caught_up is not None:
            self._report_state(frame.f_code, caught_up, retry)
            if retry:
                raise RetryCompiledCall
            return
        findings.report(
            Finding(
                code="duplicate-compile",
                subject=frame.f_code.co_name,
                title=f"`{frame.f_code.co_name}` was about to be compiled a second time",
                now=this_thread(f"compiles {frame.f_code.co_name}"),
                shared="the cache of its code object, which torch does not look at again after waiting for the lock",
                consequence="one compile and one cache entry for each thread; the recompile limit on the first step",
                fix="keep compile_guard.install(), or compile_guard.warmup() before the threads start"
                if retry
                else "compile_guard.warmup() before the threads start: this frame is inside a call that has begun",
                prevented=retry,
            )
        )
        if retry:
            raise RetryCompiledCall

    def _report_state(self, code: CodeType, state: str, prevented: bool) -> None:
        findings.report(
            Finding(
                code="global-state",
                subject=code.co_name,
                title=f"`{code.co_name}` was about to be compiled again, for another intra-op thread count in this thread",
                now=this_thread(f"calls {code.co_name}"),
                shared=f"{state}; every compiled function guards it, and each thread keeps the one it began with",
                consequence="one more compile for each thread, eager runs at the recompile limit; in a checkpoint's recompute "
                "`CheckpointError`, since other code saves other tensors",
                fix="keep compile_guard.install(), or call torch.set_num_threads() once, before any thread computes",
                prevented=prevented,
            )
        )

    def _waited_for_the_entry(self, code: CodeType) -> bool:
        """torch puts what was compiled into the cache when its callback is over, a moment after the lock was given back."""
        ident = self._compiled_by.get(code)
        if ident is None:
            return False
        waited = False
        # A thread that waits in turn is in its next compile: the entry of the last one is in the cache.
        while ident != threading.get_ident() and ident not in waits.waiting():
            if not self._seam.is_in_callback(sys._current_frames().get(ident)):
                return True
            waited = True
            time.sleep(0.0001)  # lets that thread have the GIL, which is all that it needs
        return waited

    def _report_limit(self, frame: DynamoFrame) -> None:
        code = frame.f_code
        device = device_of_clone.get(code)
        if device is None:
            where = "in every thread and on every device"
            shared = "one cache for all wrappers and devices of this code object"
            fix = "compile_guard.compile() instead of torch.compile(): each wrapper and device has a cache of its own"
        else:
            where = f"in every thread that calls this wrapper on {device}"
            shared = f"this wrapper's cache for {device}, which all threads share and no other wrapper or device does"
            fix = (
                "a larger compile_guard.compile(recompile_limit=), or fewer kinds of input: dynamic=True, padded shapes; "
                "TORCH_LOGS=recompiles tells what differs"
            )
        flex = self._seam.calls_flex(frame)
        entry = self._seam.entry_of_first_frame(sys._getframe(2))
        why = f"the recompile limit ({self._seam.limit_reason(code)})"
        fallen = EAGER.fell(code, Fallback(code.co_name, "unfitting", why, fix, flex), is_top=entry is not None)
        findings.report(
            Finding(
                code="recompile-limit",
                subject=code.co_name,
                title=f"`{code.co_name}` runs eager from now on for inputs it is not compiled for, {where}",
                now=this_thread(f"calls {code.co_name} ({code.co_filename}:{code.co_firstlineno})"),
                shared=f"{shared}: {self._seam.limit_reason(code)}",
                consequence="silent eager runs for the rest of the process"
                + "; flex_attention then computes all its scores into memory" * flex,
                fix=fix,
                prevented=False,
            )
        )
        EAGER.runs_eager(fallen, entry)
