"""What the guard has to tell: one `Finding` per conflict, its text, and the mode that decides what becomes of it."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Literal

Mode = Literal["off", "record", "warn", "raise"]
MODES: tuple[Mode, ...] = ("off", "record", "warn", "raise")

_STACK_FRAMES = 12
_OWN_DIRECTORY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
_OWN_HAZARDS = os.path.join(_OWN_DIRECTORY, "hazards", "")
"""Its triggers are programs: what they do is what a finding shows."""
_STANDARD_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_THREADING_FILE = threading.__file__
_hidden: set[CodeType] = set()
"""Code of ours that bears the file name of what it wraps."""
_MAX_RECORDED = 1000
"""A finding that repeats only raises the count of the first, so that this is a bound on different findings."""


class GuardError(RuntimeError):
    """Base of the errors that the guard itself raises."""


class FindingError(GuardError):
    """A finding in mode `raise`. The finding is in `.finding`."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


class GuardWarning(UserWarning):
    """A finding in mode `warn`."""


@dataclass(frozen=True, slots=True)
class Actor:
    """One thread's side of a finding: who, doing what, where."""

    thread: str
    tid: int
    """Native thread id, as py-spy, perf and Perfetto show it; 0 when the thread has ended."""
    doing: str
    stack: tuple[str, ...] = ()
    """Innermost frame last, `file:line in function`."""
    for_s: float | None = None
    """Seconds since it began, when known."""

    def lines(self, role: str) -> Iterator[str]:
        """The actor as text, headed by its `role` (`now`, `while`)."""
        since = f" since {self.for_s:.1f} s" if self.for_s is not None else ""
        yield f"  {role:<6}thread {self.thread} (tid {self.tid}) {self.doing}{since}"
        for frame in self.stack:
            yield f"          {frame}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One conflict between threads, or one silent effect of compiling in threads."""

    code: str
    """Kind of finding, one per detector: `fx-flag`, `recompile-limit`, …"""
    subject: str
    """What it happened to: a function, a lock, a flag. `code:subject` is the name under which it is suppressed."""
    title: str
    now: Actor
    other: Actor | None = None
    shared: str
    """The state that both sides touch."""
    consequence: str
    """What it leads to, or would have led to without the guard."""
    fix: str
    prevented: bool
    """True when the guard took the effect away; False when it happened."""
    supersedes: bool = False
    """It says all that an earlier finding of its key said, and takes its place."""
    time_ns: int = field(default_factory=time.time_ns)
    count: int = 1

    @property
    def key(self) -> str:
        """The name under which the finding is counted and suppressed."""
        return f"{self.code}:{self.subject}"

    def __str__(self) -> str:
        outcome = "prevented" if self.prevented else "happened"
        times = f", {self.count} times" if self.count > 1 else ""
        lines = [f"compile_guard: {self.title} [{self.code}] ({outcome}{times})"]
        lines += self.now.lines("now")
        if self.other is not None:
            lines += self.other.lines("while")
        lines.append(f"  Shared: {self.shared}")
        lines.append(f"  {'Without the guard: ' if self.prevented else 'Leads to: '}{self.consequence}")
        lines.append(f"  Fix: {self.fix}")
        lines.append(
            f"  Off: COMPILE_GUARD=off    Suppress: add `{self.key}` to the file that COMPILE_GUARD_SUPPRESSIONS names"
        )
        return "\n".join(lines)


def hide(code: CodeType) -> None:
    """Leave frames of `code` out of the stacks of findings."""
    _hidden.add(code)


def stack_of(frame: FrameType | None) -> tuple[str, ...]:
    """A stack as a user reads it: the program's own frames, and below them the library frame that they ended in."""
    # Held for as short as can be: the frames of another thread keep alive what it has let go of.
    places = []
    while frame is not None:
        if frame.f_code not in _hidden:
            places.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    libraries = _library_folder()
    rows: list[str] = []
    innermost_library: str | None = None
    for code, line in places:
        if len(rows) == _STACK_FRAMES:
            break
        name = code.co_filename
        row = f"{name}:{line} in {code.co_name}"
        if name.startswith((libraries, _STANDARD_LIBRARY)) and not name.startswith((_THREADING_FILE, _OWN_DIRECTORY)):
            if not rows and innermost_library is None:
                innermost_library = row
        elif name.startswith(_OWN_HAZARDS) or not name.startswith((_OWN_DIRECTORY, _THREADING_FILE, "<frozen")):
            rows.append(row)
    if innermost_library is not None:
        rows.insert(0, innermost_library)
    return tuple(reversed(rows))


def _library_folder() -> str:
    """Where torch, and with it the libraries that it calls, are installed."""
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    return os.path.join(os.path.dirname(os.path.dirname(file)), "") if file else os.sep + "no torch"


def this_thread(doing: str) -> Actor:
    """The calling thread as an actor."""
    thread = threading.current_thread()
    return Actor(thread.name, threading.get_native_id(), doing, stack_of(sys._getframe(1)))


