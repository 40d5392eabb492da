"""A5: a thread in make_fx has its higher-order ops traced by the tracer of another thread's make_fx, or by none."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.tracers import make_fx_tracer_is_global

    if make_fx_tracer_is_global():
        return Affected(True, "the tracer that higher-order ops go back to is `proxy_tensor._CURRENT_MAKE_FX_TRACER`, a global")
    return Affected(False, "there is no global `proxy_tensor._CURRENT_MAKE_FX_TRACER`")


def branch(x: Any) -> Any:
    """A `cond` whose two branches both compute a sine."""
    import torch

    return torch.ops.higher_order.cond(True, lambda x: (x.sin(),), lambda x: (x.sin(),), (x,))[0]


def ops_of(graph: Any) -> set[str]:
    """Names of the aten ops in a graph and in the graphs of its branches."""
    modules = [each for each in graph.modules() if hasattr(each, "graph")]
    targets = {str(node.target) for each in modules for node in each.graph.nodes}
    return {target for target in targets if target.startswith("aten.")}


def traced_by_the_other() -> str | None:
    """The second make_fx begins inside the first one, which then meets a `cond`."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    x = torch.ones(3)

    def first() -> set[str]:
        def traced(x: torch.Tensor) -> Any:
            first_in.set()
            wait(second_in)
            return branch(x)

        try:
            return ops_of(make_fx(traced)(x))
        finally:
            first_out.set()

    def second() -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            second_in.set()
            wait(first_out)
            return x + 1

        wait(first_in)
        # That FX's patches of nn.Module do not nest across threads is another hazard.
        expect_assertion(lambda: make_fx(traced, decomposition_table={torch.ops.aten.sin.default: torch.cos})(x))

    ops: set[str] = run_threads(first=first, second=second)["first"]
    if ops == {"aten.sin.default"}:
        return None
    return f"a branch that computes a sine was traced, with another thread's decompositions, as {', '.join(sorted(ops))}"


def traced_by_nobody() -> str | None:
    """The first make_fx ends inside the second one, which then meets a `cond`."""
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    x = torch.ones(3)

    def first() -> None:
        def traced(x: torch.Tensor) -> torch.Tensor:
            first_in.set()
            wait(second_in)
            return x + 1

        try:
            make_fx(traced)(x)
        finally:
            first_out.set()

    def second() -> str | None:
        caught: list[AssertionError] = []

        def traced(x: torch.Tensor) -> Any:
            second_in.set()
            wait(first_out)
            try:
                return branch(x)
            except AssertionError as error:
                caught.append(error)
                return x

        wait(first_in)
        expect_assertion(lambda: make_fx(traced)(x))
        if not caught:
            return None
        return f"in the middle of make_fx a `cond` raised AssertionError: {str(caught[0]) or 'no message'}"

    said: str | None = run_threads(first=first, second=second)["second"]
    return said


def expect_assertion(trace: Any) -> None:
    """Trace, and let the error pass that FX raises where two traces overlapped."""
    try:
        trace()
    except AssertionError as error:
        if str(error) not in ("", "CURRENT_PATCHER is None in finally block"):
            raise


def trigger() -> str | None:
    said = [traced_by_nobody(), traced_by_the_other()]  # in this order: either leaves a dead tracer behind
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(3)
    over = threading.Event()

    def first() -> set[str]:
        try:
            return ops_of(make_fx(branch)(x))
        finally:
            over.set()

    def second() -> set[str]:
        wait(over)
        return ops_of(make_fx(branch, decomposition_table={torch.ops.aten.sin.default: torch.cos})(x))

    ops = run_threads(first=first, second=second)
    if ops != {"first": {"aten.sin.default"}, "second": {"aten.cos.default"}}:
        raise AssertionError(f"two traces, one after the other, gave {ops}")


HAZARD = Hazard(
    id="A5",
    name="make_fx_race",
    title="Higher-order ops traced by another thread's make_fx, or by none",
    symptom=(
        "`AssertionError: Cannot reenter make_fx when we're not under a make_fx tracing session` (2.9: without a message); "
        "silently, branches of `cond` and score functions of flex_attention traced with another thread's decompositions."
    ),
    mechanism=(
        "A higher-order op traces its branches with `_CURRENT_MAKE_FX_TRACER`, a global that each make_fx sets and puts back. "
        "make_fx takes no lock, and AOTAutograd, export and quantisation all go through it."
    ),
    links=("pytorch#187589", "pytorch#184917", "pytorch#189884"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "make_fx"),
    finding="make-fx",
    fix="Install the guard, under which one make_fx runs at a time; or trace before the threads start.",
)
