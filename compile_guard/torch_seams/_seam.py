"""What a seam is, and what every one of them needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType

from compile_guard.patching import Patches


@dataclass(frozen=True, slots=True)
class Seam:
    """One place where the guard takes hold of torch."""

    name: str
    purpose: str
    put_in: Callable[[Patches], None]
    needed: Callable[[], bool] = lambda: True
    """Feature test: False where the installed torch does by itself what the seam is for."""


def skip_code(code: CodeType) -> None:
    """Tell Dynamo never to look at frames of `code`: it would compile them, and so wait for the lock on a warm call."""
    from torch._dynamo.eval_frame import skip_code as torch_skip_code

    torch_skip_code(code)


def is_compiled_call(code: CodeType) -> bool:
    """Whether `code` is torch's wrapper around a compiled function."""
    return code.co_name == "compile_wrapper" and code.co_filename == sys.modules["torch._dynamo.eval_frame"].__file__


compile_listeners: list[Callable[[str], None]] = []
"""Called, under the trace lock, with a description of what is about to be compiled."""


def notify_compile(what: str) -> None:
    """Tell every listener what is about to be compiled."""
    for listener in tuple(compile_listeners):
        listener(what)
