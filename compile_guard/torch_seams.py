"""The only module that touches private names of torch.

Each seam says what it is for, tells by a feature test whether the installed torch needs it, and puts itself in through
`Patches`, which take it out again. Read with torch 2.9.1, 2.11.0, 2.13.0 and 2.14.1; a torch in which a name is gone makes
that one seam fail by name, and the others still work.

torch is imported inside the functions: `TORCH_LOGS=+compile_guard` makes torch import this package half-way through its own
import, and `import compile_guard` must cost nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from compile_guard import tracing
from compile_guard.activation_checkpoint import Block, Tape, thread_safe_checkpoint
from compile_guard.by_identity import ByIdentity
from compile_guard.entry import RETRYING_CODES, counted_entry, gate
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.patching import Patches
from compile_guard.single_flight import DynamoFrame, SingleFlight, is_converting
from compile_guard.tracing import TRACE_LOCK

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Seam:
    """One place where the guard takes hold of torch."""

    name: str
    purpose: str
    put_in: Callable[[Patches], None]
    needed: Callable[[], bool] = lambda: True
    """Feature test: False where the installed torch does by itself what the seam is for."""


# ---------------------------------------------------------------------------------------------------------- trace lock


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


def skip_code(code: CodeType) -> None:
    """Tell Dynamo never to look at frames of `code`: it would compile them, and so wait for the lock on a warm call."""
    from torch._dynamo.eval_frame import skip_code as torch_skip_code

    torch_skip_code(code)


_CALLING_ON = frozenset(
    [
        "__call__",
        "_recompute",
        "_run",
        "call",
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
    ]
)
"""Functions of ours that run the program's own code, which Dynamo shall see, or that set what Dynamo calls back."""


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

    for name in (
        "activation_checkpoint",
        "entry",
        "findings",
        "single_flight",
        "torch_seams",
        "trace_lock",
        "tracing",
        "waits",
    ):
        module = sys.modules[f"compile_guard.{name}"]
        own = [each for each in vars(module).values() if getattr(each, "__module__", None) == module.__name__]
        for each in own:
            for member in vars(each).values() if isinstance(each, type) else (each,):
                for function in (member, getattr(member, "fget", None), getattr(member, "__func__", None)):
                    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
                    if isinstance(code, CodeType) and code.co_filename == module.__file__:
                        skip(code)


def trace_entered() -> Callable[[], None]:
    """Make every backward of the calling thread run on the thread itself; returns what undoes it as the lock falls idle.

    A holder of the trace lock that waited for an autograd device thread would wait for ever where that thread, running
    somebody else's backward, waits for the lock to compile it.
    """
    import torch

    prior: bool = torch._C._is_multithreading_enabled()

    def leaving() -> None:
        torch._C._set_multithreading_enabled(prior)
        heal()

    try:
        torch._C._set_multithreading_enabled(False)
        return leaving
    except BaseException:  # a KeyboardInterrupt: the lock is not taken, and nobody else would put this back
        torch._C._set_multithreading_enabled(prior)
        raise


def _trace_lock(patches: Patches) -> None:
    from torch._dynamo import convert_frame

    original = convert_frame.compile_lock
    TRACE_LOCK.core = original
    TRACE_LOCK.entered = trace_entered
    TRACE_LOCK.on_contention = tracing.report_contention
    patches.set_attribute(convert_frame, "compile_lock", TRACE_LOCK)

    def restore() -> None:
        TRACE_LOCK.entered = TRACE_LOCK.on_contention = None

    patches.on_undo("the trace lock", restore)


def heal() -> None:
    """Mend the FX flag, the `is compiling` flags and FX's patches of `nn.Module`, if no trace is alive and they are left set.

    Only what a tracer wrote is touched: a user's own patch of `nn.Module.__call__` stays.
    """
    import torch
    from torch.fx import _symbolic_trace as fx

    if tracing.num_live_traces():
        return
    healed = []
    if getattr(fx, "_is_fx_tracing_flag", False):
        fx._is_fx_tracing_flag = False
        healed.append("FX's tracing flag")
    for name in ("_is_compiling_flag", "_is_exporting_flag"):
        if getattr(torch.compiler, name, False):
            setattr(torch.compiler, name, False)
            healed.append(f"torch.compiler.{name}")
    for name, pristine in (("__call__", fx._orig_module_call), ("__getattr__", fx._orig_module_getattr)):
        current = getattr(torch.nn.Module, name)
        if current is not pristine and _left_by_a_tracer(current):
            setattr(torch.nn.Module, name, pristine)
            healed.append(f"nn.Module.{name}")
            fx.CURRENT_PATCHER = None
    if healed:
        findings.report(
            Finding(
                code="stuck-flag" if healed[0].startswith("FX") else "module-patch",
                subject=", ".join(healed),
                title="a trace that is over had left its marks on the process; they were taken off",
                now=this_thread("finds no trace alive"),
                shared=", ".join(healed),
                consequence="every later compiled call or module call fails, or runs eager, until the process ends",
                fix="call compile_guard.install() before the first thread traces",
                prevented=True,
            )
        )


