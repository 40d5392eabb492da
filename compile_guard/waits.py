"""Who waits for whom: every blocking wait of the guard is recorded, so that none is silent and none closes a cycle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compile_guard import events
from compile_guard.findings import Finding, GuardError, findings, is_inside_torch, other_thread, this_thread, thread_name

STALL_S = 30.0
"""A wait longer than this is reported, with the stacks of both threads."""


class DeadlockError(GuardError):
    """A wait was refused because it would never have ended."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One thread's wait: for what, and which threads (`get_ident()`) could end it."""

    subject: str
    holders: Callable[[], frozenset[int]]
    since: float
    """`time.monotonic()` of its start."""
    is_bounded: bool
    """It ends by itself, at its timeout: who waits for this thread does not wait for ever."""


_waits: dict[int, Wait] = {}
# Taken only around dictionary work; never while waiting and never from a finalizer.
_waits_lock = threading.Lock()


def waiting() -> dict[int, Wait]:
    """The waits of this moment, by thread ident."""
    return dict(_waits)


def _cycle(me: int, holders: frozenset[int]) -> list[int] | None:
    """The chain of threads from one of `holders` back to `me`, if there is one."""
    for holder in holders:
        chain, seen = [holder], {holder}
        current = holder
        while current != me:
            wait = _waits.get(current)
            # Only a wait for one thread is a dead end; with several holders any of them may end it.
            ahead = wait.holders() if wait is not None and not wait.is_bounded else frozenset()
            if len(ahead) != 1:
                break
            current = next(iter(ahead))
            if current in seen:
                break
            chain.append(current)
            seen.add(current)
        else:
            if len(holders) == 1:
                return chain
    return None


def _reason(cycle: list[int]) -> str:
    """Why the last thread of the chain must not wait for the first, and what to do."""
    if len(cycle) == 1:
        return "it cannot end while it waits for itself. Join it from another thread."
    return (
        f"{' -> '.join(map(thread_name, cycle))}, where each waits for the next, and the last is this thread. Let the other "
        "thread finish before this one traces, or trace before starting it."
    )


@contextmanager
def recorded(subject: str, holders: Callable[[], frozenset[int]], *, is_bounded: bool) -> Iterator[Wait]:
    """Record the calling thread's wait for the length of the block.

    Raises:
        DeadlockError: the threads that could end the wait already wait, at the end of the chain, for the caller.
    """
    me = threading.get_ident()
    wait = Wait(subject, holders, time.monotonic(), is_bounded)
    with _waits_lock:
        cycle = _cycle(me, holders())
        outer = _waits.get(me)
        if cycle is None:
            _waits[me] = wait
    if cycle is not None:
        raise DeadlockError(f"thread {thread_name(me)} would wait for {subject} for ever: {_reason(cycle)}")
    try:
        yield wait
    finally:
        with _waits_lock:
            if outer is None:
                _waits.pop(me, None)
            else:
                _waits[me] = outer


def wait_for(
    step: Callable[[float], bool],
    subject: str,
    holders: Callable[[], frozenset[int]],
    *,
    timeout: float | None = None,
    slice_s: float | None = None,
) -> bool:
    """Call `step(seconds)`, which blocks at most so long and says whether the wait is over, until it is.

    Reports a `stall` every `STALL_S`. `slice_s` bounds one step, for conditions that nobody announces.

    Returns:
        False when `timeout` seconds passed first.

    Raises:
        DeadlockError: the wait would close a cycle.
        FindingError: it stalled, and the mode is `raise`.
    """
    with recorded(subject, holders, is_bounded=timeout is not None) as wait, events.span("wait", subject=subject) as logged:
        logged.fields["holders"] = [thread_name(holder) for holder in wait.holders()] if events.LOG.on else []
        deadline = None if timeout is None else wait.since + timeout
        next_report = wait.since + STALL_S
        while True:
            now = time.monotonic()
            until = next_report if deadline is None else min(deadline, next_report)
            span = max(0.0, until - now)
            if step(span if slice_s is None else min(span, slice_s)):
                return True
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                logged.fields["timed_out"] = True
                return False
            if now >= next_report:
                next_report = now + STALL_S
                _report_stall(wait)


def _report_stall(wait: Wait) -> None:
    holder = min(wait.holders(), default=None)
    compiles = holder is not None and is_inside_torch(holder)
    findings.report(
        Finding(
            code="stall",
            subject=wait.subject,
            title=f"waiting for {wait.subject} since {time.monotonic() - wait.since:.0f} s",
            now=this_thread(f"waits for {wait.subject}"),
            other=other_thread(holder, f"holds {wait.subject}" + ", inside torch: a compile that is still running" * compiles),
            shared=wait.subject,
            consequence="no progress in this thread until the other one lets go; the guard goes on waiting",
            fix="nothing, where the compile is merely slow; compile_guard.warmup() before the threads start makes nobody wait"
            if compiles
            else "look at the second stack: code inside a trace must not wait for a thread that traces as well",
            prevented=False,
        )
    )


def after_fork_in_child() -> None:
    """Forget the waits of threads that the child does not have."""
    global _waits_lock
    _waits_lock = threading.Lock()
    _waits.clear()
