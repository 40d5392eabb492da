"""F5: Python without the GIL, on which neither torch's compile stack nor the guard can rely yet."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import meet, run_threads

NUM_THREADS = 8


def has_gil() -> bool:
    """Whether this Python runs with the GIL, as every one before 3.13 does."""
    enabled: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
    return enabled


def affected() -> Affected:
    if has_gil():
        return Affected(False, "this Python runs with the GIL")
    return Affected(True, "this Python runs without the GIL: `sys._is_gil_enabled()` is False")


def trigger() -> str | None:
    """Where there is no GIL: threads call one warm compiled function, and compile others, all at the same time."""
    import torch

    if has_gil():
        return None
    begin = threading.Barrier(NUM_THREADS)
    warm = torch.compile(lambda x: x.sin() + 1, backend="eager")
    warm(torch.ones(4))

    def work(number: int) -> None:
        meet(begin)
        for size in range(2, 8):
            torch.compile(lambda x: x.cos() + number, backend="eager")(torch.ones(size))
            if not torch.allclose(warm(torch.ones(4)), torch.ones(4).sin() + 1):
                raise AssertionError("a warm compiled function returned wrong values")

    bodies: dict[str, Callable[[], None]] = {f"worker_{number}": partial(work, number) for number in range(NUM_THREADS)}
    try:
        run_threads(**bodies)
    except (RuntimeError, AssertionError, KeyError, AttributeError, TypeError) as error:
        return f"without the GIL, threads that compile and call compiled functions: {type(error).__name__}: {error}"
    return None


def mirror() -> None:
    import torch

    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager")
    run_threads(worker=lambda: compiled(torch.ones(4)))


HAZARD = Hazard(
    id="F5",
    name="free_threading",
    title="Python without the GIL",
    symptom="Every race of this catalogue, at any instruction; crashes in torch's frame cache.",
    mechanism=(
        "torch's tables, and the guard's own counts, rely on one thread at a time running Python code. torch calls 3.13t "
        "mostly working and 3.14t experimental; Triton turns the GIL on again unless it is told not to. `install()` refuses "
        "with a GuardError instead of promising what it cannot keep. No free-threaded Python was at hand to run the trigger on."
    ),
    links=("pytorch#149549", "pytorch#169875", "pytorch#144361"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=(),
    finding="",
    outcome="explained",
    fix="Start Python with PYTHON_GIL=1 or -X gil=1.",
)
