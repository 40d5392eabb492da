"""Explored schedules: they repeat exactly, they find races and deadlocks, and under the guard they find none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.fx import proxy

from compile_guard import cli
from compile_guard.stress import StressError, point, points, stress
from compile_guard.stress.explore import Explorer, collector_off, explore, plan
from compile_guard.stress.instrument import ScheduledLock, instrumented, scheduled_by
from compile_guard.stress.operations import OPERATIONS
from compile_guard.stress.program import SHAPES, Failure, Program, digest
from compile_guard.stress.scheduler import Outcome, Scheduler
from compile_guard.stress.strategies import STRATEGIES, Diverged, Replay, Strategy, strategy

ROOT = Path(__file__).parents[2]


def walk_of(chooser: Strategy, num_threads: int = 3, num_points: int = 5) -> Outcome:
    """A program that does nothing but pass points."""
    scheduler = Scheduler(chooser, num_threads, patience_s=20)

    def body() -> None:
        for number in range(num_points):
            point(f"point {number}")

    with scheduled_by(scheduler):
        return scheduler.run([body] * num_threads)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_seed_makes_the_same_schedule_again_and_others_make_others(name: str) -> None:
    made = [walk_of(strategy(name, seed, 3, 15)).steps for seed in range(20)]
    assert made == [walk_of(strategy(name, seed, 3, 15)).steps for seed in range(20)]
    assert len(set(map(str, made))) > 5
    assert all(len(steps) == 3 * 6 for steps in made)


def test_what_was_chosen_is_chosen_again_by_a_replay() -> None:
    first = walk_of(strategy("walk", 7, 3, 15))
    again = walk_of(Replay(first.choices))
    assert again.steps == first.steps
    assert again.num_preemptions == first.num_preemptions >= 2


def test_a_replay_of_another_program_says_that_it_is_another() -> None:
    first = walk_of(strategy("walk", 7, 3, 15))
    with pytest.raises(Diverged, match="which can not now"):
        walk_of(Replay([2 if choice == 0 else choice + 5 for choice in first.choices]))


def test_few_preemptions_are_few() -> None:
    for seed in range(20):
        assert walk_of(strategy("few", seed, 3, 15)).num_preemptions <= 3


def test_locks_taken_in_two_orders_hang_under_some_schedule_and_both_stacks_are_told() -> None:
    def run(seed: int) -> Outcome:
        locks = [ScheduledLock(threading.RLock()) for _ in range(2)]

        def take(first: int, second: int) -> None:
            with locks[first], locks[second]:
                point("both")

        scheduler = Scheduler(strategy("walk", seed, 2, 8), 2, patience_s=20)
        with scheduled_by(scheduler):
            return scheduler.run([lambda: take(0, 1), lambda: take(1, 0)])

    hangs = [outcome.hang for outcome in map(run, range(20)) if outcome.hang]
    assert 0 < len(hangs) < 20
    assert all(hang.startswith("each of the threads waits for another") and hang.count("in take") == 2 for hang in hangs)


def test_a_bounded_wait_is_given_up_where_nobody_can_go_on() -> None:
    scheduler = Scheduler(strategy("walk", 0, 2, 8), 2, patience_s=20)
    with scheduled_by(scheduler):
        outcome = scheduler.run([lambda: scheduler.wait(lambda: False, "never", bounded=True), lambda: point("there")])
    assert outcome.results[0] is False
    assert not outcome.hang


def test_nothing_of_it_is_left_in_torch_and_none_is_there_unless_schedules_are_explored() -> None:
    create_node = proxy.TracerBase.create_node
    lock = torch._dynamo.convert_frame.compile_lock
    with instrumented():
        assert proxy.TracerBase.create_node is not create_node
    assert proxy.TracerBase.create_node is create_node
    assert torch._dynamo.convert_frame.compile_lock is lock
    assert points.hook is None


def test_programs_and_schedules_are_told_apart() -> None:
    steps = walk_of(strategy("walk", 1, 3, 15)).steps
    assert digest(SHAPES[0], steps) != digest(SHAPES[1], steps)
    assert digest(SHAPES[0], steps) != digest(SHAPES[0], steps[:-1])
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) >= 12
    assert {name for shape in SHAPES for thread in shape.threads for name in thread} == set(OPERATIONS)


_inside = 0


def enters_alone() -> None:
    """Two threads are inside at once under some schedules."""
    global _inside
    assert not _inside, "two are inside"
    _inside = 1
    point("inside")
    _inside = 0


def test_a_race_of_a_function_of_ones_own_is_found_saved_and_replayed(guard: Any, tmp_path: Path) -> None:
    global _inside
    stressed = stress(threads=3, iterations=50, folder=tmp_path)(enters_alone)
    with pytest.raises(StressError, match="two are inside") as caught:
        stressed()
    assert "thread 1: call" in str(caught.value)
    assert "schedule (" in str(caught.value)
    saved = Failure.load(caught.value.path)
    with instrumented(), collector_off():
        explorer = Explorer()
        for _ in range(20):
            _inside = 0
            again = explorer.run(saved.program, saved.strategy, saved.seed, saved.choices)
            assert again is not None
            assert again.steps == saved.steps
    _inside = 0


def test_a_function_without_a_race_passes(guard: Any) -> None:
    calls = []

    @stress(threads=2, iterations=10)
    def calm() -> int:
        calls.append(threading.get_ident())
        return 3

    calm()
    assert len(calls) == 2 + 10 * 2  # the first run is that of one thread after the other


@pytest.mark.parametrize("how", [{"threads": 1}, {"iterations": 0}])
def test_stress_says_what_it_needs(how: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="give at least 2 threads and 1 iteration"):
        stress(**how)


def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.json"
    path.write_text("[1]")
    assert cli.main(["stress", "--replay", str(path)]) == 2
    assert "is no saved schedule" in capsys.readouterr().err
    assert cli.main(["stress", "--replay", str(tmp_path / "none.json")]) == 2
    assert cli.main(["stress", "no_such_module:function"]) == 2
    assert "give it as module:function" in capsys.readouterr().err


@pytest.mark.stress
def test_no_schedule_breaks_an_invariant_under_the_guard(guard: Any, num_iterations: int) -> None:
    tally = explore(plan(num_iterations), num_distinct=num_iterations * 2)
    assert [str(failure) for failure in tally.failures] == []
    assert tally.num_preempted * 2 >= len(tally.distinct)


@contextmanager
def exploring() -> Iterator[Explorer]:
    with instrumented(), collector_off():
        yield Explorer()


operations = st.sampled_from(sorted(set(OPERATIONS) - {"fork"}))
threads = st.lists(st.lists(operations, min_size=1, max_size=3), min_size=2, max_size=3)


@pytest.mark.stress
def test_generated_programs_hold_under_the_guard(guard: Any, num_iterations: int) -> None:
    """Hypothesis makes the programs, and the smallest that fails is told with its schedule."""
    with exploring() as explorer:

        @settings(
            max_examples=max(5, num_iterations // 4),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            derandomize=True,
        )
        @given(threads=threads, how=st.sampled_from(STRATEGIES), seed=st.integers(0, 2**32 - 1))
        def holds(threads: list[list[str]], how: str, seed: int) -> None:
            failure = explorer.run(Program("generated", tuple(map(tuple, threads))), how, seed)
            explorer.kit.rewarm()
            assert failure is None, str(failure)

        holds()


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-W", "ignore", "-m", "compile_guard", "stress", *arguments]
    return subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_without_the_guard_hazards_are_found_and_their_replays_fail_again(tmp_path: Path) -> None:
    done = command("--unguarded", "--schedules", "40", "--save", str(tmp_path), "--json", cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-3000:]
    hazards = json.loads(done.stdout)["hazards"]
    assert len(hazards) >= 3, hazards
    again = command("--replay", hazards[0]["replay"], "--tries", "4", cwd=tmp_path)
    assert again.returncode == 1, again.stderr[-3000:]
    assert "failed 4 times of 4" in again.stdout
