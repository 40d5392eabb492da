"""The process-wide, owner-aware, re-entrant lock over every tracer."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Protocol

from compile_guard import waits
from compile_guard.events import LOG, from_monotonic
from compile_guard.findings import GuardError, thread_name


class RLockLike(Protocol):
    """What the lock needs of its core: `threading.RLock()` as CPython makes it."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def _is_owned(self) -> bool: ...
    def _release_save(self) -> Any: ...
    def _at_fork_reinit(self) -> None: ...


ABANDONED_S = 1.0
"""How often a waiter looks whether the hold it waits for was abandoned."""

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _is_over(frame: FrameType) -> bool:
    """Whether a frame, not a generator's, has returned. One that has forgets its locals."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class LockStatistics:
    """What a lock has seen since it was made, or since a fork."""

    owner: int | None
    depth: int
    doing: str | None
    """What the owner took it for, innermost."""
    num_waiting: int
    num_acquired: int
    """Outermost acquisitions."""
    num_contended: int
    """Of those, how many had to wait."""
    waited_s: float
    """Seconds waited, all threads together."""


class TraceLock:
    """A re-entrant lock that knows its owner and what it is held for, around a given core.

    Ctrl-C may strike on the first instruction of an `__exit__`, so that a `with` block ends and its lock stays taken. The frame
    of the outermost hold is therefore remembered: when it has returned, the hold was abandoned, and whoever comes next ends it.

    The core may be a lock that other code already shares (torch's own compile lock): who takes the core directly still
    excludes the users of this one, only its name is not known here.

    Args:
        name: what findings call it.
        core: the `threading.RLock()` that does the excluding.
        entered: called after the outermost acquisition, on the owner; returns what is called before the outermost
            release, on the owner, while the lock is still held. Neither may block.
    """

    def __init__(
        self,
        name: str,
        core: RLockLike | None = None,
        *,
        entered: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self.name = name
        self.core: RLockLike = core if core is not None else threading.RLock()  # type: ignore[assignment]
        self.on_contention: Callable[[str, int | None, str | None], None] | None = None
        """Called with (what the caller wants, owner, what the owner does) before a wait. May report."""
        self.entered = entered
        self._reset()

    def _reset(self) -> None:
        self._leaving: Callable[[], None] | None = None
        self._abandoned: dict[int, Callable[[], None]] = {}
        """What an owner whose hold was ended by another thread has still to call, by thread."""
        self._ending = threading.Lock()
        self._frame: FrameType | None = None
        self._owner: int | None = None
        self._doing: list[str] = []
        self._since = 0.0
        self._had_to_wait = False
        self._num_waiting = 0
        self._num_acquired = 0
        self._num_contended = 0
        self._waited_s = 0.0

    def acquire(self, what: str = "a trace", timeout: float | None = None, *, frame: FrameType | None = None) -> bool:
        """Take the lock for `what`, waiting at most `timeout` seconds; True when it was taken.

        Args:
            what: what it is taken for, as others see it.
            timeout: seconds; None waits for ever.
            frame: the frame that gives the lock back before it returns, where there is one.

        Raises:
            DeadlockError: the owner waits, directly or through others, for this thread.
            FindingError: the wait stalled, and the mode is `raise`.
        """
        me = threading.get_ident()
        if self._owner == me and not self._end_abandoned():
            # The core is held once, by the outermost acquisition: an interrupt cannot leave the two counts apart. Nor may
            # one leave a hold that nobody gives back, so that there is no call here, where a signal would be handled.
            self._doing += (what,)
            return True
        try:
            had_to_wait = not self.core.acquire(blocking=False)
            if had_to_wait and not self._wait(what, timeout):
                return False
            if self._abandoned and (late := self._abandoned.pop(me, None)):
                late()
            if self.entered is not None:
                self._leaving = self.entered()
            self._since = time.monotonic()
            self._had_to_wait = had_to_wait
            self._num_acquired += 1
            self._frame = None if frame is None or frame.f_code.co_flags & _GENERATOR else frame
            self._owner = me
            self._doing.append(what)
        except BaseException:
            # A KeyboardInterrupt may arrive between the core's success and the line that records it.
            if self.core._is_owned():
                self._let_go()
            raise
        return True

    def _let_go(self) -> None:
        leaving, self._leaving = self._leaving, None
        try:
            if leaving is not None:
                leaving()
        finally:
            # No call before the release: an interrupt handled there would leave the core held for ever.
            self._doing = []
            self._frame = self._owner = None
            self.core.release()

    def _end_abandoned(self) -> bool:
        """End the present hold if the frame that had to end it has returned; whether it was so."""
        frame, owner = self._frame, self._owner
        # A hold that ends in the regular way forgets its frame before that returns: one that is over and still here was left.
        if frame is None or owner is None or not _is_over(frame):
            return False
        with self._ending:
            if self._frame is not frame:
                return True  # another thread was faster
            leaving, self._leaving = self._leaving, None
            if leaving is not None:
                self._abandoned[owner] = leaving  # of the owner's thread: called there, when it comes next
            self._doing = []
            self._frame = self._owner = None
            # `release()` is for the owner alone. This is how `threading.Condition` lets go, and asks not who calls.
            self.core._release_save()
        return True

    def _wait(self, what: str, timeout: float | None) -> bool:
        began = time.monotonic()
        self._num_contended += 1
        if self.on_contention is not None:
            self.on_contention(what, self._owner, self.doing)
        self._num_waiting += 1
        try:
            return waits.wait_for(self._step, self.name, self._holders, timeout=timeout)
        finally:
            self._num_waiting -= 1
            self._waited_s += time.monotonic() - began

    def _step(self, span: float) -> bool:
        if self.core.acquire(timeout=min(span, ABANDONED_S)):
            return True
        return self._end_abandoned() and self.core.acquire(blocking=False)

    def _holders(self) -> frozenset[int]:
        owner = self._owner
        return frozenset() if owner is None else frozenset((owner,))

    def release(self) -> None:
        """Give the lock back once.

        Raises:
            GuardError: this thread does not own it.
        """
        if self._owner != threading.get_ident():
            raise GuardError(f"{self!r} is released by thread {threading.current_thread().name}, which does not own it")
        if len(self._doing) > 1:
            self._doing.pop()
            return
        what, since, number, waited = self._doing[0], self._since, self._num_acquired, self._had_to_wait
        self._let_go()
        if LOG.on:
            # The number tells whose release a waiter got the lock from: hold 8 waited for hold 7.
            LOG.emit("lock_hold", from_monotonic(since), lock=self.name, what=what, number=number, waited=waited)

    def __enter__(self) -> bool:
        return self.acquire("torch.compile", frame=sys._getframe(1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def hold(self, what: str) -> _Hold:
        """A context manager that holds the lock for the block, for `what`."""
        return _Hold(self, what)

    def owned(self) -> bool:
        """Whether the calling thread holds the lock."""
        return self._owner == threading.get_ident()

    def describe(self, what: str) -> None:
        """Say more closely what the calling thread, which owns the lock, does with it."""
        if self.owned():
            self._doing[-1] = what

    @property
    def doing(self) -> str | None:
        """What the owner took the lock for, innermost; None when it is free."""
        try:
            return self._doing[-1]
        except IndexError:
            return None

    def is_inside(self, what: str) -> bool:
        """Whether the owner has taken the lock for `what`, be it the innermost or not."""
        return what in self._doing

    @property
    def depth(self) -> int:
        """How often the owner holds it."""
        return len(self._doing)

    @property
    def owner(self) -> int | None:
        """`threading.get_ident()` of the owner."""
        return self._owner

    @property
    def held_s(self) -> float | None:
        """Seconds since the owner took it; None when it is free."""
        return time.monotonic() - self._since if self._owner is not None else None

    def statistics(self) -> LockStatistics:
        """A consistent enough picture for people: fields are read one after the other, without a lock."""
        return LockStatistics(
            self._owner,
            self.depth,
            self.doing,
            self._num_waiting,
            self._num_acquired,
            self._num_contended,
            self._waited_s,
        )

    def after_fork_in_child(self) -> None:
        """Make the lock as new in a forked child, where every thread but the caller is gone.

        The fork itself took the lock once. A caller that had held it before, forking in the middle of a trace, holds it on.
        """
        still_held = self._doing[:-1] if self.owned() else []
        self.core._at_fork_reinit()
        self._ending = threading.Lock()
        if still_held:
            self.core.acquire()
            self._doing = still_held
            self._num_waiting = 0
            return
        leaving, self._leaving = self._leaving, None
        if leaving is not None and self.owned():
            leaving()
        self._reset()

    def __repr__(self) -> str:
        owner = self._owner
        if owner is None:
            state = "free" if not self._num_waiting else "held outside compile_guard"
        else:
            state = f"held {self.depth}x by {thread_name(owner)} for {self.doing}"
        return f"<TraceLock {self.name!r} {state}, {self._num_waiting} waiting>"


class _Hold:
    """One hold of a lock; leaving it also drops what an interrupted inner hold may have left behind."""

    def __init__(self, lock: TraceLock, what: str) -> None:
        self._lock = lock
        self._what = what
        self._outermost = False

    def __enter__(self) -> None:
        self._outermost = not self._lock.owned()
        self._lock.acquire(self._what, frame=sys._getframe(1))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._outermost:
            del self._lock._doing[1:]
        self._lock.release()
