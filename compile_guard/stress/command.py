"""`compile-guard stress`: explore, replay, and find what torch does without the guard."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

import compile_guard
from compile_guard.stress import children
from compile_guard.stress.decorator import program_of
from compile_guard.stress.explore import Tally, explore, plan, target_of
from compile_guard.stress.program import SHAPES, Failure, Program

HELD, BROKEN, CANNOT_RUN = 0, 1, 2


def run(options: argparse.Namespace) -> int:
    """Run the command; 0 nothing broke, 1 something did, 2 it could not run."""
    sys.path.insert(0, "")  # as `python -m` finds modules
    try:
        if min(options.schedules, options.tries) < 1 or options.threads < 2:
            raise ValueError("--schedules and --tries must be at least 1, --threads at least 2")
        if options.replay is not None:
            return _replay(Failure.load(options.replay), options.tries)
        if options.target is not None:
            target_of(options.target)
    except (ValueError, OSError) as error:
        print(f"compile-guard: {error}", file=sys.stderr)
        return CANNOT_RUN
    if options.target is None and not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # These programs compute on the CPU, and fork: a process that has used CUDA cannot compile in a forked child.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    programs = SHAPES if options.target is None else [program_of(options.target, options.threads)]
    schedules = plan(options.seed, programs, with_mixed=options.target is None)
    if options.unguarded:
        return _unguarded(itertools.islice(schedules, options.schedules), options)
    compile_guard.install(mode="record")

    def show(failure: Failure) -> None:
        print(f"{failure}\nreplay: compile-guard stress --replay {failure.save(options.save)}\n", file=sys.stderr)

    def progress(tally: Tally) -> None:
        if tally.num_run % 1000 == 0:
            print(_in_a_line(tally), file=sys.stderr, flush=True)

    tally = explore(
        schedules,
        num_distinct=options.schedules,
        limit_s=options.minutes * 60,
        on_failure=show,
        on_progress=progress,
    )
    print(json.dumps(_as_dict(tally), indent=1) if options.json else _as_text(tally))
    return BROKEN if tally.failures else HELD


def _as_dict(tally: Tally) -> dict[str, object]:
    return {
        "torch": torch.__version__,
        "schedules": tally.num_run,
        "distinct": len(tally.distinct),
        "with two preemptions or more": tally.num_preempted,
        "failures": [failure.problem.splitlines()[0] for failure in tally.failures],
        "wall_s": round(tally.wall_s, 1),
        "programs": tally.by_shape,
    }


def _as_text(tally: Tally) -> str:
    lines = [f"{number:7d}  {shape}" for shape, number in tally.by_shape.items()]
    return "\n".join([*lines, _in_a_line(tally)])


def _in_a_line(tally: Tally) -> str:
    share = tally.num_preempted / max(1, len(tally.distinct))
    return (
        f"torch {torch.__version__}: {len(tally.distinct)} distinct schedules of {len(tally.by_shape)} program shapes, "
        f"{share:.0%} with two preemptions or more, in {tally.wall_s:.0f} s: {len(tally.failures)} broke an invariant"
    )


def _unguarded(schedules: Iterable[tuple[Program, str, int]], options: argparse.Namespace) -> int:
    children.prepare()
    files: dict[str, Path] = {}

    def show(failure: Failure) -> None:
        kind = failure.problem.splitlines()[0]
        files[kind] = failure.save(options.save)
        print(f"{files[kind]}: {kind}", file=sys.stderr, flush=True)

    until = time.monotonic() + options.minutes * 60
    in_time = itertools.takewhile(lambda _: time.monotonic() < until, schedules)
    num_run, found = children.hazards((children.Trial(*schedule) for schedule in in_time), show)
    rows = sorted(((len(failures), kind) for kind, failures in found.items()), reverse=True)
    if options.json:
        each = [{"problem": kind, "schedules": number, "replay": str(files[kind])} for number, kind in rows]
        print(json.dumps({"torch": torch.__version__, "schedules": num_run, "hazards": each}, indent=1))
    else:
        for number, kind in rows:
            print(f"{number:5d}  {kind}  (--replay {files[kind]})")
        print(f"torch {torch.__version__}, no guard: {len(rows)} distinct failures in {num_run} schedules")
    return BROKEN if found else HELD


def _replay(failure: Failure, num_tries: int) -> int:
    children.prepare()
    again = children.replay(failure, num_tries=num_tries)
    failed = [each for each in again if each is not None]
    for each in failed[:1]:
        print(each)
    same = sum(each.problem.splitlines()[0] == failure.problem.splitlines()[0] for each in failed)
    print(f"failed {len(failed)} times of {num_tries}, {same} in the same way: {failure.problem.splitlines()[0]}")
    return BROKEN if failed else HELD
