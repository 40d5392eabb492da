"""The count of compiled frames in a `fullgraph=True` call: one C integer for the process (2.13, 2.14)."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard import fork
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code

_COUNT = "set_fullgraph_compiled_frame_count"
_NOT_COUNTING = -1
_REFUSED = 1 << 30
"""What a call is told that may not count: not -1, so that it looks at no count, and no number of frames."""


def frames_are_counted() -> bool:
    """Whether a `fullgraph=True` call counts compiled frames in a variable of the process (2.13 and newer)."""
    from torch._dynamo import eval_frame

    return hasattr(eval_frame, _COUNT)


def _report() -> None:
    findings.report(
        Finding(
            code="fullgraph-count",
            subject="fullgraph=True",
            title="two threads are inside compiled calls with fullgraph=True",
            now=this_thread("enters one"),
            shared="torch's count of compiled frames, which each such call begins, and ends twice",
            consequence="`RuntimeError: torch.compile with fullgraph=True found no compiled frames`, of a compiled call",
            fix="keep compile_guard.install(): calls that overlap are not counted; or fullgraph=True in one thread at a time",
            prevented=True,
        )
    )


def _fullgraph_count(patches: Patches) -> None:
    """One thread at a time has its frames counted; calls of others meanwhile are not checked for having none."""
    from torch._dynamo import eval_frame

    torch_count: Any = getattr(eval_frame, _COUNT)
    counting = threading.RLock()  # only ever tried: who has it is the one whose frames are counted

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
            begun: int = torch_count(value)
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


SEAMS = (
    Seam("fullgraph_count", "the compiled frames of a fullgraph call are its own", _fullgraph_count, frames_are_counted),
)
