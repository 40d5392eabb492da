"""A `FakeTensorMode` that several threads share keeps what it remembers of being entered for each of them."""

from __future__ import annotations

import threading
from typing import Any

from compile_guard.by_identity import ByIdentity
from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code

_STACK, _IN_KERNEL = "enter_stack", "in_kernel_invocation"


class _Here(threading.local):
    """Of each mode that this thread has used, the values of the attributes that are its own."""

    def __init__(self) -> None:
        self.modes: ByIdentity[dict[str, Any]] = ByIdentity()


class _OfThread:
    """An attribute of a mode of which each thread has its own value.

    A thread begins with what stands in the mode itself, where it is written as the mode is made: so a mode stays usable when
    the attribute is put in or taken out.
    """

    def __init__(self, name: str, here: _Here, using: ByIdentity[set[int]]) -> None:
        self._name, self._here, self._using = name, here, using

    def __get__(self, mode: Any, owner: type) -> Any:
        if mode is None:
            return False  # what the class itself says of `in_kernel_invocation`
        values = self._here.modes.get(mode)
        if values is None:
            values = {_STACK: list(mode.__dict__[_STACK]), _IN_KERNEL: False}
            self._here.modes[mode] = values
        return values[self._name]

    def __set__(self, mode: Any, value: Any) -> None:
        if self._name not in mode.__dict__:  # the mode is being made
            mode.__dict__[self._name] = value
            return
        self.__get__(mode, type(mode))
        values = self._here.modes.get(mode)
        assert values is not None
        values[self._name] = value
        note_use(self._using, mode, bool(values[_STACK]) or values[_IN_KERNEL])


def note_use(using: ByIdentity[set[int]], mode: Any, inside: bool) -> None:
    """Remember that the calling thread is, or is no longer, inside a mode; tell of another that is inside as well."""
    threads = using.get(mode)
    if threads is None:
        threads = using[mode] = set()
    me = threading.get_ident()
    if not inside:
        threads.discard(me)
    elif me not in threads:
        threads.add(me)
        others = threads - {me}
        if others:
            _report_shared(min(others))


def _report_shared(other: int) -> None:
    findings.report(
        Finding(
            code="fake-mode",
            subject="FakeTensorMode",
            title="two threads are inside one FakeTensorMode at the same time",
            now=this_thread("enters the mode, or runs an operator on its tensors"),
            other=other_thread(other, "is inside the same mode"),
            shared="what the mode remembers: how often it was entered, which mode was there before, whether a kernel runs",
            consequence="a thread that has left the mode goes on making fake tensors, or `AssertionError`s and devices that "
            "read `meta` in the other",
            fix="keep compile_guard.install(), or give each thread a FakeTensorMode of its own",
            prevented=True,
        )
    )


def mode_remembers_for_all_threads() -> bool:
    """Whether entering a mode writes into the mode itself (up to 2.14), not into something of the thread."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return {_STACK, _IN_KERNEL} <= set(FakeTensorMode.__init__.__code__.co_names)


def _fake_mode(patches: Patches) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    here, using = _Here(), ByIdentity[set[int]]()
    stack = _OfThread(_STACK, here, using)
    enter, leave = FakeTensorMode.__enter__, FakeTensorMode.__exit__

    def enter_noted(self: Any) -> Any:
        entered = enter(self)
        note_use(using, self, True)
        return entered

    def leave_noted(self: Any, *exc: Any) -> Any:
        try:
            return leave(self, *exc)
        finally:
            note_use(using, self, bool(stack.__get__(self, FakeTensorMode)))

    for function in (enter_noted, leave_noted, _OfThread.__get__, _OfThread.__set__):
        skip_code(function.__code__)
    patches.set_attribute(FakeTensorMode, _STACK, stack)
    patches.set_attribute(FakeTensorMode, _IN_KERNEL, _OfThread(_IN_KERNEL, here, using))
    patches.set_attribute(FakeTensorMode, "__enter__", enter_noted)
    patches.set_attribute(FakeTensorMode, "__exit__", leave_noted)


SEAMS = (
    Seam(
        "fake_mode",
        "a FakeTensorMode remembers for each thread how it was entered",
        _fake_mode,
        mode_remembers_for_all_threads,
    ),
)
