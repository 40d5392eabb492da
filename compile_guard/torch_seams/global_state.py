"""What belongs to a thread and is guarded by every compiled function: intra-op thread count, autocast.

torch gives a thread the count that was last set when the thread first computes, and never again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from compile_guard.by_identity import ByIdentity
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

Passing = Callable[[Any], "CodeType | None"]
"""Finds the first cache entry whose guards hold for a frame."""


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.has_set_threads = False


_here = _OfThread()
_num_threads: int | None = None
"""The intra-op thread count that was set last, by any thread; None while the guard is not installed."""

Autocast = tuple[tuple[str, bool, Any], ...]


@dataclass(frozen=True, slots=True)
class _State:
    """With what a function was compiled."""

    thread: str
    ident: int
    autocast: Autocast


_compiled_with: ByIdentity[list[_State]] = ByIdentity()


def _autocast() -> Autocast:
    import torch

    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _set_autocast(autocast: Autocast) -> None:
    import torch

    for kind, enabled, dtype in autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)


@contextmanager
def _under(autocast: Autocast) -> Iterator[None]:
    prior = _autocast()
    _set_autocast(autocast)
    try:
        yield
    finally:
        _set_autocast(prior)


def passing_entry_in_step(frame: Any, passing_entry: Passing) -> tuple[CodeType, str] | None:
    """The entry that fits once this thread computes with as many threads as was set last, and what was changed for that.

    A thread that has set its own count keeps it.
    """
    import torch

    mine = torch.get_num_threads()
    if _num_threads is None or _here.has_set_threads or mine == _num_threads:
        return None
    _set_num_threads(_num_threads)
    passing = passing_entry(frame)
    if passing is None:
        _set_num_threads(mine)
        return None
    return passing, f"torch.get_num_threads(), which was {mine} here and has been set to {_num_threads}"


def _set_num_threads(count: int) -> None:
    from torch import _C

    _C.set_num_threads(count)


def note_state(frame: Any, passing_entry: Passing) -> None:
    """Note with what a function is about to be compiled, and report a compile that only a lost autocast causes."""
    code: CodeType = frame.f_code
    state = _State(threading.current_thread().name, threading.get_ident(), _autocast())
    known = _compiled_with.get(code)
    if known is None:
        _compiled_with[code] = [state]
        return
    for other in known:
        lost = [kind for (kind, on, _), (_, here, _) in zip(other.autocast, state.autocast, strict=True) if on and not here]
        if other.ident == state.ident or not lost:
            continue
        with _under(other.autocast):
            only_that = passing_entry(frame) is not None
        if only_that:
            _report_autocast(code, other, ", ".join(lost))
            break
    if all((each.ident, each.autocast) != (state.ident, state.autocast) for each in known):
        known.append(state)


def _report_autocast(code: CodeType, other: _State, lost: str) -> None:
    findings.report(
        Finding(
            code="global-state",
            subject=code.co_name,
            title=f"`{code.co_name}` is compiled again, because this thread computes without autocast",
            now=this_thread(f"calls {code.co_name}"),
            shared=f"autocast for {lost}, which belongs to each thread: off here, on in {other.thread}, which has compiled it",
            consequence="a compile more, and other dtypes in this thread; in a checkpoint's recompute `CheckpointError`",
            fix="enter torch.autocast inside the thread, or start it with compile_guard.Worker",
            prevented=False,
        )
    )


def _thread_count(patches: Patches) -> None:
    """Know which thread count was set last, and by whom."""
    global _num_threads
    import torch

    def set_num_threads(count: int) -> None:
        global _num_threads
        _set_num_threads(count)
        _num_threads = count
        _here.has_set_threads = True

    def forget() -> None:
        global _num_threads
        _num_threads = None

    _num_threads = torch.get_num_threads()
    patches.set_attribute(torch, "set_num_threads", set_num_threads)
    patches.on_undo("the thread count", forget)


SEAMS = (Seam("thread_count", "a thread whose thread count is out of date catches up at a cache miss", _thread_count),)
