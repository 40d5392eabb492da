"""Where an explored schedule may interrupt torch: before a warm call sets its callback, inside traces, at lazy backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import skip_code


def put_in_yield_points(patches: Patches, point: Callable[[str], None]) -> None:
    """Have torch call `point(name)`, with the guard or without it. For exploration alone: warm calls pay for it."""
    import torch.fx
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo import eval_frame
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch.fx import proxy

    set_eval_frame = eval_frame._maybe_set_eval_frame

    def maybe_set_eval_frame(callback: Any) -> Any:
        # Inside a compiled call Dynamo would look at the frames behind `point`.
        if callback is not None and get_eval_frame_callback() is None:
            point("warm call")
        return set_eval_frame(callback)

    skip_code(maybe_set_eval_frame.__code__)
    patches.set_attribute(eval_frame, "_maybe_set_eval_frame", maybe_set_eval_frame)

    trace = torch.fx.Tracer.trace

    @functools.wraps(trace)
    def around_trace(*args: Any, **kwargs: Any) -> Any:
        point("enter trace")
        try:
            return trace(*args, **kwargs)
        finally:
            point("leave trace")

    patches.set_attribute(torch.fx.Tracer, "trace", around_trace)

    create_node = proxy.TracerBase.create_node

    @functools.wraps(create_node)
    def at_node(*args: Any, **kwargs: Any) -> Any:
        point("trace node")
        return create_node(*args, **kwargs)

    patches.set_attribute(proxy.TracerBase, "create_node", at_node)

    compiler = getattr(runtime_wrappers, "_AutogradBackwardCompiler", None)  # torch 2.13; before, the backend's own point
    if compiler is not None:
        get_or_compile = compiler.get_or_compile

        def at_backward(self: Any, **kwargs: Any) -> Any:
            if self.compiled_bw is None:
                point("lazy backward")
            return get_or_compile(self, **kwargs)

        skip_code(at_backward.__code__)
        patches.set_attribute(compiler, "get_or_compile", at_backward)


def put_out_guard_timing(patches: Patches) -> None:
    """Have torch not time each new guard, for which it empties the processor's caches: 40 % of a small compile. Nothing but
    a log has the figure."""
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):
        patches.set_attribute(guards, "profile_guard_manager", lambda *_: 0.0)


def put_in_lock(patches: Patches, wrapped: Callable[[Any], Any]) -> None:
    """Put `wrapped(lock)` in the place of torch's own compile lock, where the guard has not."""
    from torch._dynamo import convert_frame

    patches.set_attribute(convert_frame, "compile_lock", wrapped(convert_frame.compile_lock))


def lazy_backend(point: Callable[[str], None], watched: Callable[[Any], Any]) -> Callable[..., Any]:
    """A backend that runs graphs as they are; with dynamic shapes it compiles the backward when that first runs.

    Args:
        watched: puts itself around each compiled graph.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def compiler(name: str) -> Callable[[Any, Any], Any]:
        def compile_graph(graph: Any, inputs: Any) -> Any:
            point(name)
            return make_boxed_func(watched(graph.forward))

        return compile_graph

    made: Callable[..., Any] = aot_autograd(fw_compiler=compiler("backend"), bw_compiler=compiler("lazy backward"))
    return made
