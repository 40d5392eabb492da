"""Seams in other libraries, put in when the program imports them: nothing here imports any of them.

A finder at the head of `sys.meta_path` knows the few module names that are waited for; every other import costs one look into
a dictionary. Read with transformers 5.17 and 5.24, accelerate 1.15, Triton 3.5.1, 3.6 and 3.8.0.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.tracing import TRACE_LOCK


@dataclass(frozen=True, slots=True)
class EcosystemSeam:
    """One place where the guard takes hold of another library."""

    name: str
    purpose: str
    module: str
    """Whose import it waits for."""
    put_in: Callable[[Patches, ModuleType], None]


# ------------------------------------------------------------------------------------------------- transformers, accelerate

_BUILDS = "a model's construction"


def _one_builder(patches: Patches, manager: Any, acting: Callable[[], None] = lambda: None) -> None:
    """Let a context manager that patches the process hold the trace lock for its block; `acting` runs once it is entered.

    The trace lock and no lock of its own: a compile saves and puts back the default dtype too.

    Args:
        manager: what `@contextmanager` made; holders of it are reached as well.
    """
    original: list[Callable[..., Iterator[Any]]] = []

    def suspended(*args: Any, **kwargs: Any) -> Iterator[Any]:
        _report_second_builder()
        with TRACE_LOCK.hold(_BUILDS), contextmanager(original[0])(*args, **kwargs) as entered:
            acting()
            yield entered

    original.append(patches.swap_code(manager.__wrapped__, suspended))


def _report_second_builder() -> None:
    if TRACE_LOCK.doing != _BUILDS or TRACE_LOCK.owned():
        return
    findings.report(
        Finding(
            code="model-loading",
            subject="transformers",
            title="two threads build models at the same time",
            now=this_thread("begins to build a model"),
            other=other_thread(TRACE_LOCK.owner, "builds a model", TRACE_LOCK.held_s),
            shared="torch's default dtype and what the library patches for the process (`tie_weights`, `torch.nn.init`, "
            "`register_parameter`)",
            consequence="weights in the other model's dtype or on `meta`; what is put back last stays for ever",
            fix="keep compile_guard.install(); hold compile_guard.exclusive() around plain modules built meanwhile",
            prevented=True,
        )
    )


def _for_owner(owner: Any, name: str, stood_there: Any) -> None:
    """Make what the calling thread has just patched in act for it alone: other threads get what stood there."""
    patched, me = getattr(owner, name), threading.get_ident()
    if patched is stood_there:
        return

    @functools.wraps(stood_there)
    def owner_only(*args: Any, **kwargs: Any) -> Any:
        return (patched if threading.get_ident() == me else stood_there)(*args, **kwargs)

    setattr(owner, name, owner_only)


def _transformers_models(patches: Patches, modeling: ModuleType) -> None:
    model, initialization = modeling.PreTrainedModel, modeling.init
    tie_weights = model.tie_weights
    _one_builder(patches, modeling.local_torch_dtype)
    _one_builder(patches, initialization.no_tie_weights, lambda: _for_owner(model, "tie_weights", tie_weights))
    for name in ("no_init_weights", "guard_torch_init_functions", "meta_device_safe_creation_ops"):
        manager = getattr(initialization, name, None)  # not in every 5.x
        if manager is not None:
            _one_builder(patches, manager)


def _accelerate_init(patches: Patches, big_modeling: ModuleType) -> None:
    from torch import nn

    register = nn.Module.register_parameter
    _one_builder(patches, big_modeling.init_on_device, lambda: _for_owner(nn.Module, "register_parameter", register))


def _transformers_flex(patches: Patches, integration: ModuleType) -> None:
    """One compiled flex_attention for training and evaluation, with a cache for each device, made once."""
    import torch

    wrapper = integration.WrappedFlexAttention
    compiled: list[Any] = []

    def compiled_once() -> Any:
        from compile_guard.device_cache import compile

        if not compiled:
            with TRACE_LOCK.hold("the compiled flex_attention of transformers"):
                if not compiled:
                    compiled.append(compile(integration.flex_attention))
        return compiled[0]

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def __init__(self: Any, training: bool) -> None:
        me = threading.get_ident()
        last_thread, last_training = self.__dict__.get("_compile_guard_last", (me, training))
        if last_training != training and last_thread != me:
            _report_flex_switch(last_thread)
        self._compile_guard_last = me, training
        self.training, self._is_flex_compiled = training, True
        self._compiled_flex_attention = compiled_once()

    def forget() -> None:
        wrapper._instance = None  # what it holds was made by the other of the two

    forget()
    patches.on_undo("the instance of WrappedFlexAttention", forget)
    patches.set_attribute(wrapper, "__init__", __init__)


def _report_flex_switch(thread: int) -> None:
    findings.report(
        Finding(
            code="flex-singleton",
            subject="WrappedFlexAttention",
            title="threads that train and threads that evaluate share the compiled flex_attention of transformers",
            now=this_thread("asks for it"),
            other=other_thread(thread, "asked for it in the other mode"),
            shared="one object of the class for all threads and devices, with one cache and one recompile limit",
            consequence="torch.compile is called anew at each switch, and all devices share one limit: past it, flex_attention "
            "runs eager and materialises its scores",
            fix="keep compile_guard.install(), or register an attention function of your own for each device",
            prevented=True,
        )
    )


# -------------------------------------------------------------------------------------------------------------------- Triton


def _of_thread(name: str, report: Callable[[int], None] | None) -> property:
    """An attribute that each thread has for itself, None being as good as unset."""
    key = f"_compile_guard_{name}"

    def get(self: Any) -> Any:
        return self.__dict__.get(key, {}).get(threading.get_ident())

    def assign(self: Any, value: Any) -> None:
        values, me = self.__dict__.setdefault(key, {}), threading.get_ident()
        if value is None:
            values.pop(me, None)
            return
        other = next((ident for ident in list(values) if ident != me), None)
        values[me] = value
        if other is not None and report is not None:
            report(other)

    return property(get, assign)


def _triton_autotuner(patches: Patches, module: ModuleType) -> None:
    """Each thread's launch of an autotuned kernel has its own arguments, and its own copies to restore (triton#11494)."""
    patches.set_attribute(module.Autotuner, "nargs", _of_thread("nargs", _report_shared_arguments))
    patches.set_attribute(module.Autotuner, "restore_copies", _of_thread("restore_copies", None))


