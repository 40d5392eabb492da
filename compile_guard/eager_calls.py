"""Calls of compiled functions that ran eager: which, why, since when, in which threads and on which devices, at what cost.

Nothing of it is on the path of a warm call until a function has fallen back. torch decides that in its callback, once; later
calls say nothing. From then on each call is looked at: `begins` and `ended` stand around it, and torch's own hook on guards
tells whether one of the function's entries fitted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Literal, Protocol

from compile_guard.by_identity import ByIdentity
from compile_guard.findings import Finding, findings, this_thread

Which = Literal["unfitting", "all", "this"]
"""Which calls of the function run eager: those that no entry fits, all from now on, or one alone."""

_TIMED = 5
"""Compiled calls whose time is kept, to set that of an eager one against."""


class EagerSeam(Protocol):
    """What has to be known of torch; `torch_seams` answers."""

    def code_called_by(self, caller: FrameType) -> CodeType | None:
        """Code of the function behind torch's compiled-call wrapper, given the wrapper's frame; None for another frame."""

    def code_behind(self, compiled: Any) -> CodeType | None:
        """Code of the function behind what an entry calls."""

    def device_of(self, entry: FrameType | None) -> str | None:
        """The device that an entry's call computes on; None where no argument is a tensor or holds one."""

    def peak_bytes(self, device: str) -> int | None:
        """The most memory that was ever in use at once: of the device, or of the process for the CPU."""

    def watch_guards(self, called: Callable[[bool], bool] | None) -> None:
        """Have `called` told after each look into a cache whether an entry fitted; None ends it."""


@dataclass(slots=True, eq=False)
class Fallback:
    """Why a function runs eager, and what its eager calls have been so far."""

    name: str
    which: Which
    why: str
    fix: str
    calls_flex: bool = False
    only_with_tensors: bool = False
    """A call with no tensor has nothing to compute compiled."""
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    began_s: float = field(default_factory=time.monotonic)
    known_since: str | None = None
    """Where the time and thread are not known: what is said instead."""
    num_calls: int = 0
    places: dict[str, None] = field(default_factory=dict)
    compiled_s: deque[float] = field(default_factory=lambda: deque(maxlen=_TIMED))
    costliest_s: float = -1.0
    peak: tuple[int, int] = (0, 0)
    """Most memory that was ever in use, before and after the call that raised it most."""
    told: Finding | None = None

    def since(self) -> str:
        """Since when, in words."""
        if self.known_since is not None:
            return self.known_since
        return f"since {time.monotonic() - self.began_s:.1f} s, first in thread {self.thread}"


@dataclass(slots=True, eq=False)
class _Call:
    """One compiled call that is under way."""

    frame: FrameType | None
    """Of its entry; None for a wrapper that was made before `install()`, whose end is not seen."""
    fallen: Fallback | None
    eager: Fallback | None = None
    began_s: float = field(default_factory=time.perf_counter)
    device: str | None = None
    peak_before: int | None = None


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


