"""B8: `torch._dynamo.reset()` frees the cache that another thread is walking."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    # The frame cache is C++; that it has no lock shows nowhere in Python. The trigger is the test.
    return Affected(True, "no torch so far has a lock on the frame cache that callers take")


def trigger() -> str | None:
    # What occurs is a crash of the process. Freed memory may keep its content for a while and hide it:
    # MALLOC_PERTURB_=165 in the environment (glibc; the runner sets it) overwrites what is freed.
    import torch

    looking_up, reset_done = threading.Event(), threading.Event()

    class Tagged(torch.Tensor):
        """A tensor whose guard runs Python: the place where a look-up can be held, and where the GIL drops anyway."""

        held: torch.Tensor
        armed = False

        @staticmethod
        def __new__(cls, inner: torch.Tensor) -> Tagged:
            made: Tagged = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
            made.held = inner
            return made

        def __tensor_flatten__(self) -> tuple[list[str], str]:
            if Tagged.armed:
                Tagged.armed = False
                looking_up.set()
                wait(reset_done)
            return ["held"], "tag"

        @staticmethod
        def __tensor_unflatten__(inner: dict[str, torch.Tensor], tag: str, size: Any, stride: Any) -> Tagged:
            return Tagged(inner["held"])

        @classmethod
        def __torch_dispatch__(  # type: ignore[override]
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            plain = [arg.held if isinstance(arg, Tagged) else arg for arg in args]
            return Tagged(function(*plain, **(kwargs or {})))

    @torch.compile(backend="eager", dynamic=False)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = Tagged(torch.ones(4))
    step(x)
    step(x)
    Tagged.armed = True

    def reset() -> None:
        wait(looking_up)
        for _ in range(20):
            torch._dynamo.reset()
        reset_done.set()

    run_threads(caller=lambda: step(x), resetter=reset)
    step(x)
    return None


def mirror() -> None:
    import torch

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    x = torch.ones(4)
    for _ in range(5):
        step(x)  # in one thread: cold calls of two at once would be hazard B3
        run_threads(first=lambda: step(x), second=lambda: step(x))
        torch._dynamo.reset()


HAZARD = Hazard(
    id="B8",
    name="reset_crash",
    title="reset() while other threads run compiled code",
    symptom="Segmentation fault, heap corruption or a stray error, some time after `torch._dynamo.reset()`.",
    mechanism=(
        "The entries of a code object are a list without a lock: a caller walks it, evaluating guards that may "
        "drop the GIL, while `reset` frees it. `reset` takes `compile_lock`; callers of warm code do not."
    ),
    links=("pytorch#193697", "pytorch#195347", "pytorch#195355", "pytorch#196120"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "reset_gate"),
    finding="reset-under-load",
    fix="Install the guard, whose `reset` waits until no compiled call runs; or stop the other threads first.",
)
