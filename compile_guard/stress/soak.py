"""A long run of mixed work in threads: memory against the same work done by one thread on bare torch, and what is left behind.

    python -m compile_guard.stress.soak [--minutes 30] [--threads 4]       prints JSON

Threads run freely here: no schedule is forced.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import compile_guard
from compile_guard import events
from compile_guard.hazards._runner import child_environment

NUM_PER_WORLD = 20
"""Operations of one thread that share functions; then come fresh ones."""

WARM_UP_WORLDS = 3
"""Of each thread before memory is first read: what is imported and pooled by then is no growth."""

JOIN_S = 300.0


def resident_mib() -> float:
    """Memory of this process that is in RAM, MiB.

    Raises:
        OSError: this system has no /proc.
    """
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


def work(kit: Any, chooser: random.Random, num_operations: int) -> None:
    """Operations chosen at random, each of which checks what it got."""
    from compile_guard.stress.operations import OPERATIONS, World

    names = sorted(set(OPERATIONS) - {"fork"})  # copies the process, which is another subject
    world = World(kit)
    for _ in range(num_operations):
        OPERATIONS[chooser.choice(names)][0](world)


def run(seeds: Sequence[int], num_worlds: int, deadline_s: float) -> dict[str, Any]:
    """So many worlds for each seed, all seeds at once in threads where the guard is in, else one after the other."""
    from compile_guard.stress.operations import Kit

    kit = Kit()
    in_threads = compile_guard.is_installed()
    choosers = [random.Random(seed) for seed in seeds]
    errors: list[BaseException] = []
    ends = time.monotonic() + deadline_s

    def go_on(chooser: random.Random, num: int, until: float) -> int:
        try:
            for done in range(num):
                if time.monotonic() > until:
                    return done
                work(kit, chooser, NUM_PER_WORLD)
            return num
        except BaseException as error:  # told with the figures
            errors.append(error)
            raise

    def everything(num: int, until: float) -> list[int]:
        done = [0] * len(choosers)

        def body(number: int) -> None:
            done[number] = go_on(choosers[number], num, until)

        if not in_threads:
            for number in range(len(choosers)):
                body(number)
            return done
        threads = [threading.Thread(target=body, args=(number,), daemon=True) for number in range(len(choosers))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()) + JOIN_S)
            if thread.is_alive():
                raise TimeoutError(f"{thread.name} still works {JOIN_S:g} s after its time")
        return done

    began = time.monotonic()
    first = everything(WARM_UP_WORLDS, ends)
    before = resident_mib()
    second = everything(num_worlds, ends)
    return {
        "operations": NUM_PER_WORLD * (sum(first) + sum(second)),
        "worlds": second,
        "warm up": first,
        "grown_mib": round(resident_mib() - before, 1),
        "resident_mib": round(resident_mib(), 1),
        "wall_s": round(time.monotonic() - began, 1),
        "lock owner": compile_guard.trace_lock.owner,
        "errors": [f"{type(error).__name__}: {error}" for error in errors],
        "findings that happened": sorted({found.code for found in compile_guard.findings() if not found.prevented}),
    }


def _child(how: str, num_threads: int, num_worlds: int, deadline_s: float, log: Path | None) -> dict[str, Any]:
    environment = child_environment() | {"MALLOC_ARENA_MAX": "1"}
    if log is not None:
        environment[events.VARIABLE] = str(log)
    line = [sys.executable, "-W", "ignore", "-m", "compile_guard.stress.soak", "--child", how]
    line += ["--threads", str(num_threads), "--worlds", str(num_worlds), "--minutes", str(deadline_s / 60)]
    done = subprocess.run(line, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ChildProcessError(f"the {how} run ended with status {done.returncode}")
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both runs; 1 where the guarded one grew more than 1.2 times the bare one's, erred, or left the lock taken."""
    parser = argparse.ArgumentParser(prog="python -m compile_guard.stress.soak", description="Memory over a long run.")
    parser.add_argument("--minutes", type=float, default=30.0, metavar="M", help="of the guarded run (30)")
    parser.add_argument("--threads", type=int, default=4, metavar="N", help="of the guarded run (4)")
    parser.add_argument("--child", choices=("guarded", "bare"), help=argparse.SUPPRESS)
    parser.add_argument("--worlds", type=int, default=10**9, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    seeds = range(options.threads)
    if options.child:
        if options.child == "guarded":
            compile_guard.install(mode="record")
        print(json.dumps(run(seeds, options.worlds, options.minutes * 60)), flush=True)
        os._exit(0)  # threads that an error left behind are told already
    with tempfile.TemporaryDirectory(prefix="compile_guard_soak_") as folder:
        log = Path(folder)
        guarded = _child("guarded", options.threads, options.worlds, options.minutes * 60, log)
        guarded["log_mb"] = round(sum(each.stat().st_size for each in log.iterdir()) / 1e6, 1)
    per_thread = max(1, sum(guarded["worlds"]) // options.threads)
    bare = _child("bare", options.threads, per_thread, 1e9, None)
    print(json.dumps({"guarded": guarded, "bare": bare}, indent=1))
    grew_more = guarded["grown_mib"] > 1.2 * max(bare["grown_mib"], 1.0)
    return int(grew_more or bool(guarded["errors"]) or guarded["lock owner"] is not None)


if __name__ == "__main__":
    raise SystemExit(main())
