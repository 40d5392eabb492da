"""A8: two threads use one `FakeTensorMode`; one that has left it goes on making fake tensors."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.fake_mode import mode_remembers_for_all_threads

    if mode_remembers_for_all_threads():
        return Affected(True, "`enter_stack` and `in_kernel_invocation`, written by whoever enters, are attributes of the mode")
    return Affected(False, "a mode has no `enter_stack` and `in_kernel_invocation` of its own")


def overlapping_blocks() -> str | None:
    """One thread leaves the mode while another is inside two blocks of it: it takes the note that is not its own."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode()
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> bool:
        with mode:
            first_in.set()
            wait(second_in)
        first_out.set()
        return isinstance(torch.ones(2), FakeTensor)

    def second() -> str | None:
        wait(first_in)
        try:
            with mode:
                with mode:
                    second_in.set()
                    wait(first_out)
                still_fake = isinstance(torch.ones(2), FakeTensor)
        except RuntimeError as error:
            if "Attempted to unset FakeTensorMode" not in str(error):
                raise
            return f"the other thread's block ended in RuntimeError: {error}"
        return None if still_fake else "the other thread's outer block made a real tensor"

    results: dict[str, Any] = run_threads(first=first, second=second)
    said = ["a thread that has left the mode still makes fake tensors" if results["first"] else None, results["second"]]
    return "; ".join(filter(None, said)) or None


def device_during_a_kernel() -> str | None:
    """One thread is inside the meta kernel of an operator; another uses tensors of the same mode."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    library: Any = torch.library.Library("shared_fake_mode", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("slow(Tensor x) -> Tensor")
    in_kernel, used = threading.Event(), threading.Event()

    def slow(x: torch.Tensor) -> torch.Tensor:
        in_kernel.set()
        wait(used)
        return torch.empty_like(x)

    library.impl("slow", slow, "Meta")
    with FakeTensorMode():
        x = torch.ones(2)

    def use() -> str | None:
        wait(in_kernel)
        said = []
        try:
            if x.device.type != "cpu":
                said.append(f"a fake tensor on the CPU said that it is on {x.device}")
            x + 1
        except AssertionError as error:
            said.append(f"an operator on it raised AssertionError: {str(error) or 'no message'}")
        finally:
            used.set()
        return "while another thread runs a kernel, " + ", ".join(said) if said else None

    said: str | None = run_threads(kernel=lambda: torch.ops.shared_fake_mode.slow(x), user=use)["user"]
    return said


def trigger() -> str | None:
    said = [overlapping_blocks(), device_during_a_kernel()]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode()
    left = threading.Event()

    def first() -> bool:
        with mode, mode:
            torch.ones(2) + 1
        left.set()
        return isinstance(torch.ones(2), FakeTensor)

    def second() -> bool:
        wait(left)
        with mode:
            torch.ones(2) + 1
        return isinstance(torch.ones(2), FakeTensor)

    if any(run_threads(first=first, second=second).values()):
        raise AssertionError("a mode that was left still makes fake tensors")


HAZARD = Hazard(
    id="A8",
    name="fake_mode",
    title="Two threads share one FakeTensorMode",
    symptom=(
        "Fake tensors outside any mode; `RuntimeError: Attempted to unset FakeTensorMode, but there wasn't one active.`; "
        "`AssertionError: fake_mode.in_kernel_invocation must be False` (2.9: without a message); a fake tensor whose device "
        "reads `meta`."
    ),
    mechanism=(
        "Which mode is in force belongs to each thread, but what a mode notes as it is entered (`enter_stack`) and while a "
        "kernel runs (`in_kernel_invocation`) belongs to the mode. A backward that is compiled on another thread uses the "
        "forward's mode; so do programs that propagate shapes in several threads."
    ),
    links=("pytorch#101605", "pytorch#101628", "pytorch#174820", "pytorch#188695"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("fake_mode",),
    finding="fake-mode",
    fix="Install the guard, under which a mode keeps its notes for each thread; or make a `FakeTensorMode` for each thread.",
)
