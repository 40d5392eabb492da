"""`torch.compiler.set_stance`: a `with` block's stance belongs to its thread, a plain call's to the process."""

from __future__ import annotations

import sys
import threading
from contextvars import ContextVar
from types import FrameType
from typing import Any

from compile_guard import fork
from compile_guard.eager_calls import EAGER, Fallback
from compile_guard.findings import Finding, findings, other_thread, this_thread, thread_name
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, is_compiled_call, skip_code
from compile_guard.torch_seams.eager_calls import entry_of_call

# A context variable, not a thread-local: a checkpoint's recompute on another thread runs in the forward's context.
_own: ContextVar[tuple[Any, ...]] = ContextVar("compile_guard_stances", default=())
"""Stances of the `with` blocks that this thread is in, outermost first."""


class _Quiet(threading.local):
    on = False


_quiet = _Quiet()
"""Whether this thread makes a `set_stance` for a `with` block: it must not come into force for others on the way."""


def _begins_a_block(frame: FrameType) -> bool:
    """Whether what this frame calls is entered by a `with` statement at once."""
    import dis

    if frame.f_code.co_filename == torch_compiler_file() and frame.f_back is not None:
        frame = frame.f_back  # `torch.compiler.set_stance` is a function that makes the object
    # The clone of a decorator's object is what the decorated function enters.
    if frame.f_code.co_name == "clone" and frame.f_code.co_filename == sys.modules["torch._dynamo.decorators"].__file__:
        return True
    following = [each.opname for each in dis.get_instructions(frame.f_code) if each.offset > frame.f_lasti]
    following = [name for name in following[:6] if name != "CACHE"]
    return any(name in ("SETUP_WITH", "BEFORE_WITH") for name in following[:1]) or "LOAD_SPECIAL" in following[:3]


def torch_compiler_file() -> str | None:
    """Where `torch.compiler.set_stance` is."""
    return sys.modules["torch.compiler"].__file__


class _Stances:
    """Stands for torch's `_stance` while there is more to tell than one stance for all."""

    def __init__(self, base: Any, default: type[Any]) -> None:
        self.base = base
        """Set for the process."""
        self._default = default()
        self._open: list[int] = []
        """Threads inside a `with` block, one for each block."""
        self._setter: int | None = None
        self.lock = threading.Lock()

    def publish(self) -> None:
        """Put the process's own stance where compiled calls look, or this object."""
        from torch._dynamo import eval_frame

        plain = not self._open and self.base == self._default
        eval_frame._stance = self.base if plain else self

    def set_process(self, stance: Any) -> Any:
        """Set the process's stance; returns the one before."""
        with self.lock:
            prior, self.base = self.base, stance
            self._setter = threading.get_ident()
            self.publish()
        return prior

    def enter(self, block: Any) -> None:
        """A `with` block of the calling thread begins."""
        with self.lock:
            if self.base is block.stance:  # made some time before the block, by a call that set it for all
                self.base = block.prev
            self._open.append(threading.get_ident())
            _own.set((*_own.get(), block.stance))
            self.publish()

    def leave(self) -> None:
        """The innermost `with` block of the calling thread ends."""
        with self.lock:
            me = threading.get_ident()
            if me in self._open:
                self._open.remove(me)
            _own.set(_own.get()[:-1])
            self.publish()

    @property
    def stance(self) -> str:
        """Read by every compiled call."""
        own = _own.get()
        if own:
            mine: str = own[-1].stance
            return mine
        me = threading.get_ident()
        holder = next((ident for ident in reversed(self._open) if ident != me), None)
        if holder is not None:
            _report(holder)
        base: str = self.base.stance
        if base == "force_eager" and self._setter != me:
            _tell_of_an_eager_call(sys._getframe(1), self._setter)
        return base

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        """As torch's."""
        own = _own.get()
        return bool((own[-1] if own else self.base).skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        """As torch's."""
        own = _own.get()
        return (own[-1] if own else self.base).backend


def _report(holder: int) -> None:
    findings.report(
        Finding(
            code="stance",
            subject="torch.compiler.set_stance",
            title="a compiled function is called while another thread is inside `with set_stance(...)`",
            now=this_thread("calls a compiled function"),
            other=other_thread(holder, "is inside the block"),
            shared="the compiler's stance, of which torch has one for the process; a block puts back what it found",
            consequence="this call runs eager, or fails, as the other thread asked for its own; of blocks that overlap one "
            "stays in force for ever",
            fix="keep compile_guard.install(), under which a block's stance is its thread's own",
            prevented=True,
        )
    )


def _tell_of_an_eager_call(caller: FrameType | None, setter: int | None) -> None:
    while caller is not None and not is_compiled_call(caller.f_code):
        if caller.f_code.co_name != "_callback_from_stance":
            return
        caller = caller.f_back
    if caller is None or EAGER.seam is None:
        return
    code = EAGER.seam.code_called_by(caller)
    if code is None:
        return
    who = "another thread" if setter is None else f"thread {thread_name(setter)}"
    why = f"{who} has set the stance force_eager for the process"
    fix = "`with torch.compiler.set_stance(...)` instead of a plain call: under the guard it acts for its own thread"
    EAGER.runs_eager(EAGER.fell(code, Fallback(code.co_name, "this", why, fix)), entry_of_call(caller))


def _stance(patches: Patches) -> None:
    from torch._dynamo import decorators, eval_frame

    original = eval_frame._set_stance
    stances = _Stances(eval_frame._stance, eval_frame.DynamoStance)
    block = decorators.set_stance
    make = block.__init__

    def set_stance(stance: Any) -> Any:
        original(eval_frame._stance)  # changes nothing; it refuses inside a compiled region
        return stances.base if _quiet.on else stances.set_process(stance)

    set_stance._dynamo_forbidden = True  # type: ignore[attr-defined]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        _quiet.on = _begins_a_block(sys._getframe(1))
        try:
            make(self, *args, **kwargs)
        finally:
            _quiet.on = False

    def enter(self: Any) -> None:
        original(eval_frame._stance)
        stances.enter(self)

    def leave(self: Any, *exc: Any) -> None:
        original(eval_frame._stance)
        stances.leave()

    for function in (set_stance, init, enter, leave):
        skip_code(function.__code__)
    for module in (eval_frame, decorators):
        patches.set_attribute(module, "_set_stance", set_stance)
    patches.set_attribute(block, "__init__", init)
    patches.set_attribute(block, "__enter__", enter)
    patches.set_attribute(block, "__exit__", leave)

    def restore() -> None:
        eval_frame._stance = stances.base
        fork.in_child.remove(renew)

    def renew() -> None:
        stances.lock = threading.Lock()

    fork.in_child.append(renew)
    patches.on_undo("the stance", restore)
    stances.publish()


def stance_is_global() -> bool:
    """Whether the compiler's stance is one for the process."""
    from torch._dynamo import eval_frame

    return isinstance(getattr(eval_frame, "_stance", None), (eval_frame.DynamoStance, _Stances))


SEAMS = (Seam("stance", "a `with set_stance(...)` block acts for its own thread", _stance, stance_is_global),)