def _left_by_a_tracer(function: Any) -> bool:
    from torch.fx import _symbolic_trace as fx

    if hasattr(function, "_compile_guard_shim"):
        return True
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename == fx.__file__ and code.co_name.endswith("_wrapper")


# ------------------------------------------------------------------------------------------------------- flags, patches


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


def _export(patches: Patches) -> None:
    from torch.export import _trace

    for name in ("_export", "_export_for_training"):
        patches.set_attribute(_trace, name, tracing.locked_tracer(getattr(_trace, name), "torch.export"))


# -------------------------------------------------------------------------------------------------------- lazy backward


def _lazy_backward(patches: Patches) -> None:
    """Take the lock from the first step of a lazy backward compile, not only around Inductor's part of it.

    `force_non_lazy_backward_lowering` would avoid lazy compiles altogether, but a backward compiled with the forward has
    its donated buffers fixed, and a first backward with `retain_graph=True`, which works lazily, then raises.
    """
    from torch._functorch._aot_autograd import runtime_wrappers

    compiler = getattr(runtime_wrappers, "_AutogradBackwardCompiler", None)
    if compiler is not None:
        original = compiler.get_or_compile

        def get_or_compile(self: Any, **kwargs: Any) -> Any:
            if self.compiled_bw is not None:
                return self.compiled_bw
            with TRACE_LOCK.hold("a lazy backward compile"):
                if self.compiled_bw is None:
                    _notify_compile("a backward")
                return original(self, **kwargs)  # looks again whether another thread has compiled it

        skip_code(get_or_compile.__code__)
        patches.set_attribute(compiler, "get_or_compile", get_or_compile)
    else:
        _lazy_backward_of_class(patches, runtime_wrappers)


class _LazyBackward(threading.local):
    """Whether this thread holds the lock for a lazy backward compile whose end is the end of its tracing context."""

    def __init__(self) -> None:
        self.pending = False


