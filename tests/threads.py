"""Threads for tests: every wait is bounded, a hang shows all stacks, and no exception is lost."""

from __future__ import annotations

import faulthandler
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0
"""How long a test waits for what must come. Only a test that fails waits so long."""


def _hung(what: str) -> TimeoutError:
    faulthandler.dump_traceback(file=sys.__stderr__, all_threads=True)
    return TimeoutError(f"{what}; the stacks of all threads are on stderr")


def run_in_threads(*bodies: Callable[[], Any], timeout: float = PATIENCE_S) -> list[Any]:
    """Run each function in a thread of its own, and return what each returned.

    Raises:
        TimeoutError: a thread is still running after `timeout` seconds (it is a daemon, and is left behind).
        BaseException: the exception that ended a thread first.
    """
    results: list[Any] = [None] * len(bodies)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = bodies[number]()
        except BaseException as error:  # handed to the caller below
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(number,), name=f"body-{number}", daemon=True) for number in range(len(bodies))
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive() and not errors:
            raise _hung(f"{thread.name} is still running after {timeout:g} s")
    if errors:
        raise errors[0]
    return results


def until(condition: Callable[[], Any], what: str = "the condition", timeout: float = PATIENCE_S) -> Any:
    """Wait until `condition()` is true, for states that nobody announces; returns what it returned."""
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise _hung(f"{what} did not come within {timeout:g} s")
        pause.wait(0.001)
    return value


def wait(event: threading.Event, timeout: float = PATIENCE_S) -> None:
    """Wait until `event` is set; raises where it is not."""
    if not event.wait(timeout):
        raise _hung(f"an event was not set within {timeout:g} s")


class Task:
    """Something that a `Puppet` does."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._ended = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # raised again in result()
            self._error = error
        self._ended.set()

    @property
    def done(self) -> bool:
        return self._ended.is_set()

    def result(self, timeout: float = PATIENCE_S) -> Any:
        """What the function returned; raises what it raised."""
        wait(self._ended, timeout)
        if self._error is not None:
            raise self._error
        return self._result


class Puppet:
    """A thread that does one thing after the other as it is told, so that a test decides the order."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self.ident: int = self._thread.ident

    def _loop(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Task:
        """Have it call `function`, without waiting for the end."""
        task = Task(lambda: function(*args, **kwargs))
        self._tasks.put(task)
        return task

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have it call `function`; returns, or raises, what that did."""
        return self.start(function, *args, **kwargs).result()

    def end(self) -> None:
        self._tasks.put(None)
        self._thread.join(PATIENCE_S)
