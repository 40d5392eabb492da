"""E1: CUDA graph trees (`mode="reduce-overhead"`) in plain threads: assertion, and one thread's step mark acts on all."""

from __future__ import annotations

from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads


def affected() -> Affected:
    import torch
    from torch._inductor import cudagraph_trees

    runnable = torch.cuda.is_available()
    if not hasattr(cudagraph_trees, "_initialize_tls"):
        return Affected(True, "graph trees exist in the importing thread alone, and the step mark is one counter", runnable)
    if isinstance(vars(cudagraph_trees).get("MarkStepBox"), type):
        return Affected(True, "`MarkStepBox.mark_step_counter`, one class attribute, counts every thread's steps", runnable)
    return Affected(False, "each thread makes its graph trees, and there is no global `MarkStepBox`")


def in_new_threads(num_threads: int) -> str | None:
    """Call one function with CUDA graphs, warm-up, recording and replay, in new threads."""
    import torch

    @torch.compile(mode="reduce-overhead")
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).exp()

    def work() -> str | None:
        with torch.no_grad():
            for number in range(5):
                x = torch.full((64,), float(number), device="cuda")
                try:
                    y = step(x).clone()
                except (AssertionError, RuntimeError, KeyError, AttributeError) as error:
                    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
                if not torch.allclose(y, (x.sin() + 1).exp()):
                    return "wrong values"
        return None

    bodies: dict[str, Any] = {f"worker_{number}": work for number in range(num_threads)}
    failed = [said for said in run_threads(150.0, **bodies).values() if said]
    if not failed:
        return None
    return f"mode='reduce-overhead' failed in {len(failed)} of {num_threads} new threads: {failed[0]}"


def marked_by_another_thread(*, mark: bool) -> str | None:
    """Two forwards, then their backward; in between another thread begins a step of its own."""
    import torch

    @torch.compile(mode="reduce-overhead")
    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x * w).sin().exp()

    w = torch.full((64,), 0.5, device="cuda", requires_grad=True)
    first, second = (torch.full((64,), value, device="cuda") for value in (0.1, 0.7))

    def train(marker: Any) -> torch.Tensor:
        one = layer(first, w)
        marker()
        other = layer(second, w)
        (gradient,) = torch.autograd.grad(one.sum() + other.sum(), w)
        return gradient.clone()

    for _ in range(4):
        train(lambda: None)
    expected = sum(x * (x * w).cos() * (x * w).sin().exp() for x in (first, second))

    def other_thread_marks() -> None:
        run_threads(other=torch.compiler.cudagraph_mark_step_begin)

    try:
        found = train(other_thread_marks if mark else lambda: None)
    except RuntimeError as error:
        return f"after a step mark of another thread: RuntimeError: {str(error).splitlines()[0]}"
    assert isinstance(expected, torch.Tensor)
    return None if torch.allclose(found, expected) else "after a step mark of another thread the gradient is wrong"


def trigger() -> str | None:
    # The second part runs in this thread, which imports the graph trees: it works on every torch.
    said = [marked_by_another_thread(mark=True), in_new_threads(3)]
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    said = marked_by_another_thread(mark=False)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="E1",
    name="cudagraph_threads",
    title="CUDA graphs fail in plain threads, and one thread's step mark acts on all",
    symptom=(
        "`AssertionError` out of `cudagraph_trees.get_obj` in a thread (up to 2.12); `Error: accessing tensor output of "
        "CUDAGraphs that has been overwritten by a subsequent run` in a thread that marked no step."
    ),
    mechanism=(
        "Up to 2.12 the graph trees live in a thread-local that only the importing thread, and the autograd threads it "
        "launches, have; and a compiled function keeps the trees of the thread that ran it first. In all versions "
        "`cudagraph_mark_step_begin` counts down one class attribute, so that every other thread's next call begins a "
        "new generation and frees outputs whose backward is pending."
    ),
    links=("pytorch#123177", "pytorch#184357"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("cudagraph_threads", "cudagraph_mark_step"),
    finding="cudagraph-threads",
    fix="Install the guard; or call what uses CUDA graphs, and mark its steps, from the main thread alone.",
)