def _lazy_backward_of_class(patches: Patches, runtime_wrappers: ModuleType) -> None:
    """torch up to 2.12: the compile is written out in `CompiledFunction._backward_impl`, a class made for each graph.

    The lock is taken before that looks whether it is compiled, and given back when the compile ends (its tracing context
    closes), not when the first call does: a collective in the backward would otherwise wait with the lock held.
    """
    lazy = _LazyBackward()
    post_compile = runtime_wrappers.RuntimeWrapper.post_compile
    tracing_context = runtime_wrappers.tracing

    def locked(cls: Any) -> None:
        backward_impl = cls._backward_impl

        def _backward_impl(ctx: Any, all_args: Any) -> Any:
            if cls.compiled_bw is not None:
                return backward_impl(ctx, all_args)
            TRACE_LOCK.acquire("a lazy backward compile")
            if cls.compiled_bw is not None:
                TRACE_LOCK.release()
                return backward_impl(ctx, all_args)
            lazy.pending = True
            try:
                _notify_compile("a backward")
                return backward_impl(ctx, all_args)
            finally:
                if lazy.pending:
                    lazy.pending = False
                    TRACE_LOCK.release()

        skip_code(_backward_impl.__code__)
        cls._backward_impl = staticmethod(_backward_impl)

    class _TracingThenRelease:
        def __init__(self, context: Any) -> None:
            self._inner = tracing_context(context)

        def __enter__(self) -> Any:
            self._ours, lazy.pending = lazy.pending, False
            return self._inner.__enter__()

        def __exit__(self, *exc: Any) -> Any:
            try:
                return self._inner.__exit__(*exc)
            finally:
                if self._ours:
                    TRACE_LOCK.release()

    def post_compile_locked(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
        cls = getattr(compiled_fn, "__self__", None)
        if cls is not None and hasattr(cls, "compiled_bw") and hasattr(cls, "_backward_impl"):
            locked(cls)
        return post_compile(self, compiled_fn, *args, **kwargs)

    patches.set_attribute(runtime_wrappers.RuntimeWrapper, "post_compile", post_compile_locked)
    patches.set_attribute(runtime_wrappers, "tracing", _TracingThenRelease)


# ------------------------------------------------------------------------------------- compiled calls and their caches


class _CompileSeam:
    """What single-flight asks of torch."""

    def __init__(self) -> None:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo import convert_frame
        from torch._dynamo.types import FrameAction
        from torch.nn import Module

        self._entries = _debug_get_cache_entry_list
        self._run_only = FrameAction.RUN_ONLY
        self._dynamo_file = convert_frame.__file__
        self._callback = convert_frame.CatchErrorsWrapper.__call__.__code__
        self._call_impl = Module._call_impl.__code__
        self._module_call = Module._wrapped_call_impl.__code__

    def passing_entry(self, frame: DynamoFrame) -> CodeType | None:
        for entry in self._entries(frame.f_code):
            if entry.guard_manager.check(frame.f_locals):
                code: CodeType = entry.code
                return code
        return None

    def backend(self, converter: Any) -> object:
        while hasattr(converter, "_torchdynamo_orig_backend"):
            converter = converter._torchdynamo_orig_backend
        return converter

    def compiled_code(self, result: Any) -> CodeType | None:
        guarded = getattr(result, "guarded_code", None)
        return None if guarded is None else guarded.code

    def ran_into_limit(self, result: Any) -> bool:
        strategy = getattr(result, "frame_exec_strategy", None)
        return strategy is not None and strategy.cur_action == self._run_only

    def limit_reason(self, code: CodeType) -> str:
        return f"{len(self._entries(code))} entries, recompile_limit {recompile_limits.get(code, recompile_limit())}"

    def settings(self, code: CodeType) -> AbstractContextManager[Any]:
        from torch._dynamo import config

        limit = recompile_limits.get(code)
        if limit is None and not _dynamic.changes:
            return nullcontext()
        settings = ExitStack()
        for change in _dynamic.changes:
            settings.callback(change())
        if limit is not None:
            settings.enter_context(config.patch(recompile_limit=limit))
        return settings

    def is_in_callback(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is self._callback:
                return True
            frame = frame.f_back
        return False

    def entry_of_first_frame(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code.co_filename == self._dynamo_file:
            frame = frame.f_back
        # `OptimizedModule` goes through the module's own call, which does nothing before `forward` but run pre-hooks.
        if frame is not None and frame.f_code is self._call_impl:
            module = frame.f_locals.get("self")
            if _has_pre_hooks(module):
                return None
            frame = frame.f_back
            if frame is None or frame.f_code is not self._module_call:
                return None
            frame = frame.f_back
        if frame is None or not is_compiled_call(frame.f_code) or frame.f_back is None:
            return None
        return frame.f_back if frame.f_back.f_code in RETRYING_CODES else None


def _has_pre_hooks(module: Any) -> bool:
    from torch.nn.modules import module as nn_module

    return bool(getattr(module, "_forward_pre_hooks", True) or nn_module._global_forward_pre_hooks)


def is_compiled_call(code: CodeType) -> bool:
    """Whether `code` is torch's wrapper around a compiled function."""
    return code.co_name == "compile_wrapper" and code.co_filename == sys.modules["torch._dynamo.eval_frame"].__file__


recompile_limits: ByIdentity[int] = ByIdentity()
"""Limits of single code objects (`compile(recompile_limit=)`); the others have torch's."""

compile_listeners: list[Callable[[str], None]] = []
"""Called, under the trace lock, with a description of what is about to be compiled."""


def _notify_compile(what: str) -> None:
    for listener in tuple(compile_listeners):
        listener(what)


def _single_flight(patches: Patches) -> None:
    from torch._dynamo import convert_frame

    flight = SingleFlight(_CompileSeam(), _notify_compile)
    for cls in (convert_frame.ConvertFrame, convert_frame.ConvertFrameAssert):
        patches.set_attribute(cls, "__call__", flight.wrap(cls.__call__))


def _compiled_entry(patches: Patches) -> None:
    """Put the counted entry around what `torch.compile` makes from now on."""
    from torch._dynamo import eval_frame

    optimize = eval_frame.OptimizeContext
    make = optimize.__call__
    for code in RETRYING_CODES:
        skip_code(code)

    def make_counted(self: Any, fn: Any) -> Any:
        made = make(self, fn)
        code = getattr(made, "__code__", None)
        return with_entry(made) if code is not None and is_compiled_call(code) else made

    patches.set_attribute(optimize, "__call__", make_counted)


def with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The counted entry of torch's compiled-call wrapper, which torch takes for that wrapper."""
    entry = counted_entry(compiled)
    if hasattr(compiled, "_torchdynamo_wrapper_id"):
        entry._torchdynamo_wrapper_id = id(entry)  # type: ignore[attr-defined]
    return entry


class _Dynamic(threading.local):
    """What `torch.compile(dynamic=...)` asks for in the compiled calls that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.changes: list[Callable[[], Callable[[], None]]] = []


_dynamic = _Dynamic()


def config_is_global() -> bool:
    """Whether torch's configuration belongs to the process (before 2.12), so that two threads save and put back the same."""
    return not config_is_per_thread()


def _dynamic_config(patches: Patches) -> None:
    """Put `dynamic=` into the configuration for the compile alone, under the lock, and not for the whole call.

    Two calls that overlap would each save what the other has set: one compiles with the other's setting, and what is put
    back last stays for ever.
    """
    from torch._dynamo import eval_frame

    make_set_enable_dynamic = eval_frame.make_set_enable_dynamic

    def make_noted(enable: bool) -> Callable[[], Callable[[], Any]]:
        change = make_set_enable_dynamic(enable)

        def note() -> Callable[[], Any]:
            _dynamic.changes.append(change)
            return _dynamic.changes.pop

        return note

    patches.set_attribute(eval_frame, "make_set_enable_dynamic", make_noted)


def _reset_gate(patches: Patches) -> None:
    import torch._dynamo
    from torch._dynamo import eval_frame

    from_stance = eval_frame._callback_from_stance
    num_resets = 0
    counting = threading.Lock()

    def gated_callback(callback: Any) -> Any:
        # Reached by compiled calls that have no entry of ours: they wait as if not yet inside. Those that are counted have
        # been let in already, and the reset waits for them.
        # (Disabled functions come here too, and pass.)
        caller = sys._getframe(1)
        if gate.is_closed_for_me() and is_compiled_call(caller.f_code) and not _inside_a_call(caller):
            while gate.is_closed_for_me():
                gate.wait()
        return from_stance(callback)

    def quiet(original: list[Callable[[], None]]) -> Callable[[], None]:
        def reset() -> None:
            nonlocal num_resets
            # Only while a reset waits or works do calls that were compiled before `install()` pass there.
            with counting:
                num_resets += 1
                eval_frame._callback_from_stance = gated_callback
            try:
                with gate.shut(is_compiled_call), TRACE_LOCK.hold("torch._dynamo.reset"):
                    original[0]()
            finally:
                with counting:
                    num_resets -= 1
                    if not num_resets:
                        eval_frame._callback_from_stance = from_stance

        return reset

    for function in (torch._dynamo.reset, torch._dynamo.reset_code_caches):
        original: list[Callable[[], None]] = []
        original.append(patches.swap_code(function, quiet(original)))


def _inside_a_call(frame: FrameType | None) -> bool:
    """Whether the compiled-call wrapper whose frame this is was counted, or has another one further out."""
    assert frame is not None
    while (frame := frame.f_back) is not None:
        if frame.f_code in RETRYING_CODES or is_compiled_call(frame.f_code):
            return True
    return False


def allow_inlining(wrapper: Callable[..., Any]) -> None:
    """Let Dynamo inline a wrapper that has `cache_info` without taking it for an `lru_cache` and warning of that."""
    from torch._dynamo import utils

    allow = getattr(utils, "allow_lru_cache_wrapper_trace_without_warning", None)
    if allow is not None:
        allow(wrapper)


def recompile_limit() -> int:
    """torch's limit of compiled versions for each code object, in the calling thread."""
    from torch._dynamo import config

    limit: int = config.recompile_limit
    return limit


def entries(code: CodeType) -> int:
    """Number of compiled versions in the cache of a code object."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def reset_code(code: CodeType) -> None:
    """Drop the compiled versions of one code object. No thread may be inside it: see `entry.Gate.shut`."""
    from torch._C._dynamo.eval_frame import reset_code as torch_reset_code

    torch_reset_code(code)


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


# ----------------------------------------------------------------------------------------- checkpoint and configuration


class RandomOps:
    """Dispatch modes that record and replay what random ops return, and questions about the configuration."""

    def __init__(self) -> None:
        import torch
        from torch.utils import _python_dispatch
        from torch.utils._pytree import tree_map_only

        self._seeded = torch.Tag.nondeterministic_seeded
        self._modes = _python_dispatch
        clone: Callable[[Any], Any] = lambda tree: tree_map_only(torch.Tensor, torch.clone, tree)  # noqa: E731
        base = _python_dispatch.TorchDispatchMode
        seeded = self._seeded

        class _Mode(base):  # type: ignore[misc, valid-type]
            """Pushed by hand: `__enter__` sets process-wide flags that make Dynamo run other threads eager."""

            def __init__(self, tape: Tape, on_draw: Callable[[], None]) -> None:
                super().__init__()
                self._tape = tape
                self._position = 0
                self._on_draw = on_draw

            @classmethod
            def ignore_compile_internals(cls) -> bool:
                # Compiled functions stay compiled under this mode; their seeds come through it as `randint.low_out`.
                return True

            def __enter__(self) -> Any:
                _python_dispatch._push_mode(self)
                _active.modes.append(self)
                return self

            def __exit__(self, *exc: object) -> None:
                _active.modes.pop()
                _python_dispatch._pop_mode()

        class _Recording(_Mode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                returned = func(*args, **(kwargs or {}))
                if seeded in func.tags:
                    self._on_draw()
                    self._tape.record(str(func), clone(returned))
                return returned

        class _Replaying(_Mode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                kwargs = kwargs or {}
                if seeded not in func.tags:
                    return func(*args, **kwargs)
                self._on_draw()
                drawn = self._tape.at(self._position, str(func))
                self._position += 1
                # Ops that write into an argument (`bernoulli_`, `randint.low_out`) return that argument.
                target = kwargs.get("out", args[0] if args and func._schema.is_mutable else None)
                if func._schema.is_mutable and isinstance(target, torch.Tensor):
                    with torch.no_grad():
                        return target.copy_(drawn)
                return clone(drawn)

        self.recording: Callable[[Tape, Callable[[], None]], Any] = _Recording
        self.replaying: Callable[[Tape, Callable[[], None]], Any] = _Replaying

    @staticmethod
    def is_tracing() -> bool:
        """Whether the calling thread is inside a trace, which has a way of its own for checkpointed blocks."""
        import torch

        return bool(torch.compiler.is_compiling()) or tracing.tracing_here() or TRACE_LOCK.owned()

    @staticmethod
    def report_lost_config(context: Context) -> None:
        """Report a recompute on another thread whose torch configuration is not that of its forward."""
        here = {var: value for var, value in _config_of(None).items()}
        there = _config_of(context)
        lost = sorted(var.name for var in there.keys() | here.keys() if there.get(var) != here.get(var))
        if lost:
            findings.report(
                Finding(
                    code="config-lost",
                    subject=", ".join(lost),
                    title="a checkpointed block is recomputed on a thread that has not its forward's configuration",
                    now=this_thread("recomputes a checkpointed block"),
                    shared=f"torch's configuration, kept for each thread since torch 2.12: {', '.join(lost)}",
                    consequence="limits and switches set in the training thread do not hold in the backward: recompiles, "
                    "silent eager runs, or a recompute that differs",
                    fix="keep compile_guard.install(), or compile_guard.checkpoint()",
                    prevented=True,
                )
            )


class _Active(threading.local):
    """Recording or replaying modes of this thread, outermost first."""

    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.lifted = False


_active = _Active()


def _checkpoint(patches: Patches) -> None:
    import torch.utils.checkpoint

    original: list[Any] = []
    function = torch.utils.checkpoint.checkpoint.__wrapped__  # type: ignore[attr-defined]
    safe = thread_safe_checkpoint(lambda *a, **k: original[0](*a, **k), RandomOps())
    original.append(patches.swap_code(function, safe))
    for code in (safe.__code__, Block.__call__.__code__, Block._recompute.__code__, Block._run.__code__):
        skip_code(code)


def guards_fail_under_modes() -> bool:
    """Whether a dispatch mode makes every guard of a compiled function fail (2.9, 2.10), whatever the mode says of itself."""
    from torch._C._dynamo import guards

    return not hasattr(guards, "set_is_in_mode_without_ignore_compile_internals")


def _modes_lifted(patches: Patches) -> None:
    """Take our dispatch modes off around compiled calls, so that those stay compiled inside checkpointed blocks."""
    import torch
    from torch._dynamo import eval_frame
    from torch.utils import _python_dispatch

    set_eval_frame = eval_frame._maybe_set_eval_frame

    def maybe_set_eval_frame(callback: Any) -> Any:
        modes = _active.modes
        if modes:
            compiled = callback is not None
            if compiled and not _active.lifted and _python_dispatch._get_current_dispatch_mode() is modes[-1]:
                _python_dispatch._pop_mode()
                _active.lifted = True
                _active.state = torch.random.get_rng_state()
            elif not compiled and _active.lifted and not is_converting():
                # (What Dynamo disables while it compiles works on fake tensors, which are none of the block's.)
                _python_dispatch._push_mode(modes[-1])
                _active.lifted = False
                if not torch.equal(_active.state, torch.random.get_rng_state()):
                    _report_unreplayed()
        return set_eval_frame(callback)

    patches.set_attribute(eval_frame, "_maybe_set_eval_frame", maybe_set_eval_frame)


def _report_unreplayed() -> None:
    findings.report(
        Finding(
            code="checkpoint-rng",
            subject="compiled function in a checkpointed block",
            title="a compiled function inside a checkpointed block drew random numbers, or another thread did meanwhile",
            now=this_thread("leaves the compiled function"),
            shared="the process-wide CPU generator, from which this torch's compiled code draws its seeds",
            consequence="its recompute draws other numbers than its forward: gradients of another forward",
            fix="move the dropout out of the compiled function, or use torch 2.11 or newer, where the draws are replayed",
            prevented=False,
        )
    )


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


def _config_of(context: Context | None) -> dict[ContextVar[Any], Any]:
    """torch's configuration as overridden in a context (None: the calling thread's)."""
    variables = _config_variables()
    return {var: value for var, value in (context or copy_context()).items() if var in variables}


def config_is_per_thread() -> bool:
    """Whether a new thread starts with the default configuration (2.12 and later, pytorch#173568)."""
    return bool(_config_variables())


def capture_config() -> Callable[[], None]:
    """torch's configuration of the calling thread; calling the result gives it to the thread that calls."""
    captured = _config_of(None)

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


SEAMS: tuple[Seam, ...] = (
    Seam(
        "trace_lock",
        "one owner-aware lock in place of torch's compile lock; autograd stays on the holder's thread",
        _trace_lock,
    ),
    Seam("compiling_flags", "`is_compiling` and `is_exporting` speak of the calling thread", _compiling_flags),
    Seam("fx_flag", "FX's tracing flag speaks of the calling thread", _fx_flag, fx_flag_is_global),
    Seam("fx_tracer", "one `fx.Tracer.trace` at a time, under the trace lock", _fx_tracer),
    Seam("module_patches", "FX's patches of nn.Module act for the tracing thread alone", _module_patches),
    Seam("make_fx", "make_fx under the trace lock", _make_fx),
    Seam("export", "torch.export under the trace lock", _export),
    Seam("lazy_backward", "a lazy backward compile holds the trace lock from its first step", _lazy_backward),
    Seam("single_flight", "one compile where several threads miss the same cache", _single_flight),
    Seam("compiled_entry", "compiled calls are counted, and may be asked to begin again", _compiled_entry),
    Seam("inlined_modules", "modules from `compile_guard.compile` are inlined into outer compiled code", _inlined_modules),
    Seam("dynamic_config", "`dynamic=` is in force for its own compile alone", _dynamic_config, config_is_global),
    Seam("reset_gate", "reset waits until no compiled call runs", _reset_gate),
    Seam("checkpoint", "a recompute draws what its forward drew, in its forward's configuration", _checkpoint),
    Seam(
        "modes_lifted",
        "compiled functions inside checkpointed blocks stay compiled",
        _modes_lifted,
        guards_fail_under_modes,
    ),
    Seam("config_inherit", "a thread starts with the configuration of its starter", _config_inherit, config_is_per_thread),
)


def iterate_needed() -> Iterator[Seam]:
    """The seams that the installed torch needs."""
    return (seam for seam in SEAMS if seam.needed())
