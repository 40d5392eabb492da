"""The way into a compiled function: calls are counted, stop at the gate that `reset` closes, may be asked to begin again."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from compile_guard import waits
from compile_guard.findings import Finding, GuardError, findings, other_thread, this_thread

RESET_WAIT_S = 60.0
"""How long `reset` waits for compiled calls to end before it gives up."""

_POLL_S = 0.01
"""How often a waiting `reset` looks: a call that ends tells nobody, that would cost every warm call."""

_STALE_LOOKS = 100
"""Looks in a row that find no compiled call on any stack, after which a count that is not zero is known to be left over by
an exception that arrived between two lines (KeyboardInterrupt)."""


class RetryCompiledCall(BaseException):
    """Leaves a compiled call that has not begun: another thread has just compiled what it was about to compile.

    A BaseException, so that no `except Exception` on the way takes it for a failure.
    """


class _Attempt(threading.local):
    def __init__(self) -> None:
        self.second: list[FrameType] = []
        """Frames of the entries of this thread that are at their second attempt."""


_attempt = _Attempt()
_running: list[None] = []
"""One item for each compiled call that has begun and not ended, of any thread: `append` and `pop` are atomic and cheap."""
_gate_closed = False


class once_more:  # noqa: N801 - reads as a statement
    """The second attempt of a call that was asked to retry. There is no third: what then misses is compiled."""

    def __enter__(self) -> None:
        _attempt.second.append(sys._getframe(1))

    def __exit__(self, *exc: object) -> None:
        _attempt.second.pop()


def may_retry(entry: FrameType) -> bool:
    """Whether the compiled call that came through this entry's frame may be asked to begin again."""
    return not any(frame is entry for frame in _attempt.second)


