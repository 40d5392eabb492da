"""`torch.utils.checkpoint` whose recompute draws what its forward drew, whichever threads draw meanwhile.

The stock function saves the state of the process-wide generators, and sets it back for the recompute: another thread's
draws land in between, forward and recompute differ, and the gradient belongs to another forward (pytorch#105943 asks for
threads). Here no generator is touched: what each random op returned is kept with the block and handed back in order.
It costs the memory of those outputs and takes no lock. The recompute also runs in the forward's `contextvars`, in which
torch 2.12 and later keep their configuration.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compile_guard.findings import Finding, findings, this_thread

if TYPE_CHECKING:
    from compile_guard.torch_seams import RandomOps


class ReplayError(RuntimeError):
    """A recompute drew other random numbers than its forward, in number or in kind."""


class Tape:
    """What the random ops of one block returned, in order."""

    def __init__(self) -> None:
        self._drawn: list[tuple[str, Any]] = []

    def __len__(self) -> int:
        return len(self._drawn)

    def record(self, op: str, returned: Any) -> None:
        """Keep `returned`, tensors copied: the block may write into them."""
        self._drawn.append((op, returned))

    def at(self, position: int, op: str) -> Any:
        """What the op at `position` returned in the forward.

        Raises:
            ReplayError: there was none, or it was another op.
        """
        if position >= len(self._drawn) or self._drawn[position][0] != op:
            then = self._drawn[position][0] if position < len(self._drawn) else "no further random op"
            raise ReplayError(
                f"a checkpointed block draws {op} as random op {position + 1} of its recompute, where its forward had "
                f"{then}. The block must do the same work both times: look for branches on state that changes between them."
            )
        return self._drawn[position][1]


class _ThisThread(threading.local):
    """A mark of the calling thread. Unlike its ident, it is not given to another thread once this one has ended."""

    def __init__(self) -> None:
        self.mark = object()


_this_thread = _ThisThread()


class _Drawing:
    """Which threads are inside a checkpointed block that draws; for the finding alone."""

    def __init__(self) -> None:
        self._threads: dict[int, int] = {}

    def enter(self) -> None:
        me = threading.get_ident()
        self._threads[me] = self._threads.get(me, 0) + 1

    def leave(self) -> None:
        me = threading.get_ident()
        left = self._threads[me] - 1
        if left:
            self._threads[me] = left
        else:
            del self._threads[me]

    def report_overlap(self) -> None:
        others = [ident for ident in list(self._threads) if ident != threading.get_ident()]
        if not others:
            return
        findings.report(
            Finding(
                code="checkpoint-rng",
                subject="torch.utils.checkpoint",
                title="checkpointed blocks of two threads draw random numbers at the same time",
                now=this_thread("draws inside a checkpointed block"),
                shared="the default generator of the device, whose state each recompute sets back",
                consequence="the recompute draws other numbers than the forward, silently: gradients of another forward",
                fix="keep compile_guard.install(), or compile_guard.checkpoint()",
                prevented=True,
            )
        )


_drawing = _Drawing()


class Block:
    """The function of one checkpointed call: its first run records, every later one replays."""

    def __init__(self, function: Callable[..., Any], random_ops: RandomOps, *, replay: bool) -> None:
        self._function = function
        self._random_ops = random_ops
        self._replay = replay
        self._tape: Tape | None = None
        self._thread = _this_thread.mark
        self._context = contextvars.copy_context()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._tape is None:
            self._tape = Tape()
            if not self._replay:
                return self._function(*args, **kwargs)
            return self._run(self._random_ops.recording(self._tape, _drawing.report_overlap), args, kwargs)
        if _this_thread.mark is not self._thread:
            self._random_ops.report_lost_config(self._context)
            # A copy: the same context may be entered by two recomputes at once.
            return self._context.copy().run(self._recompute, args, kwargs)
        return self._recompute(args, kwargs)

    def _recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._replay:
            return self._function(*args, **kwargs)
        assert self._tape is not None
        return self._run(self._random_ops.replaying(self._tape, _drawing.report_overlap), args, kwargs)

    def _run(self, mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _drawing.enter()
        try:
            with mode:
                return self._function(*args, **kwargs)
        finally:
            _drawing.leave()


def thread_safe_checkpoint(original: Callable[..., Any], random_ops: RandomOps) -> Callable[..., Any]:
    """Stands for `torch.utils.checkpoint.checkpoint`, both modes.

    Not left to the stock way where the process has one thread: another may start before the backward.
    """

    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if random_ops.is_tracing():
            return original(function, *args, **kwargs)
        replay = kwargs.pop("preserve_rng_state", True)
        return original(Block(function, random_ops, replay=replay), *args, preserve_rng_state=False, **kwargs)

    return checkpoint


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint(function, *args, **kwargs)`, safe in threads; a drop-in for it.

    Under `install()` the stock function does the same; this one says so at the call, and installs the guard.

    Raises:
        ReplayError: the recompute drew other random ops than the forward.
    """
    import torch.utils.checkpoint

    from compile_guard.install import install

    install()
    kwargs.setdefault("use_reentrant", False)
    return torch.utils.checkpoint.checkpoint(function, *args, **kwargs)
