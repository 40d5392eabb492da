"""Where `dflash_train` gets `compile` and `checkpoint` from: `compile_guard`, which makes both safe in threads.

Both are drop-ins for `torch.compile` and `torch.utils.checkpoint.checkpoint`; `compile` also takes `shared=KEY`, under
which wrappers of one function share one compile cache per device.
"""

from __future__ import annotations

try:
    from compile_guard import checkpoint, compile  # type: ignore[attr-defined]
except ImportError:  # until the guard lands beside this package
    from collections.abc import Callable
    from typing import Any, TypeVar, cast

    import torch
    from torch.utils.checkpoint import checkpoint

    _F = TypeVar("_F", bound=Callable[..., Any])

    def compile(fn: _F, *, shared: str | None = None, **options: Any) -> _F:
        """`torch.compile` with the signature of `compile_guard.compile`."""
        return cast(_F, torch.compile(fn, **options))


__all__ = ["checkpoint", "compile"]
