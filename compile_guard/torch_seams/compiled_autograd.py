"""Compiled autograd, which is on for every thread where one has turned it on."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any

from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code

_FIX = (
    "turn it on in one thread alone, with compile_guard.exclusive() around that block and the other threads' backwards; "
    "or leave it off: AOTAutograd compiles backwards by itself"
)
_inside: list[int] = []
"""Threads that have it on, each as often as it has entered."""


def _other() -> int | None:
    me = threading.get_ident()
    return next((ident for ident in tuple(_inside) if ident != me), None)


def _report(subject: str, title: str, doing: str, consequence: str) -> None:
    findings.report(
        Finding(
            code="compiled-autograd",
            subject=subject,
            title=title,
            now=this_thread(doing),
            other=other_thread(_other(), "has turned compiled autograd on"),
            shared="the one compiler that the autograd engine hands every backward to",
            consequence=consequence,
            fix=_FIX,
            prevented=False,
        )
    )


def compiled_autograd_is_global() -> bool:
    """Whether compiled autograd is turned on for the process (up to 2.14)."""
    from torch._dynamo import compiled_autograd

    return all(hasattr(compiled_autograd, name) for name in ("compiled_autograd_enabled", "depth"))


def _compiled_autograd(patches: Patches) -> None:
    from torch._dynamo import compiled_autograd

    generator = compiled_autograd._enable.__wrapped__
    original: list[Any] = []

    def enable(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        if _other() is not None:
            _report(
                "enable",
                "compiled autograd is turned on in two threads",
                "turns it on",
                "`AssertionError: Nested Compiled Autograd Contexts must return before their parent context`, and backwards "
                "that run eager although the thread has turned it on",
            )
        _inside.append(threading.get_ident())
        try:
            return (yield from original[0](*args, **kwargs))
        finally:
            _inside.remove(threading.get_ident())

    begin = compiled_autograd.AutogradCompilerInstance.begin_capture

    def begin_capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _other() is not None and threading.get_ident() not in _inside:
            _report(
                "backward",
                "a backward of a thread without compiled autograd is compiled by another thread's",
                "runs a backward",
                "a compile for each graph of this thread, and the other one's compiler run here",
            )
        return begin(self, *args, **kwargs)

    original.append(patches.swap_code(generator, enable))
    for function in (enable, generator, begin_capture):
        skip_code(function.__code__)
    patches.set_attribute(compiled_autograd.AutogradCompilerInstance, "begin_capture", begin_capture)


SEAMS = (
    Seam(
        "compiled_autograd",
        "tells of compiled autograd that reaches into other threads",
        _compiled_autograd,
        compiled_autograd_is_global,
    ),
)
