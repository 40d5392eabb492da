"""The threads of a run and how they meet: none polls, each waits on a condition, and stopping the crew wakes them all."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from compile_guard import Worker

T = TypeVar("T")
JOIN_S = 30.0
"""How long threads have to end once the crew is stopped."""


class Stopped(Exception):
    """The crew is stopped: raised in whatever thread waits, which ends."""


class Clock:
    """Where a thread's time goes: seconds by kind (`compute`, `wait`, `copy`, `sync`), and the latest spans for a timeline."""

    MAX_SPANS = 50_000

    def __init__(self, name: str) -> None:
        self.name = name
        self.ident = 0
        self.now = ""
        """Kind of the block that the thread is in; empty between blocks."""
        # All kinds from the start: others read while this thread counts.
        self.seconds = dict.fromkeys(("compute", "wait", "copy", "sync"), 0.0)
        self.spans: list[tuple[str, float, float]] = []

    @contextmanager
    def __call__(self, kind: str) -> Iterator[None]:
        """Count the block as this kind of time."""
        began = time.perf_counter()
        self.now = kind
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.now = ""
            self.seconds[kind] += ended - began
            if len(self.spans) < self.MAX_SPANS:
                self.spans.append((kind, began, ended))

    def share(self, kind: str) -> float:
        """Part of the counted time that is of a kind."""
        return self.seconds[kind] / max(1e-9, sum(self.seconds.values()))


class Crew:
    """The threads of a run. The first that fails stops the others, and its exception reaches the caller of `join`."""

    def __init__(self) -> None:
        self.cause: BaseException | None = None
        self.failed: str | None = None
        """Name of the thread that failed first."""
        self.clocks: list[Clock] = []
        self._workers: list[Worker] = []
        self._on_stop: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._stopped = False
        self._num_running = 0
        self._all_ended = threading.Event()

    def add(self, name: str, device: torch.device, run: Callable[[Clock], None]) -> None:
        """Add a thread that runs `run`; its clock is passed in."""
        clock = Clock(name)
        self.clocks.append(clock)
        self._workers.append(Worker(self._run, device=device, args=(name, clock, run), name=name, daemon=True))

    def _run(self, name: str, clock: Clock, run: Callable[[Clock], None]) -> None:
        clock.ident = threading.get_native_id()
        try:
            run(clock)
        except Stopped:
            self.stop()
        except BaseException as error:  # handed on to `join`
            self.stop(name, error)
        finally:
            with self._lock:
                self._num_running -= 1
                ended = self._num_running == 0
            if ended:
                self._all_ended.set()

    def on_stop(self, wake: Callable[[], None]) -> None:
        """Have `wake` called when the crew is stopped; it must end what threads wait for."""
        self._on_stop.append(wake)

    def start(self) -> None:
        """Start all threads."""
        self._num_running = len(self._workers)
        for worker in self._workers:
            worker.start()

    def stop(self, name: str | None = None, cause: BaseException | None = None) -> None:
        """Wake and end all threads; the first cause given is the cause."""
        with self._lock:
            if self.cause is None and cause is not None:
                self.cause, self.failed = cause, name
            if self._stopped:
                return
            self._stopped = True
        for wake in self._on_stop:
            wake()

    @property
    def stopped(self) -> bool:
        """Whether the threads were told to end."""
        return self._stopped

    def wait(self, seconds: float) -> bool:
        """Wait until all threads have ended, at most so long; whether they have."""
        return self._all_ended.wait(seconds)

    def join(self) -> list[str]:
        """Wait for the threads of a stopped crew; the names of those that did not end in time, whose stacks are printed."""
        deadline = time.monotonic() + JOIN_S
        for worker in self._workers:
            if worker.ident is not None:
                worker.join(max(0.0, deadline - time.monotonic()))
        stuck = [worker.name for worker in self._workers if worker.is_alive()]
        if stuck:
            print(f"dflash-train: {', '.join(stuck)} did not end within {JOIN_S:.0f} s; all stacks:", file=sys.stderr)
            dump_stacks()
        return stuck


def dump_stacks() -> None:
    """Print the stacks of all threads."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


class Channel(Generic[T]):
    """A bounded queue of numbered items that come out in order 0, 1, 2 …, whatever order they are put in.

    It holds at most `depth` items, the next one among them: whoever brings that is never kept waiting.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._items: dict[int, T] = {}
        self._next = 0
        self._end: int | None = None
        self._closed = False
        self._changed = threading.Condition()

    def put(self, number: int, item: T) -> None:
        """Add an item, waiting for room.

        Raises:
            Stopped: the channel is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number < self._next + self._depth)
            if self._closed:
                raise Stopped
            self._items[number] = item
            self._changed.notify_all()

    def get(self) -> tuple[int, T] | None:
        """The next item with its number, waiting for it; None after the last one.

        Raises:
            Stopped: the channel is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next in self._items or self._next == self._end)
            if self._closed:
                raise Stopped
            number = self._next
            if number == self._end:
                return None
            self._next += 1
            self._changed.notify_all()
            return number, self._items.pop(number)

    def finish(self, end: int) -> None:
        """There will be no item from number `end` on."""
        with self._changed:
            self._end = end
            self._changed.notify_all()

    def close(self) -> None:
        """Wake all who wait, and drop what is held."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


class Meeting:
    """Threads that wait for each other; the last to arrive runs `action` while the others wait.

    Unlike `threading.Barrier`, a meeting takes place for all or for none: closing it does not part those who have met. It
    closes itself when its action fails, whose exception goes to the thread that ran it.
    """

    def __init__(self, parties: int, action: Callable[[], None]) -> None:
        self._parties = parties
        self._action = action
        self._arrived = 0
        self._number = 0
        self._acting = False
        self._closed = False
        self._changed = threading.Condition()

    def wait(self) -> None:
        """Meet the others.

        Raises:
            Stopped: closed before all had arrived, or the action failed in another thread.
        """
        with self._changed:
            if self._closed:
                raise Stopped
            number = self._number
            self._arrived += 1
            if self._arrived < self._parties:
                self._changed.wait_for(lambda: self._number != number or (self._closed and not self._acting))
                if self._number == number:
                    raise Stopped
                return
            self._acting = True
        met = False
        try:
            self._action()  # without the lock: `close` must not wait for it
            met = True
        finally:
            with self._changed:
                self._acting, self._arrived = False, 0
                if met:
                    self._number += 1
                else:
                    self._closed = True
                self._changed.notify_all()

    def close(self) -> None:
        """End the waits of a meeting that has not begun; there will be none after."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
