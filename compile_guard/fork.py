"""`os.fork()` while another thread traces: the child gets a free lock and a clean slate, the parent goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from compile_guard import entry, waits
from compile_guard.events import LOG
from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.tracing import TRACE_LOCK

FORK_WAIT_S = 10.0
"""How long a fork waits for the trace in progress. A handler cannot refuse the fork, so that it is bounded."""

active = False
"""Whether the handlers do anything: they cannot be taken out of Python again."""
in_child: list[Callable[[], None]] = []
"""Called in a forked child, for locks of modules that this one cannot import."""
_registered = False
_held: dict[int, bool] = {}


def register() -> None:
    """Put the handlers in, once for each process."""
    global _registered
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
        _registered = True


def _before() -> None:
    if not active:
        return
    me = threading.get_ident()
    owner, doing, held_s = TRACE_LOCK.owner, TRACE_LOCK.doing, TRACE_LOCK.held_s
    busy = owner is not None and owner != me
    other = other_thread(owner, f"is inside {doing}", held_s) if busy else None
    try:
        _held[me] = TRACE_LOCK.acquire("os.fork", timeout=FORK_WAIT_S)
    except waits.DeadlockError:
        _held[me] = False  # the fork happens all the same; the finding below says what the child may meet
    if busy:
        findings.report(
            Finding(
                code="fork-during-compile",
                subject="os.fork",
                title="the process was forked while another thread compiles",
                now=this_thread("calls os.fork"),
                other=other,
                shared="torch's compile lock, which the child inherits locked, with no thread that could release it",
                consequence="the first compile in the child hangs for ever"
                if _held[me]
                else f"the compile did not end in {FORK_WAIT_S:.0f} s: the child has the lock free, and torch's state half-way",
                fix="fork before the threads start, or use the spawn start method",
                prevented=_held[me],
            )
        )


def _after_in_parent() -> None:
    if _held.pop(threading.get_ident(), False):
        TRACE_LOCK.release()
    if active:
        LOG.emit("fork")


def _after_in_child() -> None:
    if threading.get_ident() in _held:
        _held.clear()
        TRACE_LOCK.after_fork_in_child()
        LOG.after_fork_in_child()
        waits.after_fork_in_child()
        findings.after_fork_in_child()
        entry.after_fork_in_child()
        for reset_locks in in_child:
            reset_locks()
