"""What traces and contexts save and put back in the process: read before and after, to see whether anything was left behind."""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any

from compile_guard.torch_seams.configuration import config_entries

_entries: list[tuple[str, Any]] = []
_num_modules = 0


def _configuration() -> dict[str, Any]:
    """What is overridden of torch's configuration, seen from the calling thread, by name.

    An override that is the default is none: torch makes one where a list, set or dict is read for the first time.
    """
    from torch.utils._config_module import _UNSET_SENTINEL

    global _num_modules
    if len(sys.modules) != _num_modules:  # to look through all modules takes a millisecond
        _num_modules = len(sys.modules)
        _entries[:] = [(f"{module.__name__}.{name}", entry) for module, name, entry in config_entries()]
    found = {}
    for name, entry in _entries:
        override = entry.user_override
        value = override.get(_UNSET_SENTINEL) if isinstance(override, ContextVar) else override
        if value is not _UNSET_SENTINEL and value != entry.default:
            found[name] = value
    return found


def process_state() -> dict[str, Any]:
    """The state of the process, and of the calling thread, by name. Equal before and after a program that cleans up."""
    import torch
    from torch._C._dynamo.eval_frame import get_eval_frame_callback
    from torch._dynamo import eval_frame
    from torch.fx import _symbolic_trace as fx
    from torch.fx.experimental import proxy_tensor
    from torch.utils import _python_dispatch

    compiler = torch.compiler
    return {
        "FX's tracing flag": fx.is_fx_tracing(),
        "nn.Module.__call__": torch.nn.Module.__call__,
        "nn.Module.__getattr__": torch.nn.Module.__getattr__,
        "torch.compiler's compiling flag": getattr(compiler, "_is_compiling_flag", False),
        "torch.compiler's exporting flag": getattr(compiler, "_is_exporting_flag", False),
        "torch.compiler.is_compiling()": compiler.is_compiling(),
        "Dynamo's callback": get_eval_frame_callback(),
        "the stance": eval_frame._stance,
        "make_fx's decompositions": dict(getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})),
        "the dispatch mode": _python_dispatch._get_current_dispatch_mode(),
        "the default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "autograd's threads": torch._C._is_multithreading_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "the configuration": _configuration(),
    }