class EagerCalls:
    """Watches for them. `on` is False, and every call as cheap as without it, while no function is known to fall back."""

    def __init__(self) -> None:
        self.on = False
        self.on_change: Callable[[], None] = lambda: None
        """Called when `on` changes."""
        self.seam: EagerSeam | None = None
        self._here = _Here()
        self.clear()

    def clear(self) -> None:
        """Forget every function that fell back: torch has dropped what it compiled, or the guard is taken out."""
        self._fallen: ByIdentity[Fallback] = ByIdentity()
        self._by_call: ByIdentity[Fallback] = ByIdentity()
        self._inner: list[Fallback] = []
        self._code_of: ByIdentity[CodeType] = ByIdentity()
        if self.on:
            self.on = False
            if self.seam is not None:
                self.seam.watch_guards(None)
            self.on_change()

    def _watch(self) -> None:
        if not self.on and self.seam is not None:
            self.on = True
            self.seam.watch_guards(self._looked_up)
            self.on_change()

    def fell(self, code: CodeType, fallback: Fallback, *, is_top: bool = True) -> Fallback:
        """A function runs eager from now on, or in this call. Reports nothing yet: see `runs_eager`.

        Args:
            code: the function's.
            fallback: why.
            is_top: whether it is the function that was compiled, not one that it calls.

        Returns:
            What is known of it: `fallback`, or the one that was told before.
        """
        table = self._by_call if fallback.which == "this" else self._fallen
        known = table.get(code)
        if known is not None and known.why == fallback.why:
            return known
        table[code] = fallback
        if not is_top:
            self._inner.append(fallback)
        self._watch()
        return fallback

    def knows(self, code: CodeType) -> bool:
        """Whether a function is known to fall back."""
        return self._fallen.get(code) is not None

    def begins(self, compiled: Any, frame: FrameType) -> None:
        """A compiled call begins, in the entry with this frame."""
        code = self._code_of.get(compiled)
        if code is None and self.seam is not None:
            code = self.seam.code_behind(compiled)
            if code is None:
                return
            self._code_of[compiled] = code
        fallen = self._fallen.get(code)
        if fallen is None:
            return
        call = _Call(frame, fallen)
        self._here.calls.append(call)
        if fallen.which == "all":
            self._mark(call, fallen)

    def may_compile(self, code: CodeType) -> None:
        """torch calls its callback for a function: that no entry fitted was not the last word."""
        calls = self._here.calls
        if calls and calls[-1].eager is not None and calls[-1].eager is self._fallen.get(code):
            calls[-1].eager = None

    def ended(self, frame: FrameType) -> None:
        """The call that began in the entry with this frame is over.

        Raises:
            FindingError: it ran eager, and the mode is `raise`.
        """
        calls = self._here.calls
        index = next((i for i in range(len(calls) - 1, -1, -1) if calls[i].frame is frame), None)
        if index is None:
            return
        call = calls[index]
        del calls[index:]
        spent_s = time.perf_counter() - call.began_s
        if call.eager is not None:
            self._report(call, call.eager, spent_s)
        elif call.fallen is not None:
            call.fallen.compiled_s.append(spent_s)

    def _looked_up(self, fitted: bool) -> bool:
        """torch has looked into the cache of a function that is called: where nothing fits and it may not compile, the call
        runs eager without another word."""
        if fitted or self.seam is None:
            return fitted
        caller: FrameType | None = sys._getframe(1)
        assert caller is not None
        code = self.seam.code_called_by(caller)
        fallback = None if code is None else self._fallen.get(code)
        if code is None and len(self._inner) == 1:  # a function that a compiled one calls: more than one cannot be told apart
            fallback = self._inner[0]
        if fallback is not None and fallback.which == "unfitting":
            while caller is not None and not self._is_entry(caller):
                caller = caller.f_back
            # No call is known to be under way where the wrapper was made before `install()`.
            if caller is not None or findings.mode != "raise":  # an exception must not go through torch's C++
                self.runs_eager(fallback, caller)
        return fitted

    is_entry_code: Callable[[CodeType], bool] = staticmethod(lambda code: False)
    """Tells the code of entries; set by `entry`, which imports this module."""

    def _is_entry(self, frame: FrameType) -> bool:
        return self.is_entry_code(frame.f_code)

    def runs_eager(self, fallback: Fallback, entry: FrameType | None) -> None:
        """The call under way runs eager. It is reported when it ends, with what it cost.

        Args:
            fallback: why.
            entry: the frame of the entry that the call came through; None: the end is not seen, and it is reported now.

        Raises:
            FindingError: `entry` is None, and the mode is `raise`.
        """
        if entry is None:
            self._report(_Call(None, fallback), fallback, None)
            return
        calls = self._here.calls
        if not calls or calls[-1].frame is not entry:
            calls.append(_Call(entry, None))
        if calls[-1].eager is None:
            self._mark(calls[-1], fallback)

    def _mark(self, call: _Call, fallback: Fallback) -> None:
        """From here on the call runs eager: what it costs counts from now."""
        assert self.seam is not None
        call.eager = fallback
        call.device = self.seam.device_of(call.frame)
        call.peak_before = self.seam.peak_bytes(call.device or "cpu")
        call.began_s = time.perf_counter()

    def _report(self, call: _Call, fallback: Fallback, spent_s: float | None) -> None:
        assert self.seam is not None
        if fallback.only_with_tensors and call.device is None:
            return
        fallback.num_calls += 1
        device = call.device or "cpu"
        place = f"{threading.current_thread().name} on {device}"
        news = place not in fallback.places
        fallback.places[place] = None
        if spent_s is not None and spent_s > 2 * fallback.costliest_s:
            fallback.costliest_s, news = spent_s, True
        peak = self.seam.peak_bytes(device) if call.peak_before is not None else None
        if peak is not None and call.peak_before is not None and peak - call.peak_before > fallback.peak[1] - fallback.peak[0]:
            fallback.peak, news = (call.peak_before, peak), True
        if news or fallback.told is None or findings.mode == "raise":
            fallback.told = self._finding(fallback, device)
        findings.report(fallback.told)

    def _cost(self, fallback: Fallback, device: str) -> str:
        if fallback.costliest_s < 0:
            return "the time and memory of the eager function"
        said = f"{fallback.costliest_s * 1e3:,.1f} ms of the thread's time for such a call"
        if fallback.compiled_s:
            said += f", {sorted(fallback.compiled_s)[len(fallback.compiled_s) // 2] * 1e3:,.1f} ms for one that runs compiled"
        before, after = fallback.peak
        if after > before:
            whose = "the process" if device == "cpu" else device
            said += f"; the peak memory of {whose} rose in one from {before / 2**20:,.0f} to {after / 2**20:,.0f} MiB"
        return said

    def _finding(self, fallback: Fallback, device: str) -> Finding:
        which = {"unfitting": "calls that no entry fits", "all": "every call", "this": "this call"}[fallback.which]
        flex = "flex_attention computes all its scores into memory; " if fallback.calls_flex else ""
        return Finding(
            code="eager-call",
            subject=fallback.name,
            title=f"`{fallback.name}` is compiled, but ran eager",
            now=this_thread(f"ran {fallback.name} eager on {device}"),
            shared=f"{fallback.why}; {which} of {fallback.name}, {fallback.since()}; so far in {', '.join(fallback.places)}",
            consequence=flex + self._cost(fallback, device),
            fix=fallback.fix,
            prevented=False,
            supersedes=True,
        )


EAGER = EagerCalls()
