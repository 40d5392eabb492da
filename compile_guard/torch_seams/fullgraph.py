"""What a `fullgraph=True` call sets for the whole process: a count of compiled frames (2.13, 2.14), before that an order to
look at no frame below a compiled one (2.11). Both are C variables that other threads' calls read as well."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from compile_guard import fork
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code

_COUNT = "set_fullgraph_compiled_frame_count"
_OVERRIDE = "set_eval_frame_override"
_NOT_COUNTING = -1
_REFUSED = 1 << 30
"""What a call is told that may not count: not -1, so that it looks at no count, and no number of frames."""


_HELPERS = ("torch._inductor", "torch._dynamo", "torch.utils.data", "tqdm")
"""Modules whose threads call no compiled function; the first two have some in every process that compiles."""


def _starter(frame: FrameType | None) -> str:
    """The module that starts a thread, whose `start` was called in this frame."""
    name = ""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(("threading", "concurrent.futures", "compile_guard.torch_seams")):
            break
        frame = frame.f_back
    return name


def frames_are_counted() -> bool:
    """Whether a `fullgraph=True` call counts compiled frames in a variable of the process (2.13 and newer)."""
    from torch._dynamo import eval_frame

    return hasattr(eval_frame, _COUNT)


def frames_are_overridden() -> bool:
    """Whether a `fullgraph=True` call sets, for the process, what becomes of frames below a compiled one (2.11)."""
    from torch._dynamo import eval_frame

    return hasattr(eval_frame, _OVERRIDE)


def _has_threads(patches: Patches, on_first: Callable[[], object] = lambda: None) -> Callable[[], bool]:
    """Whether the program has started a thread; `on_first` runs as it starts its first."""
    start = threading.Thread.start
    is_threaded = threading.active_count() > 1

    def start_noted(self: threading.Thread) -> None:
        nonlocal is_threaded
        if not is_threaded and not _starter(sys._getframe(1)).startswith(_HELPERS):
            is_threaded = True
            on_first()
        start(self)

    patches.set_attribute(threading.Thread, "start", start_noted)
    return lambda: is_threaded


def _report() -> None:
    findings.report(
        Finding(
            code="fullgraph-count",
            subject="fullgraph=True",
            title="two threads are inside compiled calls with fullgraph=True",
            now=this_thread("enters one"),
            shared="torch's count of compiled frames, which each such call begins, and ends twice",
            consequence="`RuntimeError: torch.compile with fullgraph=True found no compiled frames`, of a compiled call; "
            "meanwhile what other threads' functions do after a graph break runs eager",
            fix="keep compile_guard.install(): a program with threads counts none; or leave fullgraph=True out",
            prevented=True,
        )
    )


def _fullgraph_count(patches: Patches) -> None:
    """Frames are counted until the program has started a thread; from then on calls are not checked for having none.

    While torch counts, it looks at nothing below a compiled frame, of whichever thread: what another thread's function does
    after a graph break, or in a call that Dynamo left as a call, would run eager.
    """
    from torch._dynamo import eval_frame

    torch_count: Any = getattr(eval_frame, _COUNT)
    counting = threading.RLock()  # only ever tried: who has it may have its frames counted
    has_threads = _has_threads(patches)

    def count(value: int) -> int:
        if value < 0:
            if not counting._is_owned():  # type: ignore[attr-defined]
                return _NOT_COUNTING
            counted: int = torch_count(value)
            while counting._is_owned():  # type: ignore[attr-defined]
                counting.release()
            return counted
        if value == _REFUSED:
            return value
        if counting.acquire(blocking=False):
            begun: int = _NOT_COUNTING if has_threads() else torch_count(value)
            return begun
        _report()
        return _REFUSED

    def renew() -> None:
        counting._at_fork_reinit()  # type: ignore[attr-defined]
        torch_count(_NOT_COUNTING)

    skip_code(count.__code__)
    patches.set_attribute(eval_frame, _COUNT, count)
    fork.in_child.append(renew)
    patches.on_undo("the fork handler of fullgraph counts", lambda: fork.in_child.remove(renew))


def _fullgraph_override(patches: Patches) -> None:
    """Frames below a compiled one are passed over until the program has started a thread; from then on none are: what another
    thread's function does after a graph break would run eager, and what is below a whole graph is hardly ever compiled."""
    from torch._dynamo import eval_frame

    torch_override: Any = getattr(eval_frame, _OVERRIDE)
    none = eval_frame._EvalFrameOverride.NONE
    has_threads = _has_threads(patches, lambda: torch_override(none))

    def override(value: Any) -> Any:
        return none if has_threads() and value != none else torch_override(value)

    skip_code(override.__code__)
    patches.set_attribute(eval_frame, _OVERRIDE, override)


SEAMS = (
    Seam(
        "fullgraph_count",
        "a fullgraph call counts compiled frames only in a program without threads",
        _fullgraph_count,
        frames_are_counted,
    ),
    Seam(
        "fullgraph_override",
        "a fullgraph call hides frames below compiled ones only in a program without threads",
        _fullgraph_override,
        frames_are_overridden,
    ),
)
