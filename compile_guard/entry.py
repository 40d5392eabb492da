"""The way into a compiled function: who is inside, the gate that `reset` closes, and the retry that single-flight needs."""

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
"""How often calls are counted that nobody announces: those of functions compiled before `install()`."""


class RetryCompiledCall(BaseException):
    """Leaves a compiled call that has not begun: another thread has just compiled what it was about to compile.

    A BaseException, so that no `except Exception` on the way takes it for a failure.
    """


class _Inside(threading.local):
    """How deep this thread is in compiled calls, as a list of one, which other threads may read."""

    def __init__(self) -> None:
        self.depth = [0]
        self.retried = False
        _depths[threading.get_ident()] = self.depth


_depths: dict[int, list[int]] = {}
"""Depth by thread. A thread that has ended leaves a zero, and its ident is used again by a later one."""
_inside = _Inside()


class Gate:
    """Open always, but for the moment in which somebody changes the caches that compiled calls walk."""

    def __init__(self) -> None:
        self.closed = False
        self._closer: int | None = None
        self._opened = threading.Condition(threading.Lock())
        self._parked: set[int] = set()

    def wait(self, depth: list[int]) -> bool:
        """Wait, counted as outside, until the gate is open; False for the thread that closed it, which passes."""
        me = threading.get_ident()
        if me == self._closer:
            return False
        self._parked.add(me)
        depth[0] = 0
        try:
            with self._opened:
                waits.wait_for(self._is_open, "the reset in another thread", self._holders)
        finally:
            # Inside first, parked no longer second: between the two lines a closer must not miss this thread.
            depth[0] = 1
            self._parked.discard(me)
        return True

    def _is_open(self, span: float) -> bool:
        return self._opened.wait_for(lambda: not self.closed, span)

    def _holders(self) -> frozenset[int]:
        return frozenset() if self._closer is None else frozenset((self._closer,))

    @contextmanager
    def shut(self, is_entry: Callable[[CodeType], bool], timeout: float = RESET_WAIT_S) -> Iterator[None]:
        """Close the gate, wait until no thread is inside a compiled call, and open it again after the block.

        Calls that are inside go on, and so do those nested in them. The trace lock must not be held: a call that is
        inside may have to compile before it can end.

        Args:
            is_entry: tells the code of torch's own compiled-call wrapper, for calls that were not counted.
            timeout: seconds to wait.

        Raises:
            GuardError: called from inside a compiled call, or calls did not end in time. The gate is open again.
        """
        me = threading.get_ident()
        if me == self._closer:
            yield
            return
        if _inside.depth[0] or _holds(sys._getframe(), is_entry):
            raise GuardError(
                "reset was called from inside a compiled call, whose own cache it would free. Call it between steps, "
                "from code that no compiled function calls."
            )
        _closing.acquire()
        self._closer = me
        self.closed = True
        try:
            self._drain(me, is_entry, timeout)
            yield
        finally:
            self._closer = None
            self.closed = False
            _closing.release()
            with self._opened:
                self._opened.notify_all()

    def _drain(self, me: int, is_entry: Callable[[CodeType], bool], timeout: float) -> None:
        def threads_inside() -> frozenset[int]:
            counted = {ident for ident, depth in list(_depths.items()) if depth[0] > 0}
            frames = sys._current_frames()
            walked = {ident for ident, frame in frames.items() if _holds(frame, is_entry)}
            # A parked thread stands in front of the gate; a thread that has ended can leave nothing inside.
            return frozenset(((counted & frames.keys()) | walked) - self._parked - {me})

        if not (inside := threads_inside()):
            return
        findings.report(
            Finding(
                code="reset-under-load",
                subject="torch._dynamo.reset",
                title="reset was called while compiled functions run in other threads",
                now=this_thread("calls reset"),
                other=other_thread(min(inside), "is inside a compiled call"),
                shared="the caches of every code object, which torch frees without asking who walks them (pytorch#195355)",
                consequence="a segmentation fault or heap corruption",
                fix="keep compile_guard.install(), or stop the threads before a reset",
                prevented=True,
            )
        )
        nobody_announces_it = threading.Event()

        def all_left(span: float) -> bool:
            if threads_inside():
                nobody_announces_it.wait(span)
            return not threads_inside()

        if not waits.wait_for(
            all_left,
            "compiled calls to end",
            threads_inside,
            timeout=timeout,
            slice_s=_POLL_S,
        ):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            stuck = ", ".join(names.get(ident, str(ident)) for ident in sorted(threads_inside()))
            raise GuardError(
                f"reset gave up after {timeout:.0f} s: compiled calls are still running in {stuck}. Nothing was reset. "
                "Call it when those threads are between steps."
            )


_closing = threading.Lock()
gate = Gate()


def _holds(frame: FrameType | None, is_entry: Callable[[CodeType], bool]) -> bool:
    """Whether a stack has a compiled call on it."""
    while frame is not None:
        if is_entry(frame.f_code):
            return True
        frame = frame.f_back
    return False


class once_more:  # noqa: N801 - reads as a statement
    """The second attempt of a call that was asked to retry. There is no third: what then misses is compiled."""

    def __enter__(self) -> None:
        _inside.retried = True

    def __exit__(self, *exc: object) -> None:
        _inside.retried = False


def may_retry() -> bool:
    """Whether the calling thread's compiled call may still be asked to begin again."""
    return _inside.depth[0] > 0 and not _inside.retried


def counted_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled callable that is counted while it runs, stops at the gate, and may be asked to begin again.

    This is on the warm path of every compiled call: no lock, no allocation beyond the arguments.
    """

    @functools.wraps(compiled)
    def entry(*args: Any, **kwargs: Any) -> Any:
        depth = _inside.depth
        depth[0] += 1
        try:
            while gate.closed and depth[0] == 1 and gate.wait(depth):
                pass
            return compiled(*args, **kwargs)
        except RetryCompiledCall:
            with once_more():
                return compiled(*args, **kwargs)
        finally:
            depth[0] -= 1

    entry._compile_guard_inner = compiled  # type: ignore[attr-defined]
    return entry


ENTRY_CODE = counted_entry(lambda: None).__code__
"""Code of every counted entry. Dynamo must leave it alone, and a retry may only be asked of a call that came through it."""
