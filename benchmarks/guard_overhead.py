"""What the guard costs: a warm call, warm calls from several threads, and the cold start of one function in N threads.

    python -m benchmarks.guard_overhead [--rounds 501] [--trace DIR] [--json FILE]

Bare and guarded are interleaved within one process, round by round and each first in turn, because machines drift: the
ratio and the difference are those of a round, and their medians are reported. A guarded sample uses a wrapper made under the
guard.
Cold starts need a fresh process each, bare and guarded in turn.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import compile_guard

CALLS = 400
"""Calls of a sample: short, so that both sides of a round see the same machine; many rounds instead."""
WARM_UP = 200
"""Calls before each sample: putting the seams in or out empties CPython's inline caches."""
WARM_THREADS = (1, 2, 4)
COLD_THREADS = (1, 6)


def tiny(x: torch.Tensor) -> torch.Tensor:
    """Little enough that the call itself is what is measured."""
    return x + 1


def seconds_per_call(call: Callable[[torch.Tensor], torch.Tensor], num_threads: int) -> float:
    """Wall seconds of a call, each thread making `CALLS / num_threads` of them. No garbage is collected meanwhile, as in
    `timeit`: a pass over all that torch has made takes longer than a sample."""
    x = torch.ones(1)
    per_thread = CALLS // num_threads
    barrier = threading.Barrier(num_threads + 1)

    def work() -> None:
        for _ in range(WARM_UP // num_threads):
            call(x)
        barrier.wait()
        for _ in range(per_thread):
            call(x)
        barrier.wait()

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    gc.disable()
    barrier.wait()
    began = time.perf_counter()
    barrier.wait()
    spent = time.perf_counter() - began
    gc.enable()
    for thread in threads:
        thread.join()
    return spent / (per_thread * num_threads)


def warm(rounds: int, trace: str | None) -> dict[str, Any]:
    """Microseconds of a warm call: bare, plain `torch.compile` under `install()`, and `compile_guard.compile`.

    Both guarded ones in mode `record`, with events logged into the folder `trace` where one is given.
    """
    # The backend runs the graph itself: what is compiled is not the subject, but the way there.
    bare = torch.compile(tiny, dynamic=False, backend="eager")
    compile_guard.install(mode="record")
    # Functions of their own: the three wrappers of one function would share torch's cache.
    raw = torch.compile(lambda x: x + 1, dynamic=False, backend="eager")
    ours = compile_guard.compile(lambda x: x + 1, dynamic=False, backend="eager")
    for call in (bare, raw, ours):
        call(torch.ones(1))
    compile_guard.uninstall()
    if trace is not None:
        os.environ["COMPILE_GUARD_TRACE"] = trace  # each `install()` opens the log, each `uninstall()` closes it
    sides = [("bare", bare), ("install", raw), ("compile", ours)]
    rows: dict[str, Any] = {}
    for num_threads in WARM_THREADS:
        samples: dict[str, list[float]] = {name: [] for name, _ in sides}
        for number in range(rounds):
            first = number % len(sides)
            for name, call in sides[first:] + sides[:first]:
                # The seams go in and out before each sample, whichever it is: no side finds a process left more at rest.
                compile_guard.install(mode="record")
                if name == "bare":
                    compile_guard.uninstall()
                samples[name].append(seconds_per_call(call, num_threads) * 1e6)
                compile_guard.uninstall()
        base = samples["bare"]
        rows[str(num_threads)] = {
            "bare_us": statistics.median(base),
            **{
                f"{name}_extra_us": statistics.median(a - b for a, b in zip(samples[name], base, strict=True))
                for name in ("install", "compile")
            },
            **{
                f"{name}_ratio": statistics.median(a / b for a, b in zip(samples[name], base, strict=True))
                for name in ("install", "compile")
            },
        }
    return rows


COLD = """
import sys, threading, time, torch
from torch._inductor.utils import fresh_cache
num_threads, guard = int(sys.argv[1]), sys.argv[2] == "guard"
if guard:
    import compile_guard
    compile_guard.install(mode="record")
torch.compile(lambda x: x * 3)(torch.ones(8))  # what the first compile of a process costs is not the subject
compiles = []
from torch._inductor.compile_fx import compile_fx
def backend(graph, inputs):
    compiles.append(1)
    return compile_fx(graph, inputs)
def block(x):
    for _ in range(12):
        x = torch.nn.functional.layer_norm(x.sin() @ x.cos(), (64,)).relu() + x
    return x
step = torch.compile(block, backend=backend, dynamic=False)
x = torch.randn(64, 64)
barrier = threading.Barrier(num_threads + 1)
def work():
    barrier.wait()
    step(x)
    barrier.wait()
threads = [threading.Thread(target=work) for _ in range(num_threads)]
[thread.start() for thread in threads]
with fresh_cache():
    began = time.perf_counter()
    barrier.wait()
    barrier.wait()
    print("RESULT", time.perf_counter() - began, len(compiles))
[thread.join() for thread in threads]
"""


def cold(rounds: int) -> dict[str, Any]:
    """Seconds until N threads have made their first call of one function, with fresh compile caches."""
    samples: dict[tuple[int, str], list[tuple[float, int]]] = {}
    for _ in range(rounds):
        for num_threads in COLD_THREADS:
            for side in ("bare", "guard"):
                done = subprocess.run(
                    [sys.executable, "-c", COLD, str(num_threads), side],
                    capture_output=True,
                    text=True,
                    check=True,
                    timeout=600,
                )
                seconds, compiles = done.stdout.split("RESULT", 1)[1].split()
                samples.setdefault((num_threads, side), []).append((float(seconds), int(compiles)))
    return {
        f"{side}_{num_threads}": {
            "seconds": statistics.median(seconds for seconds, _ in got),
            "compiles": statistics.median(compiles for _, compiles in got),
        }
        for (num_threads, side), got in samples.items()
    }


def main() -> None:
    """Measure, print a table, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=501, help="rounds of warm calls")
    parser.add_argument("--cold-rounds", type=int, default=3, help="fresh processes for each cold start; 0 leaves them out")
    parser.add_argument("--trace", metavar="DIR", help="have the guard log events into this folder meanwhile")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.processor() or platform.machine(),
        "calls": CALLS,
        "event_log": options.trace is not None,
        "warm": warm(options.rounds, options.trace),
        "cold": cold(options.cold_rounds) if options.cold_rounds else {},
    }
    print(f"torch {result['torch']}, Python {result['python']}, medians of {options.rounds} rounds of {CALLS} calls")
    print("threads  bare µs   install() adds µs (ratio)   compile() adds µs (ratio)", flush=True)
    for num_threads, row in result["warm"].items():
        print(
            f"{num_threads:>7}  {row['bare_us']:7.2f}   {row['install_extra_us']:+.3f} ({row['install_ratio']:.3f})"
            f"              {row['compile_extra_us']:+.3f} ({row['compile_ratio']:.3f})"
        )
    for name, row in result["cold"].items():
        print(f"cold start, {name.replace('_', ', ')} thread(s): {row['seconds']:.2f} s, {row['compiles']:.0f} compile(s)")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
