"""torch's configuration, which belongs to each thread since torch 2.12."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam


def _config_variables() -> frozenset[ContextVar[Any]]:
    """The context variables that hold torch's configuration; empty where it is kept in the process (before 2.12)."""
    from torch.utils._config_module import ConfigModule

    return frozenset(
        entry.user_override
        for module in list(sys.modules.values())
        if isinstance(module, ConfigModule)
        for entry in module._config.values()
        if isinstance(entry.user_override, ContextVar)
    )


def config_of(context: Context | None) -> dict[ContextVar[Any], Any]:
    """torch's configuration as overridden in a context (None: the calling thread's)."""
    variables = _config_variables()
    return {var: value for var, value in (context or copy_context()).items() if var in variables}


def config_is_per_thread() -> bool:
    """Whether a new thread starts with the default configuration (2.12 and later, pytorch#173568)."""
    return bool(_config_variables())


def capture_config() -> Callable[[], None]:
    """torch's configuration of the calling thread; calling the result gives it to the thread that calls."""
    captured = config_of(None)

    def apply() -> None:
        for var, value in captured.items():
            var.set(value)

    return apply


def _config_inherit(patches: Patches) -> None:
    """A thread starts with the configuration of the one that starts it, as it did before torch 2.12.

    Only torch's variables are handed on: other libraries mean their context variables to begin anew.
    """
    start, run_thread = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_config(self: threading.Thread) -> None:
        self._compile_guard_config = capture_config()  # type: ignore[attr-defined]
        start(self)

    def bootstrap_with_config(self: threading.Thread) -> None:
        apply = self.__dict__.pop("_compile_guard_config", None)
        if apply is not None:
            apply()
        run_thread(self)

    patches.set_attribute(threading.Thread, "start", start_with_config)
    patches.set_attribute(threading.Thread, "_bootstrap_inner", bootstrap_with_config)


def config_is_global() -> bool:
    """Whether torch's configuration belongs to the process (before 2.12), so that two threads save and put back the same."""
    return not config_is_per_thread()


SEAMS = (
    Seam("config_inherit", "a thread starts with the configuration of its starter", _config_inherit, config_is_per_thread),
)
