"""Where torch lets a compiled function run eager: its callback, its hook on guards, its recompile limit."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

from compile_guard.by_identity import ByIdentity
from compile_guard.eager_calls import EAGER, Fallback
from compile_guard.entry import RETRYING_CODES
from compile_guard.findings import hide
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, is_compiled_call, skip_code

recompile_limits: ByIdentity[int] = ByIdentity()
"""Limits of single code objects (`compile(recompile_limit=)`); the others have torch's."""

_CALLS_FORWARD = ("__call__", "_wrapped_call_impl", "call_wrapped")
"""Methods of a module that call its `forward`; the last is `fx.GraphModule`'s `__call__`, which Dynamo skips by right."""

_MAX_DEPTH = 6
"""How many calls deep `calls_flex` looks."""


def recompile_limit() -> int:
    """torch's limit of compiled versions for each code object, in the calling thread."""
    from torch._dynamo import config

    limit: int = config.recompile_limit
    return limit


def entries(code: CodeType) -> int:
    """Number of compiled versions in the cache of a code object."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

    return len(_debug_get_cache_entry_list(code))


def limit_of(code: CodeType) -> int:
    """The limit of a code object."""
    own = recompile_limits.get(code)
    return recompile_limit() if own is None else own


def limit_reason(code: CodeType) -> str:
    """The limit of a code object and its number of entries, for people."""
    return f"{entries(code)} entries, recompile_limit {limit_of(code)}"


def calls_flex(code: CodeType, namespace: dict[str, Any], variables: dict[str, Any]) -> bool:
    """Whether a function calls flex_attention, itself or in what it calls, as far as its names tell.

    Args:
        code: the function's.
        namespace: its globals.
        variables: its locals; the modules among them are what it calls by attribute.
    """
    import torch

    seen: set[int] = set()
    pending: list[tuple[CodeType, dict[str, Any], int]] = [(code, namespace, 0)]
    for value in variables.values():
        if isinstance(value, torch.nn.Module):
            forwards = (getattr(type(each), "forward", None) for each in value.modules())
            pending += [(each.__code__, each.__globals__, 1) for each in forwards if isinstance(each, FunctionType)]
        elif isinstance(value, FunctionType):
            pending.append((value.__code__, value.__globals__, 1))
    while pending:
        each, names, depth = pending.pop()
        if id(each) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(each))
        if "flex_attention" in each.co_names:
            return True
        called = [names.get(name) for name in each.co_names]
        if any(getattr(value, "__name__", "") == "flex_attention" for value in called):
            return True
        pending += [(const, names, depth) for const in each.co_consts if isinstance(const, CodeType)]
        for value in called:
            inner = getattr(value, "_torchdynamo_orig_callable", value)
            if isinstance(inner, FunctionType) and not inner.__module__.startswith("torch."):
                pending.append((inner.__code__, inner.__globals__, depth + 1))
    return False


class Frames:
    """Which frames of a stack are Dynamo's callback, and which stand between a compiled call and its function."""

    def __init__(self) -> None:
        from torch._dynamo import convert_frame
        from torch.nn import Module

        self._dynamo_file = convert_frame.__file__
        self._call_impl = Module._call_impl.__code__
        self._module_call = Module._wrapped_call_impl.__code__

    def call_of_first_frame(self, frame: FrameType | None) -> FrameType | None:
        """The frame of torch's compiled-call wrapper where, seen from Dynamo's callback, the frame is the first of its call:
        nothing has happened in it yet."""
        while frame is not None and frame.f_code.co_filename == self._dynamo_file:
            frame = frame.f_back
        # `OptimizedModule` goes through the module's own call, which does nothing before `forward` but run pre-hooks.
        if frame is not None and frame.f_code is self._call_impl:
            if _has_pre_hooks(frame.f_locals.get("self")):
                return None
            frame = frame.f_back
            if frame is None or frame.f_code is not self._module_call:
                return None
            frame = frame.f_back
        return frame if frame is not None and is_compiled_call(frame.f_code) else None


