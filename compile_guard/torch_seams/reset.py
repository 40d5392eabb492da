"""`reset` waits until no compiled call runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import CodeType, FrameType
from typing import Any

from compile_guard.eager_calls import EAGER
from compile_guard.entry import RETRYING_CODES, gate
from compile_guard.events import span
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, is_compiled_call
from compile_guard.tracing import TRACE_LOCK


def _reset_gate(patches: Patches) -> None:
    import torch._dynamo
    from torch._dynamo import eval_frame

    from_stance = eval_frame._callback_from_stance
    num_resets = 0
    counting = threading.Lock()

    def gated_callback(callback: Any) -> Any:
        # Reached by compiled calls that have no entry of ours: they wait as if not yet inside. Those that have one were
        # let in already, and the reset waits for them.
        # (Disabled functions come here too, and pass.)
        caller = sys._getframe(1)
        if gate.is_closed_for_me() and is_compiled_call(caller.f_code) and not _inside_a_call(caller):
            while gate.is_closed_for_me():
                gate.wait()
        return from_stance(callback)

    def quiet(original: list[Callable[[], None]]) -> Callable[[], None]:
        def reset() -> None:
            nonlocal num_resets
            # Only while a reset waits or works do calls that were compiled before `install()` pass there.
            with counting:
                num_resets += 1
                eval_frame._callback_from_stance = gated_callback
            try:
                # (One of the two calls the other.)
                logged = nullcontext() if gate.is_closed_by_me() else span("reset")
                with logged, gate.shut(is_compiled_call), TRACE_LOCK.hold("torch._dynamo.reset"):
                    original[0]()
                    EAGER.clear()
            finally:
                with counting:
                    num_resets -= 1
                    if not num_resets:
                        eval_frame._callback_from_stance = from_stance

        return reset

    for function in (torch._dynamo.reset, torch._dynamo.reset_code_caches):
        original: list[Callable[[], None]] = []
        original.append(patches.swap_code(function, quiet(original)))


def _inside_a_call(frame: FrameType | None) -> bool:
    """Whether the compiled-call wrapper whose frame this is has an entry, or another one further out."""
    assert frame is not None
    while (frame := frame.f_back) is not None:
        if frame.f_code in RETRYING_CODES or is_compiled_call(frame.f_code):
            return True
    return False


def reset_code(code: CodeType) -> None:
    """Drop the compiled versions of one code object. No thread may be inside it: see `entry.Gate.shut`."""
    from torch._C._dynamo.eval_frame import reset_code as torch_reset_code

    torch_reset_code(code)


SEAMS = (Seam("reset_gate", "reset waits until no compiled call runs", _reset_gate),)
