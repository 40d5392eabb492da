"""Autocast, which belongs to each thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

_AUTOCAST = "_compile_guard_autocast"
"""Attribute of a thread: what gives it its starter's autocast, until it runs."""

_POOLS = frozenset(["concurrent.futures.thread", "multiprocessing.pool"])
"""Modules whose threads live on and run what others hand them: the block that is open when one begins is not theirs."""


def capture_autocast(kinds: Iterable[str]) -> Callable[[], None] | None:
    """The calling thread's autocast for each kind of device (`"cpu"`, `"cuda"`), if it is on for one; calling the result
    gives it to the thread that calls.

    That thread keeps no casts of weights: torch drops its cache of them where an outermost block ends, and autocast that is
    handed on has no such end. Weights that are trained in the thread would go on being read as they were at first.
    """
    import torch

    states = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in kinds
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    ]
    if not states:
        return None

    def apply() -> None:
        for kind, dtype in states:
            torch.set_autocast_enabled(kind, True)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(False)

    return apply


def _kinds() -> set[str]:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}


def _report_inherited(name: str) -> None:
    findings.report(
        Finding(
            code="thread-autocast",
            subject="threading.Thread",
            title="a thread is started inside an autocast block",
            now=this_thread(f"starts thread {name}"),
            shared="autocast, which belongs to each thread; a new one has none",
            consequence="the thread computes in float32: slower, with more memory, and each function is compiled once more",
            fix="keep compile_guard.install() or use compile_guard.Worker; or enter torch.autocast in the thread",
            prevented=True,
        )
    )


def _autocast_inherit(patches: Patches) -> None:
    """A thread starts with the autocast of the one that starts it."""
    start, run_thread = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_autocast(self: threading.Thread) -> None:
        target: Any = getattr(self, "_target", None)
        apply = None if getattr(target, "__module__", None) in _POOLS else capture_autocast(_kinds())
        if apply is not None:
            setattr(self, _AUTOCAST, apply)
            _report_inherited(self.name)
        start(self)

    def bootstrap_with_autocast(self: threading.Thread) -> None:
        apply = self.__dict__.pop(_AUTOCAST, None)
        if apply is not None:
            apply()
        run_thread(self)

    patches.set_attribute(threading.Thread, "start", start_with_autocast)
    patches.set_attribute(threading.Thread, "_bootstrap_inner", bootstrap_with_autocast)


SEAMS = (Seam("autocast_inherit", "a thread starts with the autocast of its starter", _autocast_inherit),)
