"""What only a CUDA device shows of the trainer: compiled flex_attention in several drafter threads, sealed after warm-up.

Run: `python -m benchmarks.trainer_cuda_check` (under two minutes on one H200; with two GPUs or more it also spreads over two).
Exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

import compile_guard
from benchmarks.trainer_run import judged_run, report, verdict
from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.drafter_files import read_weights
from dflash_train.metrics import read_metrics
from dflash_train.targets import load_target
from dflash_train.tiny_data import make_tiny_data

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


def config_of(data: Path, *settings: str) -> RunConfig:
    return load_config("tiny-cpu", [f"data.path={data}", *SHAPE, *settings])


def run(name: str, folder: Path, data: Path, *settings: str) -> None:
    judged_run(name, config_of(data, *settings), folder)


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
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
