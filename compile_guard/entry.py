"""The way into a compiled function: calls stop at the gate that `reset` closes, and may be asked to begin again.

Nothing counts the calls that run: a warm call would pay for it. `reset` finds them by their entries' frames on the stacks of
the threads. A frame is there before its first line looks at the gate, so that none slips past; and an exception that arrives
between two lines (KeyboardInterrupt) leaves nothing behind.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Protocol, cast

from compile_guard import waits
from compile_guard.eager_calls import EAGER
from compile_guard.findings import Finding, GuardError, findings, other_thread, this_thread
from compile_guard.tracing import TRACE_LOCK

RESET_WAIT_S = 60.0
"""How long `reset` waits for compiled calls to end before it gives up."""

_POLL_S = 0.01
"""How often a waiting `reset` looks: a call that ends tells nobody, that would cost every warm call."""


class RetryCompiledCall(BaseException):
    """Leaves a compiled call that has not begun: another thread has just compiled what it was about to compile.

    A BaseException, so that no `except Exception` on the way takes it for a failure.
    """


class _Attempt(threading.local):
    def __init__(self) -> None:
        self.second: list[FrameType] = []
        """Frames of the entries of this thread that are at their second attempt."""


_attempt = _Attempt()
_gate_closed = False
_attention = False
"""Whether a call must stop and look: the gate is closed, or some function runs eager. All that a warm call reads."""


def _attend() -> None:
    """The gate has opened or closed, or `EAGER` has begun or ended to watch."""
    global _attention
    _attention = _gate_closed or EAGER.on


EAGER.on_change = _attend


def _begins(compiled: Callable[..., Any], frame: FrameType) -> None:
    if _gate_closed:
        gate.pass_through(frame.f_back)
    if EAGER.on:
        EAGER.begins(compiled, frame)


class once_more:
    """The second attempt of a call that was asked to retry. There is no third: what then misses is compiled."""

    def __enter__(self) -> None:
        _attempt.second.append(sys._getframe(1))

    def __exit__(self, *exc: object) -> None:
        _attempt.second.pop()


def may_retry(entry: FrameType) -> bool:
    """Whether the compiled call that came through this entry's frame may be asked to begin again."""
    return not any(frame is entry for frame in _attempt.second)