def entry_of_call(call: FrameType | None) -> FrameType | None:
    """Our entry's frame around that of torch's compiled-call wrapper, if it was called through one."""
    outer = call.f_back if call is not None else None
    return outer if outer is not None and outer.f_code in RETRYING_CODES else None


def _has_pre_hooks(module: Any) -> bool:
    from torch.nn.modules import module as nn_module

    return bool(getattr(module, "_forward_pre_hooks", True) or nn_module._global_forward_pre_hooks)


def as_part_of_dynamo(function: Any) -> None:
    """Give a wrapper around Dynamo's callback the file name of what it wraps.

    Dynamo looks for the first frame outside that file to tell who called (`torch.compiler.disable(recursive=False)` works by
    that), and so do we.
    """
    from torch._dynamo import convert_frame

    function.__code__ = function.__code__.replace(co_filename=convert_frame.__file__)
    skip_code(function.__code__)
    hide(function.__code__)


class _EagerSeam:
    """What `EagerCalls` asks of torch."""

    def __init__(self) -> None:
        from torch._C._dynamo import eval_frame

        self._set_hook: Callable[[Any], Any] = eval_frame.set_guard_complete_hook

    def code_called_by(self, caller: FrameType) -> CodeType | None:
        frame: FrameType | None = caller
        frames = (caller, caller.f_back, caller.f_back.f_back if caller.f_back is not None else None)
        frame = next((each for each in frames if each is not None and is_compiled_call(each.f_code)), None)
        return None if frame is None else _code_of(frame.f_locals.get("fn"))

    def code_behind(self, compiled: Any) -> CodeType | None:
        return _code_of(compiled)

    def device_of(self, entry: FrameType | None) -> str | None:
        import torch

        if entry is None:
            return None
        pending: list[Any] = [*entry.f_locals.get("kwargs", {}).values(), *entry.f_locals.get("args", ())[::-1]]
        bound = entry.f_locals.get("compiled")
        if isinstance(bound, functools.partial):
            pending[:0] = bound.args
        else:
            pending.insert(0, getattr(getattr(bound, "_torchdynamo_orig_callable", None), "__self__", None))
        while pending:
            value = pending.pop()
            if isinstance(value, torch.Tensor):
                return str(value.device)
            if isinstance(value, torch.nn.Module):
                pending[:0] = list(value.parameters())[:1]
            elif isinstance(value, (list, tuple)):
                pending += value[::-1]
            elif isinstance(value, dict):
                pending += list(value.values())[::-1]
        return None

    def peak_bytes(self, device: str) -> int | None:
        import torch

        if device.startswith("cuda"):
            return torch.cuda.max_memory_allocated(device)
        if device != "cpu":
            return None
        try:
            import resource
        except ImportError:  # not on Windows
            return None
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def watch_guards(self, called: Callable[[bool], bool] | None) -> None:
        self._set_hook(called)


def _code_of(function: Any) -> CodeType | None:
    """Code of the function that a compiled callable runs."""
    import torch

    while True:
        if isinstance(function, functools.partial):
            function = function.func
            continue
        inner = getattr(function, "_compile_guard_inner", None) or getattr(function, "_torchdynamo_orig_callable", None)
        if inner is None:
            break
        function = inner
    if isinstance(function, MethodType) and isinstance(function.__self__, torch.nn.Module):
        forward = function.__self__.forward if function.__name__ in _CALLS_FORWARD else function
        function = getattr(forward, "__func__", forward)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


class _Trace(threading.local):
    """What ended the trace of the callback that this thread is in."""

    def __init__(self) -> None:
        self.error: BaseException | None = None


_trace = _Trace()


