"""D1: the backward graph is compiled at the first `backward()`, outside the compile lock."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import meet, run_threads


def affected() -> Affected:
    # The lock would be taken in the middle of torch's text; no name tells of it. The trigger is the test.
    return Affected(True, "no torch so far takes its compile lock before AOTAutograd begins the lazy backward compile")


def first_backwards(*, at_once: bool) -> list[bool]:
    """Compile one function, then run its first backward in two threads: one item per backward compile.

    An item is True when the other thread was inside a backward compile too.
    """
    import torch
    from torch._dynamo.backends.common import aot_autograd

    compiling = threading.Barrier(2)
    met: list[bool] = []

    def boxed(graph: torch.fx.GraphModule) -> Any:
        def run(inputs: list[Any]) -> Any:
            return graph.forward(*inputs)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd's calling convention
        return run

    def compile_backward(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        met.append(meet(compiling) if at_once else False)
        return boxed(graph)

    backend = aot_autograd(fw_compiler=lambda graph, inputs: boxed(graph), bw_compiler=compile_backward)

    @torch.compile(backend=backend)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * x

    losses = [step(torch.ones(4, requires_grad=True)).sum() for _ in range(2)]
    if at_once:
        run_threads(first=losses[0].backward, second=losses[1].backward)
    else:
        for loss in losses:
            run_threads(only=loss.backward)
    return met


def trigger() -> str | None:
    try:
        met = first_backwards(at_once=True)
    except (RuntimeError, AssertionError) as error:
        said = ["", *filter(str.strip, str(error).splitlines())][-1]
        return f"two threads ran a first backward at the same time, and one raised {type(error).__name__}: {said}"
    if all(met):
        return f"two threads compiled backward at once, without the compile lock: one graph, {len(met)} compiles"
    return None


def mirror() -> None:
    num_compiles = len(first_backwards(at_once=False))
    if num_compiles != 1:
        raise AssertionError(f"one backward graph was compiled {num_compiles} times")


HAZARD = Hazard(
    id="D1",
    name="lazy_backward",
    title="Backward graphs are compiled lazily, outside the compile lock",
    symptom=(
        "In the first backward of two threads: on torch 2.9 `Metric(s) {'is_forward'} have already been set` or an "
        "AssertionError in `reset_grad_fn_seq_nr`; later the same graph compiled twice, and hazards A1 and A5 beside "
        "a compile that no lock shows."
    ),
    mechanism=(
        "With static shapes AOTAutograd compiles the backward when `backward()` first needs it, on whichever "
        "thread the autograd engine runs it. It tests `compiled_bw`, enters the forward's tracing and metrics "
        "contexts and calls the compiler with no lock; only Inductor's own step takes `compile_lock`, later."
    ),
    links=("pytorch#140626", "pytorch#192004"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "lazy_backward"),
    finding="lazy-backward",
    fix="Install the guard; or run the first forward and backward of each compiled function in one thread (`warmup`).",
)