def gated_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled callable that stops at the gate, and may be asked to begin again.

    This is on the warm path of every compiled call: no lock, nothing thread-local, one frame.
    """

    @functools.wraps(compiled)
    def entry(*args: Any, **kwargs: Any) -> Any:
        try:
            if _attention:
                _begins(compiled, sys._getframe())
            return compiled(*args, **kwargs)
        except RetryCompiledCall:
            with once_more():
                return compiled(*args, **kwargs)
        finally:
            if _attention:
                EAGER.ended(sys._getframe())

    entry._compile_guard_inner = compiled  # type: ignore[attr-defined]
    return entry


class CompiledByDevice(Protocol):
    """The compiled function of each device, made where it is missing."""

    @property
    def cpu(self) -> Callable[..., Any] | None:
        """The CPU's, once it is made. To ask a tensor for its device makes an object that must then be hashed and compared:
        0.1 µs."""

    def __getitem__(self, device: Any, /) -> Callable[..., Any]: ...


def gated_dispatch(
    compiled_for: CompiledByDevice,
    device_of: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    tensor: type[Any],
) -> Callable[..., Any]:
    """`gated_entry` for a function that is compiled for each device: in one frame, since a second costs 0.1 µs.

    Args:
        compiled_for: the compiled function of each device.
        device_of: finds the device where the first argument is no plain tensor.
        tensor: `torch.Tensor`. Its subclasses take the longer way: `isinstance` asks a metaclass, 0.08 µs.
    """

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if args and args[0].__class__ is tensor:
            compiled = (compiled_for.cpu if args[0].is_cpu else None) or compiled_for[args[0].device]
        else:
            compiled = compiled_for[device_of(args, kwargs)]
        try:
            if _attention:
                _begins(compiled, sys._getframe())
            return compiled(*args, **kwargs)
        except RetryCompiledCall:
            with once_more():
                return compiled(*args, **kwargs)
        finally:
            if _attention:
                EAGER.ended(sys._getframe())

    return dispatch


RETRYING_CODES: frozenset[CodeType] = frozenset(
    (
        gated_entry(lambda: None).__code__,
        gated_dispatch(cast(Any, {}), lambda args, kwargs: None, object).__code__,
    )
)
"""Code of the functions that catch `RetryCompiledCall`: it may be raised only in a call that came through one of them, and
Dynamo must leave their frames alone."""
EAGER.is_entry_code = RETRYING_CODES.__contains__


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
        """Wait, as one who is outside, while the gate is closed; calls nested in another compiled call, and those of the
        thread that closed it or holds the trace lock, pass."""
        if not self.is_closed_for_me() or _holds(caller, RETRYING_CODES.__contains__):
            return
        while _gate_closed:
            self.wait()

    def wait(self) -> None:
        """Wait until the gate is open."""
        me = threading.get_ident()
        self._parked.add(me)
        try:
            with self._opened:
                waits.wait_for(self._is_open, "the reset in another thread", self._holders)
        finally:
            self._parked.discard(me)

    def is_closed_by_me(self) -> bool:
        """Whether the calling thread is the one that closed it."""
        return self._closer == threading.get_ident()

    def is_closed_for_me(self) -> bool:
        """Whether the calling thread has to wait before a compiled call."""
        # The closer will want the trace lock: who holds it goes on, and ends its call before it gives the lock back.
        return _gate_closed and threading.get_ident() != self._closer and not TRACE_LOCK.owned()

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
            is_compiled_call: tells the code of torch's own compiled-call wrapper, for calls that came through no entry.
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
            # Outside every compiled call, whatever the other reset saw a moment ago: that one does not wait for this thread.
            self._parked.add(me)
            try:
                waits.wait_for(lambda span: self._closing.acquire(timeout=span), "the reset in another thread", self._holders)
            finally:
                self._parked.discard(me)
        self._closer = me
        _gate_closed = True
        _attend()
        try:
            self._drain(me, is_compiled_call, timeout)
            yield
        finally:
            _gate_closed = False
            _attend()
            self._closer = None
            self._closing.release()
            with self._opened:
                self._opened.notify_all()

    def _drain(self, me: int, is_compiled_call: Callable[[CodeType], bool], timeout: float) -> None:
        seen: frozenset[int] = frozenset()
        told = False

        def is_running(code: CodeType) -> bool:
            return code in RETRYING_CODES or is_compiled_call(code)

        def on_a_stack() -> frozenset[int]:
            return frozenset(
                ident
                for ident, frame in sys._current_frames().items()
                if ident != me and ident not in self._parked and _holds(frame, is_running)
            )

        def all_ended() -> bool:
            nonlocal seen
            # Looking at another thread's frames keeps what they hold alive, to be freed by this thread: torch up to 2.9
            # loses the attributes of fake tensors by that. So never look at a thread that traces.
            if not TRACE_LOCK.core.acquire(blocking=False):
                return False
            try:
                seen = on_a_stack()
            finally:
                TRACE_LOCK.core.release()
            return not seen

        def tell() -> None:
            nonlocal told
            if told or not seen:
                return
            told = True
            findings.report(
                Finding(
                    code="reset-under-load",
                    subject="torch._dynamo.reset",
                    title="reset was called while compiled functions run in other threads",
                    now=this_thread("calls reset"),
                    other=other_thread(min(seen), "is inside a compiled call"),
                    shared="the caches of every code object, which torch frees without asking who walks them (pytorch#195355)",
                    consequence="a segmentation fault or heap corruption",
                    fix="keep compile_guard.install(), or stop the threads before a reset",
                    prevented=True,
                )
            )

        if all_ended():
            return
        if TRACE_LOCK.owned():
            raise GuardError(
                "reset was called by the holder of the trace lock while other threads are inside compiled calls, which may "
                "need the lock before they can end. Call it outside compile_guard.exclusive()."
            )
        tell()
        nobody_announces_it = threading.Event()

        def wait_and_look(span: float) -> bool:
            nobody_announces_it.wait(span)
            ended = all_ended()
            tell()
            return ended

        ended = waits.wait_for(
            wait_and_look, "compiled calls to end", lambda: seen - self._parked, timeout=timeout, slice_s=_POLL_S
        )
        if not ended:
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stuck = ", ".join(names.get(ident, str(ident)) for ident in sorted(on_a_stack()))
            raise GuardError(
                f"reset gave up after {timeout:.0f} s: compiled calls are still running in {stuck}. Nothing was reset. "
                "Call it when those threads are between steps."
            )


gate = Gate()


def is_gate_closed() -> bool:
    """Whether a reset waits or works."""
    return _gate_closed


def after_fork_in_child() -> None:
    """Open the gate: whoever closed it is not in the child."""
    global _gate_closed
    _gate_closed = False
    _attend()
    gate.__init__()  # type: ignore[misc]
