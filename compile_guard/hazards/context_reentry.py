"""C3: compiled backwards of one `backward()` share one `contextvars.Context`, which cannot be entered twice."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import meet


def affected() -> Affected:
    from compile_guard.torch_seams.configuration import context_is_entered_as_it_is

    if context_is_entered_as_it_is():
        return Affected(True, "compiled backwards enter the caller's own context: `_cc.run` in runtime_wrappers.py")
    return Affected(False, "compiled backwards enter no context, or a copy of the caller's")


def in_backward(during: Any, devices: tuple[str, ...], *, nested: bool) -> str | None:
    """Compile a function for each device, and run one backward over all; `during` runs inside each compiled backward."""
    import torch
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def forward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        return make_boxed_func(graph.forward)

    def backward(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        def run(*args: Any) -> Any:
            during()
            return graph.forward(*args)

        return make_boxed_func(run)

    outer = torch.compile(lambda x: x.sin() * 2, backend=aot_autograd(fw_compiler=forward, bw_compiler=backward))
    leaves = [torch.ones(4, device=device, requires_grad=True) for device in devices]
    try:
        torch.autograd.backward([outer(leaf).sum() for leaf in leaves])
    except RuntimeError as error:
        if "cannot enter context" not in str(error):
            raise
        return f"{'a nested compiled backward' if nested else 'two devices in one backward'}: RuntimeError: {error}"
    return None


def nested_in_one_thread() -> str | None:
    """A compiled backward whose work runs another compiled function's backward node."""
    import torch

    inner: Any = torch.compile(lambda x: x.cos() * 3, backend="aot_eager")(torch.ones(4, requires_grad=True))

    def run_inner() -> None:
        inner.grad_fn.apply(torch.ones(4))

    return in_backward(run_inner, ("cpu",), nested=True)


def on_two_devices() -> str | None:
    """The caller's thread and the GPU's are inside compiled backwards at the same time."""
    both = threading.Barrier(2)
    return in_backward(lambda: meet(both), ("cpu", "cuda"), nested=False)


def trigger() -> str | None:
    import torch

    said = [nested_in_one_thread()]
    if torch.cuda.is_available():
        said.append(on_two_devices())
    return "; ".join(filter(None, said)) or None


def mirror() -> None:
    said = in_backward(lambda: None, ("cpu", "cpu"), nested=False)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="C3",
    name="context_reentry",
    title="Compiled backwards of one backward enter the same context twice",
    symptom="`RuntimeError: cannot enter context: <_contextvars.Context object ...> is already entered`, now and then.",
    mechanism=(
        "`backward()` keeps one copy of the caller's context for all its threads, and every compiled backward runs "
        "inside that very object: the second one that begins before the first has ended is refused, on another "
        "device's thread or nested in the first."
    ),
    links=("pytorch#185372", "pytorch#186659", "intel/auto-round#1894"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("backward_context",),
    finding="context-reentry",
    fix="Install the guard, which gives each compiled backward a copy, as torch 2.14 does.",
)
