"""What only a CUDA device shows of the trainer: compiled flex_attention in several drafter threads, sealed after warm-up.

Run: `python -m benchmarks.trainer_cuda_check` (under two minutes on one H200; with two GPUs or more it also spreads over two).
Exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

import compile_guard
from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.drafter_files import read_weights
from dflash_train.metrics import read_metrics
from dflash_train.targets import load_target
from dflash_train.tiny_data import make_tiny_data
from dflash_train.trainer import Outcome, train

STEPS = 60
SHAPE = [
    "data.row_length=512",
    "anchors.per_row=64",
    "loss.chunk_rows=512",
    f"train.steps={STEPS}",
    "train.save_every=30",
    "train.log_every=30",
    "drafter.attention=flex",
]
failures: list[str] = []


def report(what: str, value: str, holds: bool | None = None) -> None:
    print(f"{what:<84} {value:>26}{'' if holds is None else '   ok' if holds else '   FAILS'}", flush=True)
    if holds is False:
        failures.append(what)


def config_of(data: Path, *settings: str) -> RunConfig:
    return load_config("tiny-cpu", [f"data.path={data}", *SHAPE, *settings])


def run(name: str, folder: Path, data: Path, *settings: str, resume: bool = False) -> Outcome:
    """Train, and print what a run is judged by."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    lines: list[str] = []
    try:
        outcome = train(config_of(data, *settings), folder, resume=resume, report=lines.append)
    except BaseException:
        print("\n".join(lines), file=sys.stderr)
        raise
    spent = time.perf_counter() - began
    warm_up = next((line for line in lines if line.startswith("warmed up")), "no warm-up")
    records = read_metrics(folder / "metrics.jsonl")
    steady = records[10:]
    rate = statistics.median(record["drafter_tok_s"] for record in steady)
    last = records[-1]
    print(f"\n{name}: {spent:.1f} s, {warm_up}")
    for line in lines:
        if line.startswith(("step ", "  drafter-", "  target-", "  reader")):
            print("  " + line)
    report("  tokens a second, drafters (median after ten steps)", f"{rate:,.0f}")
    report("  waiting: drafters, targets", f"{last['drafter_wait']:.0%}, {last['target_wait']:.0%}")
    recompiles = [key for key in outcome.findings if key.startswith("sealed:")]
    report("  compiles after the warm-up", str(len(recompiles)), not recompiles)
    report("  other findings that happened", ", ".join(set(outcome.findings) - set(recompiles)) or "none", not outcome.findings)
    report("  steps done", str(last["step"]), last["step"] == STEPS)
    return outcome


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def compare(what: str, folder: Path, reference: Path) -> None:
    off = max(abs(a - b) / b for a, b in zip(losses(folder), losses(reference), strict=True))
    report(f"  {what}: losses differ by at most", f"{off:.1e}", off < 1e-3)
    first = read_weights(folder / f"step-{STEPS:06d}" / "drafter.safetensors")
    second = read_weights(reference / f"step-{STEPS:06d}" / "drafter.safetensors")
    apart = max(float((first[name] - second[name]).abs().max()) for name in first)
    report(f"  {what}: weights differ by at most", f"{apart:.1e}")


def main() -> int:
    """Run all checks; 0 if every bound holds."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    compile_guard.install("record")
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, {torch.cuda.device_count()} GPUs, {STEPS} steps each")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data = root / "data"
        make_tiny_data(load_target(TargetConfig(path="tiny", dtype="float32"), ()), data, num_documents=64)
        one = ["train.target_devices=cuda:0", "train.drafter_devices=cuda:0", "data.rows_per_batch=6"]
        three = ["train.target_devices=cuda:0,cuda:0", "train.drafter_devices=cuda:0,cuda:0,cuda:0", "data.rows_per_batch=2"]
        run("one drafter, float32", root / "one", data, *one)
        run("three drafters of one GPU, float32", root / "three", data, *three)
        compare("three drafters against one", root / "three", root / "one")
        run("three drafters, reentrant checkpoint", root / "reentrant", data, *three, "loss.checkpoint=reentrant")
        compare("reentrant against non-reentrant", root / "reentrant", root / "three")
        run("three drafters, bfloat16, all losses", root / "bf16", data, *three, "train.dtype=bfloat16", "loss.lk=0.5")
        weights = ["train.synchronise=weights", "train.average_every=20"]
        run("three drafters, weights averaged", root / "weights", data, *three, *weights)
        if torch.cuda.device_count() > 1:
            two = ["train.target_devices=cuda:0,cuda:1", "train.drafter_devices=cuda:0,cuda:1,cuda:1", "data.rows_per_batch=2"]
            run("three drafters of two GPUs, float32", root / "two", data, *two)
            compare("two GPUs against one", root / "two", root / "one")
    print(f"\n{len(failures)} bounds do not hold" + "".join(f"\n  {what}" for what in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
