"""Puts the yield points in: torch's functions, its compile lock or the guard's, and every wait of the guard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from compile_guard import entry, single_flight, waits
from compile_guard.install import is_installed
from compile_guard.patching import Patches
from compile_guard.stress import points
from compile_guard.stress.points import point
from compile_guard.stress.scheduler import Scheduler
from compile_guard.torch_seams.yield_points import put_in_lock, put_in_yield_points, put_out_guard_timing
from compile_guard.tracing import TRACE_LOCK

_scheduler: Scheduler | None = None


def _scheduled() -> Scheduler | None:
    """The scheduler, where it decides about the calling thread."""
    return _scheduler if _scheduler is not None and _scheduler.takes_part() else None


class ScheduledLock:
    """An RLock that makes no scheduled thread wait: while it is taken, the scheduler has another go on."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._is_owned: Callable[[], bool] = core._is_owned
        self._release_save: Callable[[], Any] = core._release_save
        self._at_fork_reinit: Callable[[], None] = core._at_fork_reinit

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.RLock` has it."""
        scheduler = _scheduled()
        if scheduler is None or self._is_owned():
            taken: bool = self._core.acquire(blocking, timeout)
            return taken
        scheduler.point("lock acquire")
        if self._core.acquire(False):
            return True
        if not blocking or timeout == 0:
            return False
        return scheduler.wait(lambda: bool(self._core.acquire(False)), "lock wait", bounded=timeout > 0)

    def release(self) -> None:
        """As `threading.RLock` has it."""
        self._core.release()
        if not self._is_owned():
            point("lock release")

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *exc: object) -> None:
        self.release()


class _Opened:
    """In place of the gate's condition, whose lock a thread that the scheduler has stopped would keep."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def wait_for(self, over: Callable[[], bool], timeout: float) -> bool:
        return over()

    def notify_all(self) -> None: ...


@contextmanager
def instrumented() -> Iterator[None]:
    """Yield points are in for the block, and taken out after it. With the guard or without: put that in before."""
    patches = Patches()
    wait_for = waits.wait_for

    def scheduled_wait(step: Callable[[float], bool], subject: str, holders: Any, **how: Any) -> bool:
        scheduler = _scheduled()
        if scheduler is None:
            return wait_for(step, subject, holders, **how)
        is_bounded = how.get("timeout") is not None
        with waits.recorded(subject, holders, is_bounded=is_bounded):
            return scheduler.wait(lambda: step(0.0), f"waited for {subject}", bounded=is_bounded)

    def sleep(seconds: float) -> None:
        scheduler = _scheduled()
        if scheduler is not None:
            scheduler.pause()

    try:
        patches.set_attribute(waits, "wait_for", scheduled_wait)
        patches.set_attribute(entry.gate, "_opened", _Opened())
        patches.set_attribute(single_flight, "time", SimpleNamespace(sleep=sleep))
        if is_installed():
            patches.set_attribute(TRACE_LOCK, "core", ScheduledLock(TRACE_LOCK.core))
        else:
            put_in_lock(patches, ScheduledLock)
        put_in_yield_points(patches, point)
        put_out_guard_timing(patches)
        yield
    finally:
        patches.undo()


@contextmanager
def scheduled_by(scheduler: Scheduler) -> Iterator[None]:
    """`scheduler` decides at the yield points, for the block."""
    global _scheduler
    _scheduler, points.hook = scheduler, scheduler.point
    try:
        yield
    finally:
        leave()


def leave() -> None:
    """Nobody decides any more: also called in a forked child, which has one thread."""
    global _scheduler
    _scheduler = points.hook = None
