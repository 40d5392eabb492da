"""The event log: what the guard's locks, traces, compiles and findings did and when, one NDJSON file for each process.

Off until `open()`. Nothing of it is on the path of a warm call. An event is queued where it happens, which takes no lock and
may be done by a finalizer or a signal handler, and written by the first thread that comes by with no lock of ours in hand.

The format is `report/events.schema.json`; `report/event_log.py` reads it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import platform
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compile_guard.findings import Actor, Finding, findings

logger = logging.getLogger("compile_guard")

SCHEMA_VERSION = 1
VARIABLE = "COMPILE_GUARD_TRACE"
"""The environment variable that names the folder; child processes inherit it."""
MAX_BYTES = 50_000_000
"""Of one file: what comes after is counted, not written."""
REPEAT_S = 0.1
"""A finding that repeats is told once in so long a time, with how often it came."""
_MAX_PENDING = 10_000
"""Events that may wait for a thread with empty hands."""

# One clock for all threads, that never steps back, in the epoch's nanoseconds.
_EPOCH_NS = time.time_ns() - time.monotonic_ns()


def now_ns() -> int:
    """Nanoseconds since the epoch, on a clock that does not step back."""
    return time.monotonic_ns() + _EPOCH_NS


def from_monotonic(seconds: float) -> int:
    """A `time.monotonic()` on that clock."""
    return int(seconds * 1e9) + _EPOCH_NS


class EventLog:
    """Queue and file of this process."""

    def __init__(self) -> None:
        self.on = False
        """Read by every producer before it does anything."""
        self._folder = ""
        self._busy: Callable[[], bool] = bool
        self._end_listening: Callable[[], None] | None = None
        self._start_afresh()

    def _start_afresh(self) -> None:
        self._pending: deque[dict[str, Any]] = deque()
        self._writing = threading.Lock()  # only ever tried, never waited for
        self._file: int | None = None
        self._num_bytes = 0
        self._num_dropped = 0
        self._repeated: dict[tuple[str, bool], _Repeated] = {}

    def open(self, folder: str, busy: Callable[[], bool]) -> None:
        """Log into `folder`, which is made with the first event. Does nothing while a log is open.

        Args:
            busy: whether the calling thread holds a lock of ours, so that it must leave the writing to another one.
        """
        if self.on:
            return
        self._folder, self._busy = folder, busy
        self._end_listening = findings.listen(self._on_finding)
        self.on = True
        atexit.register(self.close)

    def close(self) -> None:
        """Write what is queued, and end the log."""
        if not self.on:
            return
        if self._end_listening is not None:
            self._end_listening()
        for repeated in self._repeated.values():
            if repeated.num_untold:
                self._pending.append(self._event("finding", {**repeated.about, "times": repeated.num_untold}))
        if self._num_dropped:
            self._pending.append(self._event("dropped", {"num_events": self._num_dropped}))
        self.flush(to_the_end=True)
        self.on = False
        atexit.unregister(self.close)
        if self._file is not None:
            os.close(self._file)
        self._start_afresh()

    def after_fork_in_child(self) -> None:
        """Leave the parent's file and queue; the child's first event makes a file of its own."""
        if self._file is not None:
            os.close(self._file)
        self._start_afresh()
        if self.on:
            self.emit("fork", parent_pid=os.getppid())

    def emit(self, kind: str, began_ns: int | None = None, **fields: Any) -> None:
        """Queue an event of the calling thread, and write the queue if this thread may.

        Args:
            kind: what happened.
            began_ns: of a span, when it began (`now_ns`); it ends now. None: the event has no length.
            fields: what else there is to say, as JSON can.
        """
        if not self.on:
            return
        if len(self._pending) >= _MAX_PENDING:
            self._num_dropped += 1
            return
        self._pending.append(self._event(kind, fields, began_ns))
        if not self._busy():
            self.flush()

    def _event(self, kind: str, fields: dict[str, Any], began_ns: int | None = None) -> dict[str, Any]:
        now = now_ns()
        event = {
            "v": SCHEMA_VERSION,
            "t_ns": now if began_ns is None else began_ns,
            "pid": os.getpid(),
            "tid": threading.get_native_id(),
            "thread": threading.current_thread().name,
            "kind": kind,
        }
        if began_ns is not None:
            event["dur_ns"] = max(0, now - began_ns)
        return {**event, **fields}

    def flush(self, *, to_the_end: bool = False) -> None:
        """Write what is queued, unless another thread is at it, or this one further out (in a signal handler)."""
        while self._pending and self._writing.acquire(blocking=False):
            try:
                self._write_pending(MAX_BYTES + 1000 if to_the_end else MAX_BYTES)
            except OSError as error:
                self.on = False
                self._pending.clear()
                logger.warning(
                    "the event log in %s cannot be written (%s); the program goes on without it", self._folder, error
                )
            finally:
                self._writing.release()

    def _write_pending(self, limit: int) -> None:
        if self._file is None:
            self._file = self._new_file()
            self._pending.appendleft(self._event("process", _about_this_process()))
        while self._pending:
            line = json.dumps(self._pending.popleft(), separators=(",", ":")).encode() + b"\n"
            if self._num_bytes + len(line) > limit:
                self._num_dropped += 1
                continue
            self._num_bytes += len(line)
            while line:
                line = line[os.write(self._file, line) :]

    def _new_file(self) -> int:
        os.makedirs(self._folder, exist_ok=True)
        name = f"rank{os.environ.get('RANK', '0')}-pid{os.getpid()}-{secrets.token_hex(4)}.ndjson"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
        return os.open(os.path.join(self._folder, name), flags, 0o644)

    def _on_finding(self, finding: Finding) -> None:
        about: dict[str, Any] = {"code": finding.code, "subject": finding.subject, "prevented": finding.prevented}
        # Once in full, then at most so often: one that every warm call makes must not fill the file.
        now = time.monotonic()
        repeated = self._repeated.get((finding.key, finding.prevented))
        if repeated is None:
            self._repeated[finding.key, finding.prevented] = _Repeated(about, now)
            about = about | {
                "title": finding.title,
                "now": _actor(finding.now),
                "other": _actor(finding.other) if finding.other is not None else None,
                "shared": finding.shared,
                "consequence": finding.consequence,
                "fix": finding.fix,
            }
            self.emit("finding", times=1, **about)
            return
        repeated.num_untold += 1
        if now - repeated.told_at >= REPEAT_S:
            repeated.told_at = now
            times, repeated.num_untold = repeated.num_untold, 0
            self.emit("finding", times=times, **about)


@dataclass(slots=True)
class _Repeated:
    """A finding that has been told in full."""

    about: dict[str, Any]
    told_at: float
    num_untold: int = 0


def _actor(actor: Actor) -> dict[str, Any]:
    return {"thread": actor.thread, "tid": actor.tid, "doing": actor.doing, "stack": actor.stack, "for_s": actor.for_s}


def _about_this_process() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    return {
        "parent_pid": os.getppid(),
        "rank": os.environ.get("RANK", "0"),
        "program": sys.argv[0] if sys.argv else "",
        "python": platform.python_version(),
        "torch": getattr(torch, "__version__", "not imported"),
        "platform": platform.platform(),
        "mode": findings.mode,
    }


LOG = EventLog()


class span:
    """Logs how long something took, as one event when it is over; fields may be added to `.fields` until then.

    As a context manager, or ended by hand with `end()`.
    """

    __slots__ = ("_began_ns", "_kind", "fields")

    def __init__(self, kind: str, **fields: Any) -> None:
        self.fields = fields
        self._kind = kind
        self._began_ns = now_ns() if LOG.on else 0

    def end(self) -> None:
        """It is over."""
        if self._began_ns:
            LOG.emit(self._kind, self._began_ns, **self.fields)

    def __enter__(self) -> span:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            self.fields["error"] = kind.__name__
        self.end()