def counted_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled callable that is counted while it runs, stops at the gate, and may be asked to begin again.

    This is on the warm path of every compiled call: no lock, nothing thread-local, one frame.
    """
    begin, end = _running.append, _running.pop

    @functools.wraps(compiled)
    def entry(*args: Any, **kwargs: Any) -> Any:
        begin(None)
        try:
            if _gate_closed:
                gate.pass_through(sys._getframe(1))
            return compiled(*args, **kwargs)
        except RetryCompiledCall:
            with once_more():
                return compiled(*args, **kwargs)
        finally:
            end()

    entry._compile_guard_inner = compiled  # type: ignore[attr-defined]
    return entry


def counted_dispatch(
    choose: dict[Any, Callable[..., Any]],
    make: Callable[[Any], Callable[..., Any]],
    device_of: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    tensor: type[Any],
    bound: tuple[Any, ...],
) -> Callable[..., Any]:
    """`counted_entry` for a function that is compiled for each device: in one frame, since a second costs 0.1 µs.

    Args:
        choose: the compiled function of each device.
        make: makes that of a new device.
        device_of: finds the device where the first argument is no tensor.
        tensor: `torch.Tensor`.
        bound: arguments put in front of those of the call.
    """
    begin, end = _running.append, _running.pop

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        device = first.device if isinstance(first, tensor) else device_of(args + bound, kwargs)
        compiled = choose.get(device) or make(device)
        begin(None)
        try:
            if _gate_closed:
                gate.pass_through(sys._getframe(1))
            return compiled(*bound, *args, **kwargs)
        except RetryCompiledCall:
            with once_more():
                return compiled(*bound, *args, **kwargs)
        finally:
            end()

    return dispatch


RETRYING_CODES: frozenset[CodeType] = frozenset(
    (
        counted_entry(lambda: None).__code__,
        counted_dispatch({}, lambda device: device, lambda args, kwargs: None, object, ()).__code__,
    )
)
"""Code of the functions that catch `RetryCompiledCall`: it may be raised only in a call that came through one of them, and
Dynamo must leave their frames alone."""


def _holds(frame: FrameType | None, codes: Callable[[CodeType], bool]) -> bool:
    """Whether a stack has a frame of such code on it."""
    while frame is not None:
        if codes(frame.f_code):
            return True
        frame = frame.f_back
    return False


class Gate:
    """Open always, but for the moment in which somebody changes the caches that compiled calls walk."""

    def __init__(self) -> None:
        self._closer: int | None = None
        self._closing = threading.Lock()
        self._opened = threading.Condition(threading.Lock())
        self._parked: set[int] = set()

    def pass_through(self, caller: FrameType | None) -> None:
        """Wait, counted as outside, while the gate is closed; calls nested in another compiled call, and those of the
        thread that closed it, pass."""
        if threading.get_ident() == self._closer or _holds(caller, RETRYING_CODES.__contains__):
            return
        while _gate_closed:
            _running.pop()
            try:
                self.wait()
            finally:
                _running.append(None)

    def wait(self) -> None:
        """Wait until the gate is open."""
        me = threading.get_ident()
        self._parked.add(me)
        try:
            with self._opened:
                waits.wait_for(self._is_open, "the reset in another thread", self._holders)
        finally:
            self._parked.discard(me)

    def is_closed_for_me(self) -> bool:
        """Whether the calling thread has to wait before a compiled call."""
        return _gate_closed and threading.get_ident() != self._closer

    def _is_open(self, span: float) -> bool:
        return self._opened.wait_for(lambda: not _gate_closed, span)

    def _holders(self) -> frozenset[int]:
        closer = self._closer
        return frozenset() if closer is None else frozenset((closer,))

    @contextmanager
    def shut(self, is_compiled_call: Callable[[CodeType], bool], timeout: float = RESET_WAIT_S) -> Iterator[None]:
        """Close the gate, wait until no thread is inside a compiled call, and open it again after the block.

        Calls that are inside go on, and so do those nested in them. The trace lock must not be held: a call that is
        inside may have to compile before it can end.

        Args:
            is_compiled_call: tells the code of torch's own compiled-call wrapper, for calls that were not counted.
            timeout: seconds to wait.

        Raises:
            GuardError: called from inside a compiled call, or calls did not end in time. The gate is open again.
        """
        global _gate_closed
        me = threading.get_ident()
        if me == self._closer:
            yield
            return
        if _holds(sys._getframe(), is_compiled_call):
            raise GuardError(
                "reset was called from inside a compiled call, whose own cache it would free. Call it between steps, "
                "from code that no compiled function calls."
            )
        if not self._closing.acquire(blocking=False):
            waits.wait_for(lambda span: self._closing.acquire(timeout=span), "the reset in another thread", self._holders)
        self._closer = me
        _gate_closed = True
        try:
            self._drain(me, is_compiled_call, timeout)
            yield
        finally:
            _gate_closed = False
            self._closer = None
            self._closing.release()
            with self._opened:
                self._opened.notify_all()

    def _drain(self, me: int, is_compiled_call: Callable[[CodeType], bool], timeout: float) -> None:
        looks_without_a_call = 0

        def on_a_stack() -> frozenset[int]:
            frames = sys._current_frames()
            return frozenset(
                ident
                for ident, frame in frames.items()
                if ident != me and ident not in self._parked and _holds(frame, is_compiled_call)
            )

        def all_ended() -> bool:
            nonlocal looks_without_a_call
            seen = on_a_stack()
            looks_without_a_call = 0 if seen else looks_without_a_call + 1
            if looks_without_a_call > _STALE_LOOKS:
                _running.clear()
            return not _running and not seen

        if all_ended():
            return
        inside = on_a_stack()
        findings.report(
            Finding(
                code="reset-under-load",
                subject="torch._dynamo.reset",
                title="reset was called while compiled functions run in other threads",
                now=this_thread("calls reset"),
                other=other_thread(min(inside, default=None), "is inside a compiled call"),
                shared="the caches of every code object, which torch frees without asking who walks them (pytorch#195355)",
                consequence="a segmentation fault or heap corruption",
                fix="keep compile_guard.install(), or stop the threads before a reset",
                prevented=True,
            )
        )
        nobody_announces_it = threading.Event()

        def wait_and_look(span: float) -> bool:
            nobody_announces_it.wait(span)
            return all_ended()

        if not waits.wait_for(wait_and_look, "compiled calls to end", on_a_stack, timeout=timeout, slice_s=_POLL_S):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stuck = ", ".join(names.get(ident, str(ident)) for ident in sorted(on_a_stack()))
            raise GuardError(
                f"reset gave up after {timeout:.0f} s: compiled calls are still running in {stuck}. Nothing was reset. "
                "Call it when those threads are between steps."
            )


gate = Gate()


def after_fork_in_child() -> None:
    """Open the gate, and count only the calls that the forking thread is in: the others are not in the child."""
    global _gate_closed
    _gate_closed = False
    gate.__init__()  # type: ignore[misc]
    frame: FrameType | None = sys._getframe()
    num_own = 0
    while frame is not None:
        num_own += frame.f_code in RETRYING_CODES
        frame = frame.f_back
    del _running[num_own:]
