"""torch's configuration, which belongs to each thread since torch 2.12."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from contextvars import Context, ContextVar, copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam


def config_entries() -> Iterator[tuple[Any, str, Any]]:
    """Every value of torch's configuration: its module, its name there, its entry."""
    from torch.utils._config_module import ConfigModule

    for module in list(sys.modules.values()):
        if isinstance(module, ConfigModule):
            for name, entry in list(module._config.items()):
                yield module, name, entry


def _config_variables() -> frozenset[ContextVar[Any]]:
    """The context variables that hold torch's configuration; empty where it is kept in the process (before 2.12)."""
    return frozenset(entry.user_override for _, _, entry in config_entries() if isinstance(entry.user_override, ContextVar))


_known: set[ContextVar[Any]] = set()
"""Those that have been looked for. To look through every module takes 0.3 ms, and each start of a thread asks."""


def config_of(context: Context | None) -> dict[ContextVar[Any], Any]:
    """torch's configuration as overridden in a context (None: the calling thread's)."""
    values = dict((context or copy_context()).items())
    if not _known.issuperset(values):
        _known.update(_config_variables())
    return {var: value for var, value in values.items() if var in _known}


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


def _changes(values: dict[ContextVar[Any], Any]) -> list[tuple[Any, str, Any]]:
    """Module, name and value of what a configuration has other than torch's defaults."""
    from torch.utils._config_module import _UNSET_SENTINEL

    found = []
    for module, name, entry in config_entries():
        value = values.get(entry.user_override, _UNSET_SENTINEL)
        if value is not _UNSET_SENTINEL and value != entry.default:
            found.append((module, name, value))
    return found


def _report_lost(names: list[str], where: str, doing: str) -> None:
    findings.report(
        Finding(
            code="config-lost",
            subject=", ".join(names),
            title=f"a function is compiled in {where}, where torch's configuration is back at its defaults",
            now=this_thread(doing),
            shared=f"torch's configuration, kept for each thread since torch 2.12: {', '.join(names)}",
            consequence="limits and switches do not hold: recompiles up to the default limit, then silent eager runs",
            fix="keep compile_guard.install() or use compile_guard.Worker; or set it in each thread",
            prevented=True,
        )
    )


_INHERITED = "_compile_guard_inherited"
"""Attribute of a thread: the configuration that it was started with, until it has compiled something."""


def settings_of_backward(settings: ExitStack) -> None:
    """Put into force, for a compile on an autograd thread, what the thread that called `backward` has configured.

    torch does so for compiled backwards alone: a hook, a custom `backward` or a recompute compiles with the defaults.
    Also tells, at the first compile of a thread, what it would have lost without the guard.
    """
    import torch

    inherited = threading.current_thread().__dict__.pop(_INHERITED, None)
    if inherited:
        names = [f"{module.__name__}.{name}" for module, name, _ in _changes(inherited)]
        if names:
            _report_lost(names, "a thread", "compiles for the first time")
    if not torch._C._is_key_in_tls("context"):
        return
    stashed = torch._C._get_obj_in_tls("context")
    caller = config_of(stashed.context if isinstance(stashed, _EnteredOften) else stashed)
    here = config_of(None)
    lost = [each for each in _changes(caller) if here.get(each[0]._config[each[1]].user_override) != each[2]]
    if lost:
        _report_lost([f"{module.__name__}.{name}" for module, name, _ in lost], "a backward", "compiles during a backward")
    for module, name, value in lost:
        settings.enter_context(module.patch({name: value}))


class _EnteredOften:
    """A context in which several threads may be at once, and one thread twice: each run has a copy."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._num_inside = 0

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`Context.run`, in a copy."""
        self._num_inside += 1
        try:
            if self._num_inside > 1:
                _report_reentry()
            return self.context.copy().run(function, *args, **kwargs)
        finally:
            self._num_inside -= 1


def _report_reentry() -> None:
    findings.report(
        Finding(
            code="context-reentry",
            subject="torch.autograd.backward",
            title="two compiled backwards of one backward run at the same time",
            now=this_thread("runs a compiled backward while another one runs"),
            shared="the context of the thread that called backward, which torch enters for each (pytorch#185372)",
            consequence="`RuntimeError: cannot enter context: ... is already entered`",
            fix="keep compile_guard.install(), or use torch 2.14 or newer",
            prevented=True,
        )
    )


def context_is_entered_as_it_is() -> bool:
    """Whether compiled backwards enter the caller's own context (2.12, 2.13), not a copy of it."""
    import torch._dynamo  # noqa: F401 - before parts of `_functorch`, which import each other in a circle
    from torch._functorch._aot_autograd import runtime_wrappers

    # Torch writes the backward's wrapper as text when it compiles: only the text of its own source tells.
    return "(_cc.run," in Path(runtime_wrappers.__file__).read_text(encoding="utf-8")


def _backward_context(patches: Patches) -> None:
    from torch.autograd import graph

    def context_of_backward() -> _EnteredOften:
        return _EnteredOften(copy_context())

    patches.set_attribute(graph, "contextvars", SimpleNamespace(copy_context=context_of_backward))


def _config_inherit(patches: Patches) -> None:
    """A thread starts with the configuration of the one that starts it, as it did before torch 2.12.

    Only torch's variables are handed on: other libraries mean their context variables to begin anew.
    """
    start, run_thread = threading.Thread.start, threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def start_with_config(self: threading.Thread) -> None:
        setattr(self, _INHERITED, config_of(None))
        start(self)

    def bootstrap_with_config(self: threading.Thread) -> None:
        for var, value in self.__dict__.get(_INHERITED, {}).items():
            var.set(value)
        run_thread(self)

    patches.set_attribute(threading.Thread, "start", start_with_config)
    patches.set_attribute(threading.Thread, "_bootstrap_inner", bootstrap_with_config)


def config_is_global() -> bool:
    """Whether torch's configuration belongs to the process (before 2.12), so that two threads save and put back the same."""
    return not config_is_per_thread()


SEAMS = (
    Seam("config_inherit", "a thread starts with the configuration of its starter", _config_inherit, config_is_per_thread),
    Seam(
        "backward_context",
        "compiled backwards of one backward each run in a context of their own",
        _backward_context,
        context_is_entered_as_it_is,
    ),
)