def other_thread(ident: int | None, doing: str, for_s: float | None = None) -> Actor | None:
    """Another thread, by its `threading.get_ident()`, as an actor with the stack it has at this moment."""
    if ident is None:
        return None
    # Autograd's device threads are known to Python only while they run Python code, and have no Thread object.
    native = next((thread.native_id or 0 for thread in threading.enumerate() if thread.ident == ident), 0)
    return Actor(thread_name(ident), native, doing, stack_of(sys._current_frames().get(ident)), for_s)


def thread_name(ident: int) -> str:
    """A thread's name by its `threading.get_ident()`; autograd's device threads and those that are over have none."""
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), f"ident {ident}")


def is_inside_torch(ident: int) -> bool:
    """Whether a thread, by its `threading.get_ident()`, runs code of torch at this moment, or waits in it for the system."""
    folder = os.path.join(os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or os.sep), "")
    frame = sys._current_frames().get(ident)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(folder):
            return True
        if not name.startswith((_STANDARD_LIBRARY, "<frozen")) or "site-packages" in name:
            return False
        frame = frame.f_back
    return False


class Findings:
    """The findings of this process, each kind and subject once, with a count.

    What a mode does: `record` keeps the finding; `warn` also gives a `GuardWarning` the first time one *happened*;
    `raise` raises `FindingError` where one happened. A prevented finding is only ever kept: the program is safe.
    """

    def __init__(self) -> None:
        self.mode: Mode = "warn"
        self._lock = threading.RLock()  # re-entrant: a finalizer that runs here may report as well
        self._found: dict[str, Finding] = {}
        self._suppressed: frozenset[str] = frozenset()
        self._listeners: tuple[Callable[[Finding], None], ...] = ()

    def report(self, finding: Finding) -> None:
        """Keep a finding and act on it as the mode says.

        Raises:
            FindingError: it happened, and the mode is `raise`.
        """
        if self.mode == "off" or finding.key in self._suppressed or finding.code in self._suppressed:
            return
        with self._lock:
            known = self._found.get(finding.key)
            if known is not None:
                # One that happened outranks one that was prevented: it must not hide behind the first sighting.
                later = not finding.prevented and (known.prevented or finding.supersedes)
                kept = finding if later else known
                self._found[finding.key] = replace(kept, count=known.count + 1)
            elif len(self._found) < _MAX_RECORDED:
                self._found[finding.key] = finding
        for listener in self._listeners:
            listener(finding)
        if finding.prevented:
            return
        if self.mode == "raise":
            raise FindingError(finding)
        if self.mode == "warn" and (known is None or known.prevented):
            warnings.warn(str(finding), GuardWarning, stacklevel=2)

    def __call__(self) -> list[Finding]:
        with self._lock:
            return list(self._found.values())

    def clear(self) -> None:
        """Forget every finding of this process."""
        with self._lock:
            self._found.clear()

    def after_fork_in_child(self) -> None:
        """Make the lock as new: a thread that the child does not have may have held it."""
        self._lock = threading.RLock()

    def listen(self, listener: Callable[[Finding], None]) -> Callable[[], None]:
        """Call `listener` for each report, on the reporting thread; returns what ends it."""
        self._listeners = (*self._listeners, listener)

        def end() -> None:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

        return end

    def suppress(self, keys: frozenset[str]) -> None:
        """Drop findings whose `code` or `code:subject` is among `keys`."""
        self._suppressed = keys

    @contextmanager
    def watch(self, mode: Mode) -> Iterator[list[Finding]]:
        """Findings made inside the block, by any thread, with the mode set to `mode` meanwhile."""
        checked = check_mode(mode, "watch()")
        collected: list[Finding] = []
        end = self.listen(collected.append)
        prior, self.mode = self.mode, checked
        try:
            yield collected
        finally:
            self.mode = prior
            end()


def check_mode(value: str, where: str) -> Mode:
    """`value` as a mode.

    Raises:
        ValueError: it is none; the message lists those there are.
    """
    if value not in MODES:
        raise ValueError(f"{where} must be one of {', '.join(MODES)}, got {value!r}")
    return next(mode for mode in MODES if mode == value)


def mode_from_environment(default: Mode) -> Mode:
    """The mode that `COMPILE_GUARD` names, else `default`: the environment beats code."""
    value = os.environ.get("COMPILE_GUARD")
    return check_mode(value, "COMPILE_GUARD") if value else default


def suppressions_from_environment() -> frozenset[str]:
    """The keys in the file that `COMPILE_GUARD_SUPPRESSIONS` names, one a line, `#` begins a comment.

    Raises:
        ValueError: the file cannot be read.
    """
    name = os.environ.get("COMPILE_GUARD_SUPPRESSIONS")
    if not name:
        return frozenset()
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"COMPILE_GUARD_SUPPRESSIONS names {name!r}, which cannot be read: {error}") from error
    return frozenset(entry for line in text.splitlines() if (entry := line.partition("#")[0].strip()))


findings = Findings()
