"""Dynamo leaves the guard's own frames alone."""

from __future__ import annotations

import sys
from types import CodeType


def prepare() -> None:
    """Let torch patch itself first: its own patch of `fx.Tracer.trace`, made at the first compile, would go over ours."""
    import torch._dynamo
    from torch._dynamo import eval_frame

    eval_frame.TorchPatcher.patch()
    import torch._functorch._aot_autograd.runtime_wrappers
    import torch._inductor.compile_fx
    import torch.fx.experimental.proxy_tensor
    import torch.utils.checkpoint  # noqa: F401

    skip_own_frames()


_CALLING_ON = frozenset(
    [
        "__call__",
        "_recompute",
        "_run",
        "call",
        "callback",
        "checkpoint",
        "convert",
        "dispatch",
        "entry",
        "get_or_compile",
        "gated_callback",
        "locked",
        "maybe_set_eval_frame",
        "owner_only",
        "_backward_impl",
        "reset",
        "suspended",
        "trace",
        "trace_noted",
    ]
)
"""Functions of ours that run the program's own code, which Dynamo shall see, or that set what Dynamo calls back."""


_INSIDE_CALLS = frozenset(
    [
        "activation_checkpoint",
        "eager_calls",
        "ecosystem_seams",
        "entry",
        "events",
        "findings",
        "single_flight",
        "torch_seams",
        "trace_lock",
        "tracing",
        "waits",
    ]
)
"""Modules and packages whose functions may run inside a compiled call."""


def skip_own_frames() -> None:
    """Tell Dynamo never to look at frames of this package, nor at what those call, but for `_CALLING_ON`.

    A report made inside a compiled call would otherwise be compiled: it waits for the lock on a warm call.
    """
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    alone = FrameExecStrategy(FrameAction.SKIP, FrameAction.DEFAULT)
    with_callees = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)

    def skip(code: CodeType) -> None:
        set_code_exec_strategy(code, alone if code.co_name in _CALLING_ON else with_callees)
        for const in code.co_consts:
            if isinstance(const, CodeType):
                skip(const)

    for name, module in list(sys.modules.items()):
        package, _, inner = name.partition(".")
        if package != "compile_guard" or inner.partition(".")[0] not in _INSIDE_CALLS:
            continue
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
        for each in own:
            for member in vars(each).values() if isinstance(each, type) else (each,):
                for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
                    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
                    if isinstance(code, CodeType) and code.co_filename == module.__file__:
                        skip(code)