def _report_shared_arguments(thread: int) -> None:
    findings.report(
        Finding(
            code="autotuner-race",
            subject="triton.autotune",
            title="two threads launch one autotuned Triton kernel at the same time",
            now=this_thread("launches the kernel"),
            other=other_thread(thread, "launches it, or tunes it"),
            shared="`nargs` and `restore_copies` of the kernel object: the arguments that tuning resets and restores",
            consequence="`'NoneType' object is not a mapping`, or another thread's tensors set to zero while this one tunes",
            fix="keep compile_guard.install(), or launch each kernel once before the threads start",
            prevented=True,
        )
    )


ECOSYSTEM_SEAMS: tuple[EcosystemSeam, ...] = (
    EcosystemSeam(
        "transformers_models", "one model is built at a time", "transformers.modeling_utils", _transformers_models
    ),
    EcosystemSeam(
        "accelerate_init", "`init_empty_weights` acts for its own thread", "accelerate.big_modeling", _accelerate_init
    ),
    EcosystemSeam(
        "transformers_flex",
        "the compiled flex_attention of transformers is made once, with a cache for each device",
        "transformers.integrations.flex_attention",
        _transformers_flex,
    ),
    EcosystemSeam(
        "triton_autotuner",
        "launches of an autotuned Triton kernel keep their arguments apart",
        "triton.runtime.autotuner",
        _triton_autotuner,
    ),
)


# ------------------------------------------------------------------------------------------------------------------- imports

PutIn = Callable[[str, Callable[[], None]], None]
"""Puts a seam in by its name, and reports one that does not fit."""


class _WhenImported(importlib.abc.MetaPathFinder):
    """Finds the modules that are waited for as the other finders do, with a loader that puts their seams in."""

    def __init__(self, patches: Patches, put_in: PutIn) -> None:
        self._waiting = {seam.module: seam for seam in ECOSYSTEM_SEAMS}
        self._patches = patches
        self._put_in = put_in

    def put_in(self, seam: EcosystemSeam, module: ModuleType) -> None:
        self._put_in(seam.name, functools.partial(seam.put_in, self._patches, module))

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        seam = self._waiting.get(name)
        if seam is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _ThenPutIn(spec.loader, functools.partial(self.put_in, seam))
                return spec
        return None


class _ThenPutIn(importlib.abc.Loader):
    """A module's own loader, after which its seam is put in."""

    def __init__(self, loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Who asks the module for its loader later (inspect, pickle, resources) finds the real one.
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(module)


def watch(patches: Patches, put_in: PutIn) -> None:
    """Put in the seams of what is imported already, and those of the rest as it is imported, until `patches` are undone."""
    finder = _WhenImported(patches, put_in)
    sys.meta_path.insert(0, finder)
    patches.on_undo("the import hook", lambda: sys.meta_path.remove(finder))
    for seam in ECOSYSTEM_SEAMS:
        module = sys.modules.get(seam.module)
        if module is not None:
            finder.put_in(seam, module)