def _eager_calls(patches: Patches) -> None:
    from torch._dynamo import config, convert_frame, trace_rules
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode

    frames = Frames()
    seam = EAGER.seam = _EagerSeam()
    patches.on_undo("eager calls", EAGER.clear)
    call = convert_frame.CatchErrorsWrapper.__call__
    trace_frame = convert_frame.trace_frame

    def trace_noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return trace_frame(*args, **kwargs)
        except BaseException as error:
            _trace.error = error
            raise

    def callback(self: Any, frame: Any, *args: Any) -> Any:
        if EAGER.on:
            EAGER.may_compile(frame.f_code)
        _trace.error = None
        result = call(self, frame, *args)
        try:
            if getattr(result, "guarded_code", None) is None and not EAGER.knows(frame.f_code):
                _tell(result, frame, sys._getframe(1))
        finally:
            _trace.error = None
        return result

    def _tell(result: Any, frame: Any, caller: FrameType) -> None:
        code: CodeType = frame.f_code
        wrapper = frames.call_of_first_frame(caller)
        if wrapper is None or seam.code_called_by(wrapper) is not code:
            return  # what a compiled function calls is skipped often, and by right
        fallback = _why(result, frame)
        if fallback is None:
            return
        if fallback.which == "this" and getattr(result, "apply_to_code", False):
            result.apply_to_code = False  # as torch does since 2.14: what passes must not stay
        EAGER.runs_eager(EAGER.fell(code, fallback), entry_of_call(wrapper))

    def _why(result: Any, frame: Any) -> Fallback | None:
        code: CodeType = frame.f_code
        flex = calls_flex(code, frame.f_globals, frame.f_locals)
        error = _trace.error
        if error is not None:
            said = " ".join(str(error).split("\n\n")[0].split()).split(" Explanation:")[0]
            if "no content in function call" in said or "No ops traced" in str(error):
                return None  # nothing to compile
            suppressed = config.suppress_errors and "Unsupported" not in type(error).__name__
            why = f"the compile failed ({type(error).__name__}: {said})" + " and suppress_errors is on" * suppressed
            fix = "turn suppress_errors off to see the error" if suppressed else "fullgraph=True turns this into an error"
            return Fallback(code.co_name, "all", why, fix + "; TORCH_LOGS=graph_breaks tells where", flex)
        if config.disable:
            why, fix = "torch._dynamo.config.disable is set", "set it back before compiled functions are called"
            return Fallback(code.co_name, "this", why, fix, flex)
        if is_in_torch_dispatch_mode(include_infra_modes=False):
            why = "a TorchDispatchMode is active, under which Dynamo does not compile"
            fix = "call it outside the mode, or have the mode's ignore_compile_internals() return True where torch has it"
            return Fallback(code.co_name, "this", why, fix, flex)
        if trace_rules.check(code):
            return None  # a frame of torch's own on the way, such as a GraphModule's: what it calls is compiled by itself
        reason = getattr(result, "skip_reason", None) or ""
        if not reason and convert_frame.has_tensor_in_frame(frame):
            return None  # nothing says that it had anything to compute
        why = f"Dynamo skips it: {reason or 'no tensor among its arguments at its first call'}"
        fix = "make its first call one with tensors" if "tensor" in why else "fullgraph=True turns this into an error"
        return Fallback(code.co_name, "all", why, fix, flex, only_with_tensors=True)

    for wrapper in (trace_noted, callback):
        as_part_of_dynamo(wrapper)
    for own in (_tell, _why):
        skip_code(own.__code__)
    patches.set_attribute(convert_frame, "trace_frame", trace_noted)
    patches.set_attribute(convert_frame.CatchErrorsWrapper, "__call__", callback)
    for code in _full_before():
        why = f"its cache was full before compile_guard.install(): {limit_reason(code)}"
        fix = "compile_guard.install() first, and compile_guard.compile() for a cache of each wrapper and device"
        before = Fallback(code.co_name, "unfitting", why, fix, known_since="since before compile_guard.install()")
        EAGER.fell(code, before)


def _full_before() -> Iterator[CodeType]:
    """Code objects whose cache is full, of all that Dynamo has seen."""
    from torch._dynamo import convert_frame

    for reference in list(convert_frame.input_codes.seen):
        code = reference()
        if code is not None and entries(code) >= limit_of(code):
            yield code


SEAMS = (Seam("eager_calls", "a compiled function that runs eager is reported, each call of it", _eager_calls),)
