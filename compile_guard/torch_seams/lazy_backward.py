"""A backward that is compiled at its first call is compiled under the trace lock."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

from compile_guard.events import span
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, notify_compile, skip_code
from compile_guard.tracing import TRACE_LOCK


def _lazy_backward(patches: Patches) -> None:
    """Take the lock from the first step of a lazy backward compile, not only around Inductor's part of it.

    `force_non_lazy_backward_lowering` would avoid lazy compiles altogether, but a backward compiled with the forward has
    its donated buffers fixed, and a first backward with `retain_graph=True`, which works lazily, then raises.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    compiler = getattr(runtime_wrappers, "_AutogradBackwardCompiler", None)
    if compiler is not None:
        original = compiler.get_or_compile

        def get_or_compile(self: Any, **kwargs: Any) -> Any:
            if self.compiled_bw is not None:
                return self.compiled_bw
            with TRACE_LOCK.hold("a lazy backward compile"):
                if self.compiled_bw is not None:  # another thread has compiled it meanwhile
                    return original(self, **kwargs)
                notify_compile("a backward")
                with span("compile", what="a backward", outcome="compiled"):
                    return original(self, **kwargs)

        skip_code(get_or_compile.__code__)
        patches.set_attribute(compiler, "get_or_compile", get_or_compile)
    else:
        _lazy_backward_of_class(patches, runtime_wrappers)


class _LazyBackward(threading.local):
    """Set while this thread holds the lock for a lazy backward compile whose end is the end of its tracing context."""

    def __init__(self) -> None:
        self.pending: span | None = None


def _lazy_backward_of_class(patches: Patches, runtime_wrappers: ModuleType) -> None:
    """torch up to 2.12: the compile is written out in `CompiledFunction._backward_impl`, a class made for each graph.

    The lock is taken before that looks whether it is compiled, and given back when the compile ends (its tracing context
    closes), not when the first call does: a collective in the backward would otherwise wait with the lock held.
    """
    lazy = _LazyBackward()
    post_compile = runtime_wrappers.RuntimeWrapper.post_compile
    tracing_context = runtime_wrappers.tracing

    def locked(cls: Any) -> None:
        backward_impl = cls._backward_impl

        def _backward_impl(ctx: Any, all_args: Any) -> Any:
            if cls.compiled_bw is not None:
                return backward_impl(ctx, all_args)
            TRACE_LOCK.acquire("a lazy backward compile", frame=sys._getframe())
            if cls.compiled_bw is not None:
                TRACE_LOCK.release()
                return backward_impl(ctx, all_args)
            lazy.pending = span("compile", what="a backward", outcome="compiled")
            try:
                notify_compile("a backward")
                return backward_impl(ctx, all_args)
            finally:
                if lazy.pending is not None:
                    lazy.pending = None
                    TRACE_LOCK.release()

        skip_code(_backward_impl.__code__)
        cls._backward_impl = staticmethod(_backward_impl)

    class _TracingThenRelease:
        def __init__(self, context: Any) -> None:
            self._inner = tracing_context(context)

        def __enter__(self) -> Any:
            self._ours, lazy.pending = lazy.pending, None
            return self._inner.__enter__()

        def __exit__(self, *exc: Any) -> Any:
            try:
                return self._inner.__exit__(*exc)
            finally:
                if self._ours is not None:
                    self._ours.end()
                    TRACE_LOCK.release()

    def post_compile_locked(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        cls = getattr(compiled_fn, "__self__", None)
        if cls is not None and hasattr(cls, "compiled_bw") and hasattr(cls, "_backward_impl"):
            locked(cls)
        return post_compile(self, compiled_fn, *args, **kwargs)

    patches.set_attribute(runtime_wrappers.RuntimeWrapper, "post_compile", post_compile_locked)
    patches.set_attribute(runtime_wrappers, "tracing", _TracingThenRelease)


SEAMS = (Seam("lazy_backward", "a lazy backward compile holds the trace lock from its first step", _lazy_backward),)
