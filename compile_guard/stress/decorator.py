"""`@stress`: a function run by several threads at once, under many schedules."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compile_guard.stress.program import Failure, Program

FOLDER = Path("stress_failures")
"""Where schedules that failed are saved."""


class StressError(AssertionError):
    """A schedule broke an invariant. Its text has the program, the schedule and the file that replays it."""

    def __init__(self, failure: Failure, path: Path) -> None:
        super().__init__(f"{failure}\nreplay: compile-guard stress --replay {path}")
        self.failure = failure
        self.path = path


def stress(
    *, threads: int = 4, iterations: int = 200, seed: int = 0, folder: Path | str = FOLDER
) -> Callable[[Callable[[], Any]], Callable[[], None]]:
    """Make a call of the function run it in so many threads at once, under so many schedules, and check that each thread
    returns what it returns alone, that nothing hangs, and that the process is left as it was.

    Args:
        threads: threads that call the function.
        iterations: schedules.
        seed: schedules are made from it.
        folder: where a schedule that fails is saved.

    Raises:
        StressError: by the call, at the first schedule that breaks an invariant.
        ValueError: fewer than two threads, or no iterations.
    """
    if threads < 2 or iterations < 1:
        raise ValueError(f"stress(threads={threads}, iterations={iterations}): give at least 2 threads and 1 iteration")

    def decorate(function: Callable[[], Any]) -> Callable[[], None]:
        @functools.wraps(function)
        def stressed() -> None:
            from compile_guard.stress.explore import explore, plan

            program = program_of(f"{function.__module__}:{function.__qualname__}", threads, function)

            def stop(failure: Failure) -> None:
                raise StressError(failure, failure.save(Path(folder)))

            explore(schedules=itertools.islice(plan(seed, [program], with_mixed=False), iterations), on_failure=stop)

        stressed.__compile_guard_stressed__ = function  # type: ignore[attr-defined]
        return stressed

    return decorate


def program_of(target: str, threads: int, function: Callable[[], Any] | None = None) -> Program:
    """The program in which each thread calls one function."""
    return Program(target.rpartition(":")[2], (("call",),) * threads, target, function)
