"""Runs programs under many schedules, and says which invariant broke under which."""

from __future__ import annotations

import gc
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import compile_guard
from compile_guard.stress import instrument
from compile_guard.stress.invariants import Expected, problems, state
from compile_guard.stress.operations import OPERATIONS, Kit, World, rounds_between
from compile_guard.stress.program import SHAPES, Failure, Program, digest, mixed
from compile_guard.stress.scheduler import PATIENCE_S, Outcome, Scheduler
from compile_guard.stress.strategies import STRATEGIES, FewPreemptions, Replay, Strategy, strategy

COLLECT_EVERY = 100
"""Schedules between two runs of the garbage collector, which would otherwise run at any point of any of them."""

RESET_EVERY = 500
"""Schedules between two resets, which free what Dynamo keeps of functions that are gone."""


@dataclass(slots=True)
class Tally:
    """What an exploration has seen."""

    num_run: int = 0
    distinct: set[bytes] = field(default_factory=set)
    num_preempted: int = 0
    """Of the distinct ones, those with two or more preemptions."""
    by_shape: dict[str, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    wall_s: float = 0.0


class Explorer:
    """Runs schedules in this process, with the guard if it is installed.

    Args:
        patience_s: seconds after which a schedule that has not ended hangs.
    """

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self.kit = Kit()
        self._expected: dict[str, Expected] = {}
        self.last = Outcome([])

    def bodies(self, program: Program, world: World) -> list[Callable[[], Any]]:
        """What each thread of a program calls."""
        if program.target:
            function = program.function or target_of(program.target)
            return [function for _ in program.threads]

        def body(names: tuple[str, ...]) -> list[Any]:
            return [OPERATIONS[name][0](world) for name in names]

        return [lambda names=names: body(names) for names in program.threads]  # type: ignore[misc]

    def _run(self, program: Program, chooser: Strategy) -> tuple[Outcome, int, World]:
        world = World(self.kit)
        bodies = self.bodies(program, world)
        scheduler = Scheduler(chooser, len(bodies), patience_s=self._patience_s)
        before = self.kit.num_compiles
        with instrument.scheduled_by(scheduler):
            outcome = scheduler.run(bodies)
        return outcome, self.kit.num_compiles - before, world

    def expected(self, program: Program) -> Expected:
        """What a program does when its threads run one after the other.

        Raises:
            BaseException: what it raised.
        """
        known = self._expected.get(program.key)
        if known is None:
            outcome, num_compiles, _ = self._run(program, FewPreemptions(0, 0, 0))
            if outcome.errors:
                raise next(iter(outcome.errors.values()))
            if outcome.hang:
                raise TimeoutError(f"the program hangs with its threads one after the other: {outcome.hang}")
            known = Expected(outcome.results, num_compiles, len(outcome.steps))
            self._expected[program.key] = known
            self.kit.rewarm()
        return known

    def run(self, program: Program, how: str, seed: int, choices: list[int] | None = None) -> Failure | None:
        """Run a program under one schedule: made by a strategy from a seed, or chosen before."""
        expected = self.expected(program)
        chooser = strategy(how, seed, len(program.threads), expected.num_steps) if choices is None else Replay(choices)
        torch.manual_seed(seed)
        random.seed(seed)
        before = state()
        outcome, num_compiles, world = self._run(program, chooser)
        self.last = outcome
        problem = next(problems(program, outcome, expected, num_compiles, world, before), None)
        if problem is None:
            return None
        guard = compile_guard.is_installed()
        return Failure(program, how, seed, problem, guard, torch.__version__, outcome.choices, outcome.steps)


def target_of(name: str) -> Callable[[], Any]:
    """The function that `module:function` names.

    Raises:
        ValueError: there is none.
    """
    import importlib

    module, _, attribute = name.partition(":")
    try:
        function: Any = importlib.import_module(module)
        for part in attribute.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} cannot be imported ({error}); give it as module:function") from error
    if not callable(function):
        raise ValueError(f"{name!r} is {function!r:.80}, which cannot be called")
    return getattr(function, "__compile_guard_stressed__", function)  # type: ignore[no-any-return]


def plan(seed: int, programs: Sequence[Program] = SHAPES, *, with_mixed: bool = True) -> Iterator[tuple[Program, str, int]]:
    """Programs, strategies and seeds without end: dear programs seldom, one made at random after each round of them."""
    chooser = random.Random(seed)
    while True:
        for program in [*programs, mixed(chooser.getrandbits(32), [*OPERATIONS])] if with_mixed else programs:
            if program.target or chooser.random() < 1 / rounds_between(program.threads):
                yield program, chooser.choice(STRATEGIES), chooser.getrandbits(32)


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection at points that a replay does not know; and what was there before is left out of those between
    schedules, which would take a third of a second each."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def explore(
    schedules: Iterable[tuple[Program, str, int]],
    *,
    num_distinct: int | None = None,
    num_failures: int = 10,
    limit_s: float = math.inf,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Run until so many distinct schedules have been seen, or so many failures, or a hang, from which nothing goes on, or
    until so much time has passed."""
    tally = Tally()
    began = time.monotonic()
    with instrument.instrumented(), collector_off():
        explorer = Explorer()
        for program, how, seed in schedules:
            failure = explorer.run(program, how, seed)
            tally.num_run += 1
            seen = digest(program, explorer.last.steps)
            if seen not in tally.distinct:
                tally.distinct.add(seen)
                tally.num_preempted += explorer.last.num_preemptions >= 2
                tally.by_shape[program.shape] = tally.by_shape.get(program.shape, 0) + 1
            if failure is not None:
                tally.failures.append(failure)
                on_failure(failure)
                if explorer.last.hang or len(tally.failures) >= num_failures:
                    break
            explorer.kit.rewarm()
            if (num_distinct is not None and len(tally.distinct) >= num_distinct) or time.monotonic() - began > limit_s:
                break
            if tally.num_run % COLLECT_EVERY == 0:
                gc.collect()
                tally.wall_s = time.monotonic() - began
                on_progress(tally)
            if tally.num_run % RESET_EVERY == 0:
                torch._dynamo.reset()
                explorer.kit.rewarm()
    tally.wall_s = time.monotonic() - began
    return tally
