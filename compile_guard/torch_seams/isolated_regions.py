"""`torch.compile(isolate_recompiles=True)`, whose region is one for all threads in 2.13 and 2.14."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, compile_listeners, is_compiled_call

_NOBODYS = -2
"""No region has this number; -1 is that of functions that are not isolated."""


def there_are_regions() -> bool:
    """Whether `torch.compile` takes `isolate_recompiles` (2.13 and later)."""
    from torch._C._dynamo import eval_frame

    return hasattr(eval_frame, "set_eval_frame_isolate_recompiles_id")


def region_is_global() -> bool:
    """Whether a region that one thread enters is read by another. Writes it for a moment: not for a process with threads."""
    from torch._C._dynamo import eval_frame

    if not there_are_regions():
        return False
    before = eval_frame.set_eval_frame_isolate_recompiles_id(_NOBODYS)
    seen: list[int] = []
    try:
        reader = threading.Thread(target=lambda: seen.append(eval_frame.get_eval_frame_isolate_recompiles_id()))
        reader.start()
        reader.join()
    finally:
        eval_frame.set_eval_frame_isolate_recompiles_id(before)
    return seen == [_NOBODYS]


def _region_of_this_call(frame: FrameType | None) -> tuple[int | None, str]:
    """Region and name of the function whose compiled call the frame is in, by the innermost wrapper on its stack."""
    while frame is not None:
        if is_compiled_call(frame.f_code):
            variables = frame.f_locals
            region: int | None = getattr(variables.get("self"), "_isolate_recompiles_id", None)
            return region, getattr(variables.get("fn"), "__qualname__", "a compiled function")
        frame = frame.f_back
    return None, ""


def _isolated_regions(patches: Patches) -> None:
    from torch._C._dynamo import eval_frame

    def compare(what: str) -> None:
        own, name = _region_of_this_call(sys._getframe())
        current = eval_frame.get_eval_frame_isolate_recompiles_id()
        if own is not None and own != current:
            _report_foreign(name, own, current)

    compile_listeners.append(compare)
    patches.on_undo("the comparison of regions", lambda: compile_listeners.remove(compare))


def _report_foreign(name: str, own: int, current: int) -> None:
    findings.report(
        Finding(
            code="isolated-region",
            subject=name,
            title=f"a part of `{name}` is compiled for the region of another thread's function",
            now=this_thread(f"compiles in region {current} what belongs to region {own} (-1: not isolated)"),
            shared="the current region of `isolate_recompiles`, one for the process, which each compiled call sets and puts "
            "back",
            consequence="code that is in the cache is not found and compiled again, and counts towards the other function's "
            "limit",
            fix="use compile_guard.compile, which isolates by a code object for each wrapper and device, in place of "
            "`isolate_recompiles=True`; or avoid graph breaks in functions that several threads call",
            prevented=False,
        )
    )


SEAMS = (
    Seam(
        "isolated_regions",
        "tells of code that is compiled for the region of another thread",
        _isolated_regions,
        there_are_regions,
    ),
)
