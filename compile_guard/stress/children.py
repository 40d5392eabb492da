"""Schedules in forked children: without the guard a schedule may crash, hang or brick its process."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import compile_guard
from compile_guard.stress import instrument
from compile_guard.stress.explore import Explorer, collector_off
from compile_guard.stress.operations import Kit
from compile_guard.stress.program import Failure, Program

CHILD_PATIENCE_S = 20.0
"""A schedule in a child that has not ended after so long hangs."""

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Trial:
    """One schedule, to be run in a child."""

    program: Program
    strategy: str
    seed: int
    choices: list[int] | None = None


def prepare() -> None:
    """Have everything imported that a first compile imports, before children are forked. Starts no threads."""
    with instrument.instrumented():
        Kit()
    torch._dynamo.reset()


def run_in_child(trial: Trial, *, guard: bool) -> Failure | None:
    """Run one schedule in a forked child; what broke, None where nothing did. The caller must have no other threads."""
    with tempfile.TemporaryDirectory(prefix="compile_guard_stress_") as folder:
        said = Path(folder, "failure")
        output = Path(folder, "output")
        child = os.fork()
        if not child:
            _child(trial, said, output, guard=guard)
        status = _status_of(child, CHILD_PATIENCE_S * 2)
        if said.exists():
            failure: Failure | None = pickle.loads(said.read_bytes())
            return failure
        stacks = output.read_text(errors="replace") if output.exists() else ""
    if status is None:
        problem = "hang: the process does not end"
    elif os.WIFSIGNALED(status):
        problem = f"crash: {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        problem = f"the process ended with status {os.waitstatus_to_exitcode(status)}"
    return Failure(trial.program, trial.strategy, trial.seed, f"{problem}\n{stacks[-4000:]}", guard, torch.__version__)


def _status_of(child: int, patience_s: float) -> int | None:
    """What a child ended with; None where it had to be killed."""
    deadline = time.monotonic() + patience_s
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(_POLL_S)


def _child(trial: Trial, said: Path, output: Path, *, guard: bool) -> None:
    import faulthandler

    status = 1
    try:
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        faulthandler.enable(2)
        if guard:
            compile_guard.install(mode="record")
        with instrument.instrumented(), collector_off():
            failure = Explorer(patience_s=CHILD_PATIENCE_S).run(trial.program, trial.strategy, trial.seed, trial.choices)
        # (Into place at once: who is killed meanwhile has said nothing.)
        said.with_suffix(".part").write_bytes(pickle.dumps(failure))
        said.with_suffix(".part").rename(said)
        status = 0
    finally:
        os._exit(status)  # threads that hang, and the parent's exit handlers, are left alone


def hazards(
    trials: Iterable[Trial], on_new: Callable[[Failure], None], *, guard: bool = False
) -> tuple[int, dict[str, list[Failure]]]:
    """Run schedules, each in a child of its own; how many, and what broke by the first line of its description."""
    found: dict[str, list[Failure]] = {}
    num_run = 0
    for trial in trials:
        failure = run_in_child(trial, guard=guard)
        num_run += 1
        if failure is not None:
            kind = failure.problem.splitlines()[0]
            if kind not in found:
                on_new(failure)
            found.setdefault(kind, []).append(failure)
    return num_run, found


def replay(failure: Failure, *, num_tries: int = 1) -> list[Failure | None]:
    """Run a saved schedule again, each time in a fresh child with or without the guard, as it was."""
    trial = Trial(failure.program, failure.strategy, failure.seed, failure.choices)
    return [run_in_child(trial, guard=failure.guard) for _ in range(num_tries)]
