"""Runs threads one at a time and decides at each yield point which goes on, so that a schedule can be repeated exactly.

The running thread itself chooses the next, and hands over: no thread is there only to decide. A thread that has to wait
(for a lock, for a gate) says so with a question that the scheduler has it ask again once another thread has gone on.
"""

from __future__ import annotations

import _thread
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_guard.stress.strategies import Strategy

PATIENCE_S = 60.0
"""A schedule that has not ended after so long hangs: some thread waits for what the scheduler does not know of."""

IDLE_ROUNDS = 20
"""How often every waiting thread asks in vain, while none can go on, before they wait for ever: some look twice."""


@dataclass(slots=True)
class Outcome:
    """One run of a program under one schedule."""

    results: list[Any]
    errors: dict[int, BaseException] = field(default_factory=dict)
    """What ended a thread, by its number."""
    steps: list[tuple[int, str]] = field(default_factory=list)
    """Thread and yield point, in the order in which they were passed."""
    choices: list[int] = field(default_factory=list)
    """The thread chosen, wherever there was a choice: what a replay needs."""
    num_preemptions: int = 0
    """Choices of another thread, where the running one could go on."""
    hang: str = ""
    """Why it never ends, with all stacks; empty where it ended."""


class Scheduler:
    """One schedule of one program. Used once."""

    def __init__(self, strategy: Strategy, num_threads: int, *, patience_s: float = PATIENCE_S) -> None:
        self._strategy = strategy
        self._patience_s = patience_s
        self._outcome = Outcome([None] * num_threads)
        # Raw locks: a `threading.Event` is Python code, which Dynamo would look at inside a compiled call.
        self._batons = [_thread.allocate_lock() for _ in range(num_threads)]
        self._ended = _thread.allocate_lock()
        for lock in (*self._batons, self._ended):
            lock.acquire()
        self._number: dict[int, int] = {}
        self._alive = set(range(num_threads))
        self._asked_at: dict[int, int] = {}
        """Waiting threads, by the step at which they asked last."""
        self._bounded: set[int] = set()
        self._timed_out: set[int] = set()
        self._asking: set[int] = set()
        self._num_idle = 0

    def takes_part(self) -> bool:
        """Whether the calling thread is one that is scheduled, at a place where it may be made to wait."""
        number = self._number.get(threading.get_ident())
        return number is not None and number not in self._asking

    def run(self, bodies: Sequence[Callable[[], Any]]) -> Outcome:
        """Run each function in a thread of its own.

        Args:
            bodies: as many as there are threads.
        """
        for number, body in enumerate(bodies):
            registered = _thread.allocate_lock()
            registered.acquire()
            threading.Thread(
                target=self._body, args=(number, body, registered), name=f"stress-{number}", daemon=True
            ).start()
            if not registered.acquire(timeout=self._patience_s):
                raise TimeoutError(f"thread {number} did not start within {self._patience_s:g} s")
        first = self._next(None)
        assert first is not None
        self._batons[first].release()
        if not self._ended.acquire(timeout=self._patience_s):
            self._hang(f"not ended after {self._patience_s:g} s")
        return self._outcome

    def _body(self, number: int, body: Callable[[], Any], registered: Any) -> None:
        self._number[threading.get_ident()] = number
        registered.release()
        self._batons[number].acquire()
        try:
            self._outcome.results[number] = body()
        except BaseException as error:  # judged by the invariants
            self._outcome.errors[number] = error
        finally:
            del self._number[threading.get_ident()]
            self._alive.discard(number)
            self._step(number, "end")
            self._hand_over(number, self._next(None))

    def point(self, name: str) -> None:
        """The calling thread, if it takes part, is at a yield point."""
        number = self._number.get(threading.get_ident())
        if number is None or number in self._asking:
            return
        self._step(number, name)
        self._hand_over(number, self._next(number))

    def wait(self, over: Callable[[], bool], what: str, *, bounded: bool = False) -> bool:
        """Let other threads run until `over()`, which must not block, is true; False where a bounded wait is given up.

        A bounded wait is given up only when no thread at all can go on: time does not pass in a schedule.
        """
        number = self._number[threading.get_ident()]
        while not self._ask(number, over):
            if bounded:
                self._bounded.add(number)
            self.pause()
            self._bounded.discard(number)
            if number in self._timed_out:
                self._timed_out.discard(number)
                self._step(number, f"{what} given up")
                return False
        self._step(number, what)
        return True

    def _ask(self, number: int, over: Callable[[], bool]) -> bool:
        self._asking.add(number)
        try:
            return over()
        finally:
            self._asking.discard(number)

    def pause(self) -> None:
        """The calling thread can not go on before another thread has."""
        number = self._number[threading.get_ident()]
        self._asked_at[number] = len(self._outcome.steps)
        self._hand_over(number, self._next(None))
        self._asked_at.pop(number, None)

    def _step(self, number: int, name: str) -> None:
        self._outcome.steps.append((number, name))
        self._num_idle = 0

    def _next(self, current: int | None) -> int | None:
        """The thread to run; `current` is the one that calls and can go on. None: there is none left."""
        now = len(self._outcome.steps)
        runnable = [number for number in sorted(self._alive) if self._asked_at.get(number, -1) < now]
        if not runnable:
            return self._next_of_the_waiting()
        if len(runnable) == 1:
            return runnable[0]
        chosen = self._strategy.choose(now, current, runnable)
        self._outcome.choices.append(chosen)
        self._outcome.num_preemptions += current is not None and chosen != current
        return chosen

    def _next_of_the_waiting(self) -> int | None:
        """Each has asked since the last step. A few of them wait for nothing but their own looking often enough."""
        if not self._alive:
            return None
        waiting = sorted(self._alive)
        self._num_idle += 1
        if self._num_idle <= IDLE_ROUNDS * len(waiting):
            return waiting[self._num_idle % len(waiting)]
        for number in waiting:
            if number in self._bounded:
                self._timed_out.add(number)
                self._num_idle = 0
                return number
        self._hang("each of the threads waits for another")
        self._ended.release()
        return -1

    def _hand_over(self, number: int, chosen: int | None) -> None:
        if chosen is None:
            self._ended.release()
        elif chosen != number:
            if chosen >= 0:
                self._batons[chosen].release()
            if number in self._alive:
                # Unbounded: where the schedule hangs, `run` says so, and its threads stay where they are until the process
                # ends. An exception here would have them all go on at once.
                self._batons[number].acquire()

    def _hang(self, why: str) -> None:
        frames = sys._current_frames()
        where = dict(self._outcome.steps)
        stacks = [
            f"thread {number}, last at {where.get(number, 'its start')!r}:\n{''.join(traceback.format_stack(frames[ident]))}"
            for ident, number in sorted(self._number.items(), key=lambda item: item[1])
            if ident in frames
        ]
        self._outcome.hang = "\n".join([why, *stacks])
