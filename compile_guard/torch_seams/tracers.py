"""Tracers hold the trace lock, and their flags and patches act for the tracing thread alone."""

from __future__ import annotations

from typing import Any

from compile_guard import tracing
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code
from compile_guard.torch_seams.trace_lock import heal


def _fx_tracer(patches: Patches) -> None:
    import torch.fx

    trace = tracing.owned_fx_trace(torch.fx.Tracer.trace)
    skip_code(trace.__code__)
    patches.set_attribute(torch.fx.Tracer, "trace", trace)


def fx_flag_is_global() -> bool:
    """Whether FX's tracing flag is one for the process (2.9 to 2.13); a thread-local since 2.14 (pytorch#168999)."""
    from torch.fx import _symbolic_trace as fx

    return hasattr(fx, "_is_fx_tracing_flag")


def _fx_flag(patches: Patches) -> None:
    import torch
    from torch._higher_order_ops import utils as hop_utils
    from torch.fx import _symbolic_trace as fx

    namespace = vars(fx)
    tracing.mirrors_of_live.append(namespace)
    namespace[tracing.LIVE] = tracing.num_live_traces() > 0

    def restore() -> None:
        tracing.mirrors_of_live.remove(namespace)
        del namespace[tracing.LIVE]

    patches.on_undo("FX's namespace", restore)
    of_this_thread = tracing.fx_flag_of_this_thread
    patches.swap_code(fx.is_fx_symbolic_tracing, of_this_thread(torch.compiler.is_compiling), when=tracing.LIVE)
    patches.swap_code(fx.is_fx_tracing, of_this_thread(None), when=tracing.LIVE)
    generator = hop_utils._set_compilation_env.__wrapped__
    original: list[Any] = []
    suspended = tracing.suspended_trace(lambda *a, **k: original[0](*a, **k), heal)
    original.append(patches.swap_code(generator, suspended))
    for function in (suspended, generator):
        skip_code(function.__code__)


def _module_patches(patches: Patches) -> None:
    from torch.fx import _symbolic_trace as fx

    patcher = fx._Patcher
    patch_method, patch = patcher.patch_method, patcher.patch

    def patch_method_for_owner(self: Any, cls: type, name: str, new_fn: Any, deduplicate: bool = True) -> None:
        shim = tracing.owner_only.shim(new_fn, getattr(cls, name), f"{cls.__name__}.{name}")
        patch_method(self, cls, name, shim, deduplicate)

    def patch_for_owner(self: Any, frame_dict: dict[str, Any], name: str, new_fn: Any, deduplicate: bool = True) -> None:
        builtins = frame_dict.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        stood_there = frame_dict.get(name, builtins.get(name))
        shim = new_fn if stood_there is None else tracing.owner_only.shim(new_fn, stood_there, name)
        patch(self, frame_dict, name, shim, deduplicate)

    skip_code(tracing.owner_only.shim(len, len, "").__code__)
    patches.set_attribute(patcher, "patch_method", patch_method_for_owner)
    patches.set_attribute(patcher, "patch", patch_for_owner)


def _compiling_flags(patches: Patches) -> None:
    import torch

    for function in (torch.compiler.is_compiling, torch.compiler.is_exporting):
        flag = tracing.flag_of_the_owner(f"torch.compiler.{function.__name__}")
        patches.swap_code(function, flag, when=f"_{function.__name__}_flag")


def _make_fx(patches: Patches) -> None:
    from torch.fx.experimental import proxy_tensor

    tracer = proxy_tensor._MakefxTracer
    patches.set_attribute(tracer, "trace", tracing.locked_tracer(tracer.trace, "make_fx"))


def make_fx_tracer_is_global() -> bool:
    """Whether the tracer to which higher-order ops go back is one for the process (up to 2.14)."""
    from torch.fx.experimental import proxy_tensor

    return hasattr(proxy_tensor, "_CURRENT_MAKE_FX_TRACER")


def _export(patches: Patches) -> None:
    from torch.export import _trace

    for name in ("_export", "_export_for_training"):
        patches.set_attribute(_trace, name, tracing.locked_tracer(getattr(_trace, name), tracing.EXPORT))


def _export_load(patches: Patches) -> None:
    from torch._export.serde.serialize import GraphModuleDeserializer as deserializer

    locked = tracing.locked_tracer(deserializer.deserialize, tracing.EXPORT_LOAD)
    patches.set_attribute(deserializer, "deserialize", locked)


SEAMS = (
    Seam("compiling_flags", "`is_compiling` and `is_exporting` speak of the calling thread", _compiling_flags),
    Seam("fx_flag", "FX's tracing flag speaks of the calling thread", _fx_flag, fx_flag_is_global),
    Seam("fx_tracer", "one `fx.Tracer.trace` at a time, under the trace lock", _fx_tracer),
    Seam("module_patches", "FX's patches of nn.Module act for the tracing thread alone", _module_patches),
    Seam("make_fx", "make_fx under the trace lock", _make_fx),
    Seam("export", "torch.export under the trace lock", _export),
    Seam("export_load", "one exported program is loaded at a time", _export_load),
)
