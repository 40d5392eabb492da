"""Checkpointed blocks replay what random ops returned, and keep compiled code inside them compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import Context
from typing import Any

from compile_guard import tracing
from compile_guard.activation_checkpoint import Block, Tape, thread_safe_checkpoint
from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.single_flight import is_converting
from compile_guard.torch_seams._seam import Seam, skip_code
from compile_guard.torch_seams.configuration import config_of
from compile_guard.torch_seams.trace_lock import on_own_thread
from compile_guard.trace_lock import TraceLock
from compile_guard.tracing import TRACE_LOCK


class RandomOps:
    """Dispatch modes that record and replay what random ops return, and questions about the configuration."""

    def __init__(self) -> None:
        import torch
        from torch.utils import _python_dispatch
        from torch.utils._pytree import tree_map_only

        self._seeded = torch.Tag.nondeterministic_seeded
        self._modes = _python_dispatch
        clone: Callable[[Any], Any] = lambda tree: tree_map_only(torch.Tensor, torch.clone, tree)  # noqa: E731
        base = _python_dispatch.TorchDispatchMode
        seeded = self._seeded

        class _Mode(base):  # type: ignore[misc, valid-type]
            """Pushed by hand: `__enter__` sets process-wide flags that make Dynamo run other threads eager."""

            def __init__(self, tape: Tape, on_draw: Callable[[], None]) -> None:
                super().__init__()
                self._tape = tape
                self._position = 0
                self._on_draw = on_draw

            @classmethod
            def ignore_compile_internals(cls) -> bool:
                # Compiled functions stay compiled under this mode; their seeds come through it as `randint.low_out`.
                return True

            def __enter__(self) -> Any:
                _python_dispatch._push_mode(self)
                _active.modes.append(self)
                return self

            def __exit__(self, *exc: object) -> None:
                _active.modes.pop()
                _python_dispatch._pop_mode()

        class _Recording(_Mode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                returned = func(*args, **(kwargs or {}))
                if seeded in func.tags:
                    self._on_draw()
                    self._tape.record(str(func), clone(returned))
                return returned

        class _Replaying(_Mode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if seeded not in func.tags:
                    return func(*args, **kwargs)
                self._on_draw()
                drawn = self._tape.at(self._position, str(func))
                self._position += 1
                # Ops that write into an argument (`bernoulli_`, `randint.low_out`) return that argument.
                target = kwargs.get("out", args[0] if args and func._schema.is_mutable else None)
                if func._schema.is_mutable and isinstance(target, torch.Tensor):
                    with torch.no_grad():
                        return target.copy_(drawn)
                return clone(drawn)

        self.recording: Callable[[Tape, Callable[[], None]], Any] = _Recording
        self.replaying: Callable[[Tape, Callable[[], None]], Any] = _Replaying

    @staticmethod
    def is_tracing() -> bool:
        """Whether the calling thread is inside a trace, which has a way of its own for checkpointed blocks."""
        import torch

        return bool(torch.compiler.is_compiling()) or tracing.tracing_here() or TRACE_LOCK.owned()

    @staticmethod
    def report_lost_config(context: Context) -> None:
        """Report a recompute on another thread whose torch configuration is not that of its forward."""
        here = {var: value for var, value in config_of(None).items()}
        there = config_of(context)
        lost = sorted(var.name for var in there.keys() | here.keys() if there.get(var) != here.get(var))
        if lost:
            findings.report(
                Finding(
                    code="config-lost",
                    subject=", ".join(lost),
                    title="a checkpointed block is recomputed on a thread that has not its forward's configuration",
                    now=this_thread("recomputes a checkpointed block"),
                    shared=f"torch's configuration, kept for each thread since torch 2.12: {', '.join(lost)}",
                    consequence="limits and switches set in the training thread do not hold in the backward: recompiles, "
                    "silent eager runs, or a recompute that differs",
                    fix="keep compile_guard.install(), or compile_guard.checkpoint()",
                    prevented=True,
                )
            )


class _Active(threading.local):
    """Recording or replaying modes of this thread, outermost first."""

    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.lifted = False


_active = _Active()


def _checkpoint(patches: Patches) -> None:
    import torch.utils.checkpoint

    original: list[Any] = []
    function = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    safe = thread_safe_checkpoint(lambda *a, **k: original[0](*a, **k), RandomOps())
    original.append(patches.swap_code(function, safe))
    for code in (safe.__code__, Block.__call__.__code__, Block._recompute.__code__, Block._run.__code__):
        skip_code(code)


def _recompute_once(patches: Patches) -> None:
    """A block whose tensors two autograd threads unpack, since it spans two devices, is recomputed by the first of them."""
    from torch.utils.checkpoint import _checkpoint_hook

    make_hooks = _checkpoint_hook.__init__

    def make_hooks_locked(self: Any, frame: Any) -> None:
        make_hooks(self, frame)
        unpack = self.unpack_hook
        # Who recomputes runs a backward inside the block on its own thread: the other device's may be waiting here.
        lock = TraceLock("the recompute of a checkpointed block", entered=on_own_thread)
        lock.on_contention = _report_second_recompute

        def locked(holder: Any) -> Any:
            with lock.hold("a recompute"):
                return unpack(holder)

        skip_code(locked.__code__)
        self.unpack_hook = locked

    patches.set_attribute(_checkpoint_hook, "__init__", make_hooks_locked)


def _report_second_recompute(what: str, owner: int | None, doing: str | None) -> None:
    findings.report(
        Finding(
            code="double-recompute",
            subject="torch.utils.checkpoint",
            title="two devices' autograd threads want the same checkpointed block recomputed",
            now=this_thread("unpacks a tensor of the block"),
            other=other_thread(owner, "recomputes the block"),
            shared="the block's `is_recomputed`, asked and set without a lock (pytorch#96764)",
            consequence="the block is recomputed twice at once: CheckpointError, or twice the work and memory",
            fix="keep compile_guard.install(), or end the checkpointed block where the device changes",
            prevented=True,
        )
    )


def guards_fail_under_modes() -> bool:
    """Whether a dispatch mode makes every guard of a compiled function fail (2.9, 2.10), whatever the mode says of itself."""
    from torch._C._dynamo import guards

    return not hasattr(guards, "set_is_in_mode_without_ignore_compile_internals")


def _modes_lifted(patches: Patches) -> None:
    """Take our dispatch modes off around compiled calls, so that those stay compiled inside checkpointed blocks."""
    import torch
    from torch._dynamo import eval_frame
    from torch.utils import _python_dispatch

    set_eval_frame = eval_frame._maybe_set_eval_frame

    def maybe_set_eval_frame(callback: Any) -> Any:
        modes = _active.modes
        if modes:
            compiled = callback is not None
            if compiled and not _active.lifted and _python_dispatch._get_current_dispatch_mode() is modes[-1]:
                _python_dispatch._pop_mode()
                _active.lifted = True
                _active.state = torch.random.get_rng_state()
            elif not compiled and _active.lifted and not is_converting():
                # (What Dynamo disables while it compiles works on fake tensors, which are none of the block's.)
                _python_dispatch._push_mode(modes[-1])
                _active.lifted = False
                if not torch.equal(_active.state, torch.random.get_rng_state()):
                    _report_unreplayed()
        return set_eval_frame(callback)

    patches.set_attribute(eval_frame, "_maybe_set_eval_frame", maybe_set_eval_frame)


def _report_unreplayed() -> None:
    findings.report(
        Finding(
            code="checkpoint-rng",
            subject="compiled function in a checkpointed block",
            title="a compiled function inside a checkpointed block drew random numbers, or another thread did meanwhile",
            now=this_thread("leaves the compiled function"),
            shared="the process-wide CPU generator, from which this torch's compiled code draws its seeds",
            consequence="its recompute draws other numbers than its forward: gradients of another forward",
            fix="move the dropout out of the compiled function, or use torch 2.11 or newer, where the draws are replayed",
            prevented=False,
        )
    )


SEAMS = (
    Seam("checkpoint", "a recompute draws what its forward drew, in its forward's configuration", _checkpoint),
    Seam("recompute_once", "a block that spans two devices is recomputed once in a backward", _recompute_once),
    Seam(
        "modes_lifted",
        "compiled functions inside checkpointed blocks stay compiled",
        _modes_lifted,
        guards_fail_under_modes,
    ),
)
