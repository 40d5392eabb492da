"""A compiled `nn.Module` with a cache for each device. Imports torch: loaded when the first module is compiled."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from compile_guard import torch_seams
from compile_guard.device_cache import CacheInfo, CompileOptions, cache_of, calling, dispatcher

OptimizedModule: Any = torch_seams.optimized_module_class()


class CompiledModule(OptimizedModule):  # type: ignore[misc]
    """What `torch.compile(module)` gives (an `OptimizedModule`: state dict, attributes, copies and pickles are the
    module's), but each device has a clone of `forward` with a cache of its own."""

    def __init__(self, mod: nn.Module, dynamo_ctx: CompileOptions) -> None:
        super().__init__(mod, dynamo_ctx)

    def _initialize(self) -> None:
        # Called by torch's constructor and after unpickling; the base would ask torch's own context to compile.
        self.forward = _module_dispatcher(self._orig_mod, self.dynamo_ctx)
        if hasattr(self._orig_mod, "_initialize_hook"):  # a lazy module: torch's own way of initialising it first
            self._forward = self.forward
            self.forward = self._call_lazy_check

    def cache_info(self) -> dict[torch.device, CacheInfo]:
        """The state of each device's cache."""
        dispatch = vars(self).get("_forward", self.forward)  # `_forward`: that of a lazy module
        info: dict[torch.device, CacheInfo] = dispatch.cache_info()
        return info


def _module_dispatcher(module: nn.Module, options: CompileOptions) -> Callable[..., Any]:
    forward = module.forward
    # With hooks, the whole call is compiled, hooks included. Dynamo does not look at frames of torch's own modules; those
    # are inlined into a frame of ours as well, as torch does it.
    whole_options = CompileOptions(options.torch_options, options.recompile_limit)
    whole = dispatcher(cache_of(calling(module), whole_options), forward)
    direct, function = whole, None
    if isinstance(forward, types.MethodType) and isinstance(forward.__func__, types.FunctionType):
        function = forward.__func__
        if not torch_seams.is_skipped_by_dynamo(forward):
            direct = dispatcher(cache_of(function, options), forward, (module,))

    def call(*args: Any, **kwargs: Any) -> Any:
        if torch_seams.has_hooks(module) or getattr(module.forward, "__func__", None) is not function:
            return whole(*args, **kwargs)
        return direct(*args, **kwargs)

    def cache_info() -> dict[torch.device, CacheInfo]:
        return {**whole.cache_info(), **direct.cache_info()}  # type: ignore[attr-defined]

    for code in (call.__code__, torch_seams.has_hooks.__code__):
        torch_seams.skip_code(code)
    call._torchdynamo_inline = module.__call__  # type: ignore[attr-defined]
    call._torchdynamo_orig_callable = module.__call__  # type: ignore[attr-defined]
    call.cache_info = cache_info  # type: ignore[attr-defined]
    return call
