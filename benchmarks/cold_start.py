"""Seconds until N drafter threads have each finished their first step: cold caches, then again with what is on disk.

    python -m benchmarks.cold_start [--threads 1,4] [--size qwen3-8b|tiny-cpu] [--bare] [--limit 240] [--json FILE]

Each figure is a fresh process, whose compile caches (Inductor's, Triton's) are in a folder made for it; the warm one starts
again with the folder that the cold one left. Counted from the start of the threads: interpreter, imports and weights are not in
it. All threads use the current GPU (logical devices), or the CPU where there is none; each has its own drafter and optimiser.
`--bare` also runs plain threads without the guard, which may fail: that is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from typing import Any

from benchmarks.measure import environment, markdown, write_json


def first_steps(num_threads: int, size: str, guard: bool) -> dict[str, Any]:
    """In this process: seconds from the start of the threads to each one's first finished step."""
    import torch

    import compile_guard
    from dflash_train.anchors import Anchors
    from dflash_train.config_files import load_config
    from dflash_train.packing import PackedRows
    from dflash_train.replica import Replica
    from dflash_train.targets import TargetStates
    from dflash_train.vocabulary import Vocabulary

    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    # On the CPU attention is sdpa, whose layers are compiled only with `train.compile`.
    config = load_config(size, [] if on_cuda else ["train.compile=true"])
    if size != "tiny-cpu":
        # Rows, blocks and all that is compiled for the preset; narrow and of two layers, since widths cost no compile.
        narrow = replace(
            config.drafter, num_layers=2, hidden_size=1024, intermediate_size=3072, num_heads=8, num_kv_heads=2,
            vocab_size=32_000, mask_token_id=31_999,
        )  # fmt: skip
        config = replace(config, drafter=narrow)
    drafter = config.drafter
    length, num_blocks = config.data.row_length, config.anchors.per_row
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, drafter.vocab_size, (1, length), generator=generator)
    rows = PackedRows(
        tokens=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        documents=torch.zeros_like(tokens),
        positions=torch.arange(length)[None],
        document_numbers=((0,),),
    ).to(device)
    positions = torch.randperm(length - 1, generator=generator)[:num_blocks].sort().values[None].to(device)
    anchors = Anchors(
        positions=positions, valid=torch.ones_like(positions, dtype=torch.bool), num_empty_documents=0, num_over_budget=0
    )
    dtype = getattr(torch, config.train.dtype)
    width = drafter.hidden_size
    states = TargetStates(
        taps=torch.randn(1, length, len(drafter.taps) * width, device=device, dtype=dtype),
        final=torch.randn(1, length, width, device=device, dtype=dtype),
    )
    table = torch.randn(drafter.vocab_size, width, device=device, dtype=dtype) * 0.02
    vocabulary = Vocabulary(embedding=table, head=table)
    if guard:
        compile_guard.install()
    replicas = [Replica(config, device, vocabulary) for _ in range(num_threads)]
    finished: dict[int, float] = {}
    errors: list[str] = []
    start = threading.Event()
    began = 0.0

    def work(index: int) -> None:
        start.wait(60)
        try:
            sums = replicas[index].accumulate(rows, anchors, states)
            replicas[index].update(0, float(sums.denominator))
            if on_cuda:
                torch.cuda.synchronize()
            finished[index] = time.perf_counter() - began
        except BaseException as error:  # what plain threads run into is what is reported
            errors.append(f"{type(error).__name__}: {str(error)[:120]}")

    threads: list[threading.Thread] = []
    for index in range(num_threads):
        name = f"drafter-{index}"
        if guard:
            threads.append(compile_guard.Worker(work, device=device, args=(index,), name=name, daemon=True))
        else:
            threads.append(threading.Thread(target=work, args=(index,), name=name, daemon=True))
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    start.set()
    for thread in threads:
        thread.join(max(1.0, 280 - (time.perf_counter() - began)))
    alive = sum(thread.is_alive() for thread in threads)
    return {"seconds": [round(value, 2) for value in sorted(finished.values())], "errors": errors, "stuck": alive}


def in_a_process(num_threads: int, size: str, guard: bool, cache: str, limit: float) -> dict[str, Any]:
    """`first_steps` in a fresh process whose compile caches are in `cache`."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor", "TRITON_CACHE_DIR": f"{cache}/triton"}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.cold_start", "--size", size, "--inside", str(num_threads)]
    command += [] if guard else ["--bare"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env={**os.environ, **caches}, check=False)
    except subprocess.TimeoutExpired:
        return {"seconds": [], "errors": [f"not done after {limit:.0f} s"], "stuck": num_threads}
    if "RESULT" not in done.stdout:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {"seconds": [], "errors": [last[0][:200]], "stuck": 0}
    result: dict[str, Any] = json.loads(done.stdout.split("RESULT", 1)[1].splitlines()[0])
    return result


def main() -> None:
    """Measure cold and warm starts; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="1,4")
    parser.add_argument("--size", default="qwen3-8b", help="a preset")
    parser.add_argument("--bare", action="store_true", help="plain threads as well")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which nothing new is begun")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--inside", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        result = first_steps(options.inside, options.size, not options.bare)
        print("RESULT" + json.dumps(result), flush=True)
        os._exit(0)  # a stuck thread of the bare side must not keep the process
    deadline = time.perf_counter() + options.limit
    results: dict[str, Any] = {}
    lines: list[list[str]] = []
    for guard in (True, False) if options.bare else (True,):
        for num_threads in map(int, options.threads.split(",")):
            with tempfile.TemporaryDirectory() as cache:
                for caches in ("cold", "on disk"):
                    left = deadline - time.perf_counter()
                    if left < 10:
                        print("left out, the time limit is reached", flush=True)
                        continue
                    result = in_a_process(num_threads, options.size, guard, cache, left)
                    name = f"{'guarded' if guard else 'bare'}, {num_threads} thread(s), caches {caches}"
                    results[name] = result
                    steps = ", ".join(f"{value:.1f}" for value in result["seconds"]) or "none"
                    trouble = "; ".join(sorted(set(result["errors"])))
                    print(f"{name}: first steps after {steps} s {trouble}", flush=True)
                    last = f"{max(result['seconds']):.1f}" if len(result["seconds"]) == num_threads else "not all"
                    lines.append(["guarded" if guard else "bare", str(num_threads), caches, last, trouble])
    print(environment())
    print(markdown(["side", "threads", "caches", "last first step, s", "errors"], lines))
    write_json(options.json, {"cold_start": results})


if __name__ == "__main__":
    main()
