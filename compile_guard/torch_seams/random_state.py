"""Random generators of the process, which a compile saves and puts back: torch's for the CPU, and Python's `random`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from compile_guard.findings import this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code
from compile_guard.torch_seams.numeric_switches import report_rewind
from compile_guard.tracing import TRACE_LOCK

_REPLAY = "numbers that the other thread has drawn are drawn once more: noise, dropout and shuffles repeat, silently"


class _Saved(threading.local):
    """What torch's C++ has saved of Python's `random`, and where in the program."""

    def __init__(self) -> None:
        self.state: Any = None
        self.frame: FrameType | None = None
        self.at = -1


_saved = _Saved()


def _is_alone() -> bool:
    """Whether no other thread can have drawn."""
    return threading.active_count() == 1


def _random_state(patches: Patches) -> None:
    """A compile does not put back a generator that has moved on while other threads run.

    It draws nothing itself that would have to be undone (measured on 2.9.1, 2.13.0 and 2.14.1, with Inductor, AOT, a
    transformer layer, and flex_attention where it compiles on the CPU): it traces with fake tensors.
    """
    import random

    import torch

    folder = os.path.join(os.path.dirname(torch.__file__), "")
    compiler = tuple(folder + each + os.sep for each in ("_dynamo", "_functorch", "_inductor"))
    put_back: list[Callable[..., None]] = []

    def set_rng_state(new_state: Any) -> None:
        caller = sys._getframe(2)  # of torch's own function, whose code calls this
        if not caller.f_code.co_filename.startswith(compiler) or not TRACE_LOCK.owned() or _is_alone():
            put_back[0](new_state)
        elif not torch.equal(torch.random.get_rng_state(), new_state):
            report_rewind("torch's CPU generator", this_thread("compiles"), _REPLAY)

    put_back.append(patches.swap_code(torch.random.set_rng_state, set_rng_state))

    getstate, setstate = random.getstate, random.setstate

    def get_and_note() -> Any:
        caller = sys._getframe(1)
        _saved.state, _saved.frame, _saved.at = getstate(), caller, caller.f_lasti
        return _saved.state

    def set_or_keep(state: Any) -> None:
        caller = sys._getframe(1)
        # Since 2.13 torch's C++ saves and puts back at one and the same instruction: the call that it is about to compile.
        by_torch = caller.f_code.co_filename.startswith(compiler) or (
            state is _saved.state and caller is _saved.frame and caller.f_lasti == _saved.at
        )
        _saved.frame = _saved.state = None
        if not by_torch or _is_alone():
            setstate(state)
        elif getstate() != state:
            report_rewind("Python's random", this_thread("compiles"), _REPLAY)

    for function in (set_rng_state, torch.random.set_rng_state, get_and_note, set_or_keep):
        skip_code(function.__code__)
    patches.set_attribute(random, "getstate", get_and_note)
    patches.set_attribute(random, "setstate", set_or_keep)


SEAMS = (Seam("random_state", "a compile does not rewind generators that other threads draw from", _random_state),)
