"""Compiled modules: torch's class of them, their hooks, and ours inside outer compiled code."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

if TYPE_CHECKING:
    import torch


def allow_inlining(wrapper: Callable[..., Any]) -> None:
    """Let Dynamo inline a wrapper that has `cache_info` without taking it for an `lru_cache` and warning of that."""
    from torch._dynamo import utils

    allow = getattr(utils, "allow_lru_cache_wrapper_trace_without_warning", None)
    if allow is not None:
        allow(wrapper)


def is_skipped_by_dynamo(function: Any) -> bool:
    """Whether Dynamo leaves frames of `function` alone (those of torch's own modules), so that they must be inlined."""
    from torch._dynamo import trace_rules

    return bool(trace_rules.check(function))


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than call its `forward`."""
    from torch.nn.modules import module as nn_module

    return bool(
        module._backward_hooks
        or module._backward_pre_hooks
        or module._forward_hooks
        or module._forward_pre_hooks
        or nn_module._has_any_global_hook()  # type: ignore[no-untyped-call]
    )


def optimized_module_class() -> type[torch.nn.Module]:
    """`torch._dynamo.OptimizedModule`, which libraries test for to find a compiled module."""
    from torch._dynamo.eval_frame import OptimizedModule

    optimized: type[torch.nn.Module] = OptimizedModule
    return optimized


def _inlined_modules(patches: Patches) -> None:
    """Inline what `compile_guard.compile(module)` gave into an outer compiled function, as torch does with its own class."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder

    wrap_module = VariableBuilder.wrap_module

    def wrap_module_inside(self: Any, value: Any) -> Any:
        ours = sys.modules.get("compile_guard.compiled_module")  # absent until the first module is compiled
        if ours is None or type(value) is not ours.CompiledModule:
            return wrap_module(self, value)
        self.install_guards(GuardBuilder.TYPE_MATCH)
        self.source = AttrSource(self.source, "_orig_mod")
        return wrap_module(self, value._orig_mod)

    patches.set_attribute(VariableBuilder, "wrap_module", wrap_module_inside)


SEAMS = (
    Seam("inlined_modules", "modules from `compile_guard.compile` are inlined into outer compiled code", _inlined_modules),
)
