"""What the pipeline of threads costs: the trainer's rate beside what its parts do alone, on one device.

    python -m benchmarks.pipeline [--size small|tiny] [--steps 40] [--limit 170] [--json FILE]

A random Qwen3 target and a drafter are timed alone, one batch after the other. Then the trainer runs with their threads on
the same device (logical devices), at several numbers of targets and drafters. Work on one GPU comes one after the other, so
the rate that the stand-alone times give is tokens / (target + drafter) of a batch, whatever the number of threads; what is
missing from it is the cost of threads, queues, copies, meetings and the optimiser's turn. `wait`: part of the drafters' time in
which no batch was there; `sync`: waiting for each other. `gil`: how late a thread that sleeps for 2 ms again and again gets to
run, in milliseconds, median and 95th percentile: about what a thread of the run waits for the interpreter.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compile_guard
from benchmarks.measure import environment, markdown, write_json
from dflash_train.chat_tokenizers import Encoded
from dflash_train.config import RunConfig
from dflash_train.config_files import load_config
from dflash_train.data import Documents, ShardWriter
from dflash_train.metrics import read_metrics
from dflash_train.packing import PackedDocuments
from dflash_train.pipeline import Source, Topology, hand_over, receive, with_states
from dflash_train.replica import Replica
from dflash_train.targets import load_target
from dflash_train.trainer import train

TOPOLOGIES = ((1, 1), (2, 1), (1, 3), (2, 3))
"""Targets, drafters."""
SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab": 32_000, "width": 2048, "inner": 6144, "heads": 16, "layers": 16, "length": 2048, "blocks": 256},
    "tiny": {"vocab": 264, "width": 64, "inner": 128, "heads": 4, "layers": 6, "length": 192, "blocks": 16},
}


def make_target(folder: Path, size: dict[str, int]) -> None:
    """A random Qwen3 in a folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=size["vocab"],
        hidden_size=size["width"],
        intermediate_size=size["inner"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        num_key_value_heads=size["heads"] // 2,
        head_dim=size["width"] // size["heads"],
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


def make_data(folder: Path, size: dict[str, int], num_documents: int) -> None:
    """Documents of random tokens, each as long as a row."""
    folder.mkdir()
    writer = ShardWriter(folder)
    random = np.random.Generator(np.random.Philox(key=0))
    for _ in range(num_documents):
        tokens = random.integers(0, size["vocab"] - 2, size["length"])
        writer.add(Encoded(tokens=tokens.astype(np.int32), supervised=np.ones(size["length"], np.bool_)))
    writer.close(tokenizer="random", vocab_size=size["vocab"], dropped={}, sources=[])


def config_of(root: Path, size: dict[str, int], steps: int, targets: int, drafters: int, device: str) -> RunConfig:
    return load_config(
        "tiny-cpu",
        [
            f"target.path={root / 'target'}",
            "target.dtype=bfloat16",
            f"data.path={root / 'data'}",
            f"data.row_length={size['length']}",
            "data.rows_per_batch=1",
            f"drafter.hidden_size={size['width']}",
            f"drafter.intermediate_size={size['inner']}",
            f"drafter.num_heads={size['heads']}",
            f"drafter.num_kv_heads={size['heads'] // 2}",
            f"drafter.head_dim={size['width'] // size['heads']}",
            f"drafter.vocab_size={size['vocab']}",
            f"drafter.mask_token_id={size['vocab'] - 1}",
            f"drafter.num_target_layers={size['layers']}",
            "drafter.num_taps=3" if size["layers"] > 8 else "drafter.num_taps=2",
            "drafter.block_size=16" if size["blocks"] > 64 else "drafter.block_size=4",
            f"anchors.per_document={size['blocks']}",
            f"anchors.per_row={size['blocks']}",
            "train.dtype=bfloat16",
            f"train.steps={steps}",
            "train.save_every=100000",
            f"train.log_every={steps}",
            "train.prefetch=3",
            f'train.target_devices="{",".join([device] * targets)}"',
            f'train.drafter_devices="{",".join([device] * drafters)}"',
        ],
    )


def seconds_each(work: Callable[[], Any], rounds: int, finish: Callable[[], None]) -> float:
    """Median seconds of a call, each waited for, after two that warm up."""
    times = []
    for number in range(rounds + 2):
        finish()
        began = time.perf_counter()
        work()
        finish()
        if number >= 2:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def alone(config: RunConfig, device: torch.device, rounds: int) -> dict[str, float]:
    """Seconds of a batch in a target, and in a drafter: forward, backward and update."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    target = load_target(config.target, config.drafter.taps, device)
    data = PackedDocuments(Documents(Path(config.data.path)), config.data.row_length)
    batch = Source(data, config, Topology(drafters_here=1)).batch(0)
    dtype = getattr(torch, config.train.dtype)
    replica = Replica(config, device, target.vocabulary(config.drafter.embedding_scale).to(device, dtype))
    made = with_states(batch, target)

    def run_drafter() -> None:
        here = hand_over(made, device, dtype)
        sums = replica.accumulate(here.rows, here.anchors, receive(here, device))
        replica.update(0, float(sums.denominator))

    of_target = seconds_each(lambda: with_states(batch, target), rounds, finish)
    return {"target_s": of_target, "drafter_s": seconds_each(run_drafter, rounds, finish), "tokens": batch.num_tokens}


class GilProbe:
    """A thread that sleeps for 2 ms again and again, and notes how late it runs."""

    SLEEP_S = 0.002

    def __init__(self) -> None:
        self.late_ms: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gil-probe", daemon=True)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.perf_counter()
            time.sleep(self.SLEEP_S)
            self.late_ms.append(1e3 * (time.perf_counter() - began - self.SLEEP_S))

    def __enter__(self) -> GilProbe:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def figures(self) -> dict[str, float]:
        ordered = sorted(self.late_ms) or [0.0]
        return {"median_ms": statistics.median(ordered), "p95_ms": ordered[int(0.95 * (len(ordered) - 1))]}


def main() -> None:
    """Measure within the time limit; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which nothing new is begun")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    compile_guard.install()
    deadline = time.perf_counter() + options.limit
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    size = SIZES[options.size]
    results: dict[str, Any] = {}
    lines: list[list[str]] = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_target(root / "target", size)
        make_data(root / "data", size, 64)
        first = alone(config_of(root, size, options.steps, 1, 1, device), torch.device(device), 10)
        expected = first["tokens"] / (first["target_s"] + first["drafter_s"])
        with GilProbe() as probe:
            time.sleep(0.5)
        results["alone"] = {**first, "expected_tok_s": expected, "gil": probe.figures()}
        print(
            f"alone, a batch of {first['tokens']:,.0f} tokens: target {1e3 * first['target_s']:.1f} ms, drafter "
            f"{1e3 * first['drafter_s']:.1f} ms; one after the other {expected:,.0f} tok/s; probe late by "
            f"{probe.figures()['median_ms']:.2f} ms",
            flush=True,
        )
        for targets, drafters in TOPOLOGIES:
            if time.perf_counter() > deadline:
                print("left out, the time limit is reached", flush=True)
                continue
            config = config_of(root, size, options.steps, targets, drafters, device)
            run = root / f"run-{targets}-{drafters}"
            with GilProbe() as probe:
                train(config, run, report=lambda line: None)
            records = read_metrics(run / "metrics.jsonl")[options.steps // 4 :]
            rate = statistics.median(record["drafter_tok_s"] for record in records)
            spent = json.loads((run / "summary.json").read_text("utf-8"))["seconds"]
            shares = {
                kind: statistics.mean(
                    seconds[kind] / max(1e-9, sum(seconds.values()))
                    for who, seconds in spent.items()
                    if who.startswith("drafter")
                )
                for kind in ("wait", "sync")
            }
            gil = probe.figures()
            figures = {"tok_s": rate, "share": rate / expected, **shares, "gil": gil, "seconds": spent}
            results[f"{targets}+{drafters}"] = figures
            print(
                f"{targets} target(s), {drafters} drafter(s): {rate:9,.0f} tok/s, {rate / expected:.3f} of that; drafters wait "
                f"{shares['wait']:.1%}, sync {shares['sync']:.1%}; probe late by {gil['median_ms']:.2f} ms, p95 "
                f"{gil['p95_ms']:.2f} ms",
                flush=True,
            )
            shown = [f"{rate:,.0f}", f"{rate / expected:.3f}", f"{shares['wait']:.1%}", f"{shares['sync']:.1%}"]
            lines.append([f"{targets}", f"{drafters}", *shown, f"{gil['median_ms']:.2f} / {gil['p95_ms']:.2f}"])
    print(environment())
    print(markdown(["targets", "drafters", "tok/s", "of the stand-alone rate", "wait", "sync", "gil late, ms"], lines))
    write_json(options.json, {"pipeline": results})


if __name__ == "__main__":
    main()
