"""Threads that compile need room on their stack."""

from __future__ import annotations

import threading

from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

ENOUGH = 8 * 2**20
"""Bytes of stack that a thread is given at least: what the main thread, and by default every other, has on Linux. They are
addresses, not memory, until they are used."""


def _thread_stack(patches: Patches) -> None:
    """A thread for which the program set a small stack gets `ENOUGH`; Dynamo and autograd recurse in C."""
    start = threading.Thread.start
    changing = threading.Lock()

    def start_with_room(self: threading.Thread) -> None:
        with changing:
            size = threading.stack_size(ENOUGH)  # to ask without setting is not possible: no argument means 0
            try:
                is_small = 0 < size < ENOUGH
                if is_small:
                    start(self)
            finally:
                threading.stack_size(size)
        if is_small:
            _report_small_stack(self.name, size)
        else:
            start(self)

    patches.set_attribute(threading.Thread, "start", start_with_room)


def _report_small_stack(name: str, size: int) -> None:
    findings.report(
        Finding(
            code="thread-stack",
            subject="threading.stack_size",
            title=f"a thread is started with a stack of {size // 1024} KiB",
            now=this_thread(f"starts thread {name}"),
            shared="threading.stack_size, one setting for all threads that are started from now on",
            consequence="a segmentation fault when a nested model is compiled, or a deep graph differentiated, in the thread",
            fix=f"keep compile_guard.install(), which makes it {ENOUGH // 2**20} MiB; or leave threading.stack_size alone",
            prevented=True,
        )
    )


SEAMS = (Seam("thread_stack", "a thread has room on its stack for a compile", _thread_stack),)
