"""B6: `fullgraph=True` calls count compiled frames for the process: a compiled call is said to have none (2.13, 2.14), and what
another thread's function does after a graph break runs eager (2.11, too, which hides frames in another variable)."""

from __future__ import annotations

import sys
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.fullgraph import frames_are_counted, frames_are_overridden

    if frames_are_counted():
        return Affected(True, "compiled frames of a call are counted in one integer: `set_fullgraph_compiled_frame_count`")
    if frames_are_overridden():
        return Affected(True, "a fullgraph call sets `set_eval_frame_override` for the whole process")
    return Affected(False, "a fullgraph call sets neither `set_fullgraph_compiled_frame_count` nor `set_eval_frame_override`")


def fullgraph(during: Any) -> Any:
    """A function compiled with `fullgraph=True`; `during` runs inside each of its compiled calls."""
    import torch

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            during()
            return graph.forward(*args)

        return compiled

    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() + 1

    return torch.compile(step, backend=backend, fullgraph=True)


def pause_before_call(name: str, number: int, pause: Any) -> None:
    """Have the calling thread run `pause` once, before its `number`-th call of the C function `name`."""
    num_calls = 0

    def profile(frame: Any, event: str, function: Any) -> None:
        nonlocal num_calls
        if event == "c_call" and getattr(function, "__name__", "") == name:
            num_calls += 1
            if num_calls == number:
                sys.setprofile(None)
                pause()

    sys.setprofile(profile)


def break_beside_a_call() -> str | None:
    """A function with a graph break is called while another thread is inside a `fullgraph=True` call."""
    import torch

    inside, over = threading.Event(), threading.Event()
    num_graphs = 0
    overlap = False

    def hold() -> None:
        if overlap:
            inside.set()
            wait(over)

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            nonlocal num_graphs
            num_graphs += 1
            return graph.forward(*args)

        return compiled

    def broken(x: Any) -> Any:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    whole, in_two = fullgraph(hold), torch.compile(broken, backend=backend)
    whole(torch.ones(4))
    in_two(torch.ones(4))
    overlap = True

    def beside() -> int:
        nonlocal num_graphs
        wait(inside)
        num_graphs = 0
        try:
            in_two(torch.ones(4))
        finally:
            over.set()
        return num_graphs

    num: int = run_threads(whole=lambda: whole(torch.ones(4)), beside=beside)["beside"]
    if num == 2:
        return None
    return f"{num} of two compiled graphs ran, the other part eager, while another thread was inside a fullgraph=True call"


def trigger() -> str | None:
    return "; ".join(filter(None, (ended_count(), break_beside_a_call()))) or None


def ended_count() -> str | None:
    """`first` has ended its count and will end it once more; `second` counts; `third` begins to count; `second` ends."""
    import torch

    between, inside, ended, begun, over = (threading.Event() for _ in range(5))
    overlap = False

    def hold() -> None:
        if overlap:
            inside.set()
            wait(begun)

    leaving, warm = fullgraph(lambda: None), fullgraph(hold)
    for step in (leaving, warm):
        step(torch.ones(4))
    overlap = True

    def other_backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        begun.set()
        wait(over)  # it compiles for as long as the other call takes to end
        return graph.forward

    cold = torch.compile(lambda x: x.cos() * 2, backend=other_backend, fullgraph=True)

    def first() -> None:
        def pause() -> None:
            between.set()
            wait(inside)

        # A call sets the count to 0 as it begins, and twice to -1 as it ends.
        pause_before_call("set_fullgraph_compiled_frame_count", 3, pause)
        leaving(torch.ones(4))
        sys.setprofile(None)
        between.set()
        ended.set()

    def second() -> str | None:
        wait(between)
        try:
            warm(torch.ones(4))
        except RuntimeError as error:
            if "no compiled frames" not in str(error):
                raise
            return f"a warm call that ran compiled raised RuntimeError: {str(error).splitlines()[0]}"
        finally:
            over.set()
        return None

    def third() -> None:
        for event in (inside, ended):
            wait(event)
        cold(torch.ones(4))

    said: str | None = run_threads(first=first, second=second, third=third)["second"]
    return said


def mirror() -> None:
    import torch

    steps = [fullgraph(lambda: None) for _ in range(2)]
    over = threading.Event()

    def first() -> None:
        for _ in range(2):
            steps[0](torch.ones(4))
        over.set()

    def second() -> None:
        wait(over)
        steps[1](torch.ones(5))

    run_threads(first=first, second=second)


HAZARD = Hazard(
    id="B6",
    name="fullgraph_count",
    title="fullgraph=True: no compiled frames in a compiled call, eager runs beside it",
    symptom=(
        "`RuntimeError: torch.compile with fullgraph=True found no compiled frames. Compilation was not attempted and no "
        "cached compiled code was found.`, now and then, of a function that runs compiled; flex_attention called eager, too. "
        "Or, without a word: parts of a compiled function now and then run eager."
    ),
    mechanism=(
        "Since 2.13 a `fullgraph=True` call sets a count of compiled frames to 0, and raises where it is still 0 at "
        "the end. The count is one C integer for the process, and a call ends it twice: the second time may end that of a call "
        "of another thread, which then reads that of a third. Calls that overlap also count each other's frames, so that real "
        "faults pass. flex_attention called eager compiles itself with `fullgraph=True`, and takes part. While the count is "
        "on, torch looks at no frame below a compiled one, whichever thread it is of: what a function does after a graph "
        "break, or in helpers that it calls there, runs eager for that call. torch 2.11 counts nothing, but has a "
        "fullgraph=True call say the latter in a variable of its own, for the process as well."
    ),
    links=(),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("fullgraph_count", "fullgraph_override"),
    finding="fullgraph-count",
    fix="Install the guard, under which a program with threads counts no frames; or leave `fullgraph=True` out.",
)
