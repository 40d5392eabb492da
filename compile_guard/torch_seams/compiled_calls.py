"""The way into compiled calls, single-flight, and the caches of code objects."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import CodeType, FrameType
from typing import Any

from compile_guard.entry import RETRYING_CODES, gated_entry
from compile_guard.patching import Patches
from compile_guard.single_flight import DynamoFrame, SingleFlight
from compile_guard.torch_seams._seam import Seam, is_compiled_call, notify_compile, skip_code
from compile_guard.torch_seams.configuration import config_is_global, settings_of_backward
from compile_guard.torch_seams.devices import explain_devices
from compile_guard.torch_seams.eager_calls import (
    Frames,
    as_part_of_dynamo,
    calls_flex,
    entry_of_call,
    limit_reason,
    recompile_limits,
)
from compile_guard.torch_seams.global_state import note_state, passing_entry_in_step


class _Dynamic(threading.local):
    """What `torch.compile(dynamic=...)` asks for in the compiled calls that this thread is in, outermost first."""

    def __init__(self) -> None:
        self.changes: list[Callable[[], Callable[[], None]]] = []


_dynamic = _Dynamic()


class _CompileSeam:
    """What single-flight asks of torch."""

    def __init__(self) -> None:
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
        from torch._dynamo import convert_frame
        from torch._dynamo.types import FrameAction

        self._entries = _debug_get_cache_entry_list
        self._run_only = FrameAction.RUN_ONLY
        self._callback = convert_frame.CatchErrorsWrapper.__call__.__code__
        self._frames = Frames()

    def passing_entry(self, frame: DynamoFrame) -> CodeType | None:
        for entry in self._entries(frame.f_code):
            if entry.guard_manager.check(frame.f_locals):
                code: CodeType = entry.code
                return code
        return None

    def passing_entry_in_step(self, frame: DynamoFrame) -> tuple[CodeType, str] | None:
        return passing_entry_in_step(frame, self.passing_entry)

    def note_state(self, frame: DynamoFrame) -> None:
        note_state(frame, self.passing_entry)

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
        return limit_reason(code)

    def calls_flex(self, frame: DynamoFrame) -> bool:
        return calls_flex(frame.f_code, frame.f_globals, frame.f_locals)

    def settings(self, code: CodeType) -> AbstractContextManager[Any]:
        from torch._dynamo import config

        limit = recompile_limits.get(code)
        settings = ExitStack()
        settings_of_backward(settings)
        for change in _dynamic.changes:
            settings.callback(change())
        if limit is not None:
            settings.enter_context(config.patch(recompile_limit=limit))
        return settings

    def explain(self, frame: DynamoFrame, error: RuntimeError) -> None:
        explain_devices(frame.f_code.co_name, frame.f_locals, error)

    def is_in_callback(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code is self._callback:
                return True
            frame = frame.f_back
        return False

    def entry_of_first_frame(self, frame: FrameType | None) -> FrameType | None:
        return entry_of_call(self._frames.call_of_first_frame(frame))


def _single_flight(patches: Patches) -> None:
    from torch._dynamo import convert_frame

    flight = SingleFlight(_CompileSeam(), notify_compile)
    for cls in (convert_frame.ConvertFrame, convert_frame.ConvertFrameAssert):
        convert = flight.wrap(cls.__call__)
        as_part_of_dynamo(convert)
        patches.set_attribute(cls, "__call__", convert)


def _compiled_entry(patches: Patches) -> None:
    """Put the gated entry around what `torch.compile` makes from now on."""
    from torch._dynamo import eval_frame

    optimize = eval_frame.OptimizeContext
    make = optimize.__call__
    for code in RETRYING_CODES:
        skip_code(code)

    def make_gated(self: Any, fn: Any) -> Any:
        made = make(self, fn)
        code = getattr(made, "__code__", None)
        return with_entry(made) if code is not None and is_compiled_call(code) else made

    patches.set_attribute(optimize, "__call__", make_gated)


def with_entry(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The gated entry of torch's compiled-call wrapper, which torch takes for that wrapper."""
    entry = gated_entry(compiled)
    if hasattr(compiled, "_torchdynamo_wrapper_id"):
        entry._torchdynamo_wrapper_id = id(entry)  # type: ignore[attr-defined]
    return entry


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


SEAMS = (
    Seam("single_flight", "one compile where several threads miss the same cache", _single_flight),
    Seam("compiled_entry", "compiled calls stop at the gate, and may be asked to begin again", _compiled_entry),
    Seam("dynamic_config", "`dynamic=` is in force for its own compile alone", _dynamic_config, config_is_global),
)
