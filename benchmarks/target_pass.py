"""A target's pass over a batch, kernel by kernel and as a CUDA graph, alone and beside threads that launch small kernels.

    python -m benchmarks.target_pass [--threads 3] [--rounds 20] [--json FILE]

Random weights of Gemma 3 270M's shape, bf16, 4 rows of 1,152 tokens with documents of 288. The host's time is until the
call returns, the whole until the device is done. Without a GPU a tiny target, kernel by kernel alone.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import compile_guard
from benchmarks.measure import write_json
from benchmarks.trainer_gemma import CUDA, DEVICE, random_gemma
from benchmarks.trainer_run import report
from dflash_train.packing import PackedRows
from dflash_train.target_graph import capture
from dflash_train.targets import Target, tiny_model

ROWS, DOCUMENTS, LENGTH = (4, 4, 288) if CUDA else (2, 2, 32)


def make_rows(vocab: int) -> PackedRows:
    shape = (ROWS, DOCUMENTS * LENGTH)
    return PackedRows(
        tokens=torch.randint(8, vocab - 8, shape, generator=torch.Generator().manual_seed(0)),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        documents=torch.arange(DOCUMENTS).repeat_interleave(LENGTH).expand(shape).contiguous(),
        positions=torch.arange(LENGTH).repeat(DOCUMENTS).expand(shape).contiguous(),
        document_numbers=tuple(tuple(range(DOCUMENTS)) for _ in range(ROWS)),
    ).to(DEVICE)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


@contextmanager
def others(count: int) -> Iterator[None]:
    """Threads that launch small kernels from Python, as drafters do, until the block ends."""
    over = threading.Event()

    def launch() -> None:
        x = torch.ones(64, device=DEVICE)
        while not over.is_set():
            for _ in range(50):
                x = x * 0.5 + 0.5
            float(x[0])

    threads = [threading.Thread(target=launch, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30.0)


def time_pass(run: Callable[[], object], rounds: int) -> dict[str, float]:
    """Medians in milliseconds."""
    host, whole = [], []
    for _ in range(rounds + 3):
        wait()
        began = time.perf_counter()
        run()
        host.append(time.perf_counter() - began)
        wait()
        whole.append(time.perf_counter() - began)
    return {"host_ms": 1e3 * statistics.median(host[3:]), "whole_ms": 1e3 * statistics.median(whole[3:])}


def main() -> int:
    """Print both, each alone and beside other threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=3, help="that launch beside it (%(default)s)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    compile_guard.install("record")
    model: Any = random_gemma().to(DEVICE) if CUDA else tiny_model(0)
    target = Target(model, (1, 3), name="Gemma 3 270M's shape" if CUDA else "tiny")
    rows = make_rows(target.vocabulary().head.shape[0])
    results: dict[str, dict[str, float]] = {}

    def measure(way: str) -> None:
        for count in (0, options.threads):
            with others(count):
                timed = time_pass(lambda: target.states_of(rows), options.rounds)
            name = f"{way}, beside {count} threads"
            results[name] = timed
            report(f"{name}: host, whole", f"{timed['host_ms']:.2f} ms, {timed['whole_ms']:.2f} ms")

    measure("kernel by kernel")
    print(capture(target, rows), flush=True)
    if target.graphs:
        measure("CUDA graph")
    write_json(options.json, {"target_pass": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
