"""The trainer on one GPU with a target of Qwen3.6-27B's real shape and its drafter: 50 steps of 2,048 tokens a row.

    python -m benchmarks.trainer_27b [--steps 50] [--rows 1] [--limit 150] [--json FILE]

Random weights, bf16, 53.8 GB, made on the GPU; three of four layers are GatedDeltaNet, which `transformers` runs in plain
torch where its kernels are not installed. Drafter: the preset `qwen3.6-27b`, 512 anchors of 16 in each row. Prints where the
time goes by thread. 15 s before `--limit` the run is ended as by SIGTERM; at the limit the process ends, with the stacks of all
threads. The target runs kernel by kernel: a recurrent one has its documents run by themselves, in shapes that
change, so that there is no CUDA graph. Without a GPU it runs in a tiny size, which shows only that it runs.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import compile_guard
from benchmarks.measure import environment, write_json
from benchmarks.trainer_run import judged_run, random_documents, report, verdict, write_documents
from dflash_train import trainer
from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.targets import Target

CUDA = torch.cuda.is_available()
LENGTH = 2048 if CUDA else 64
SIZES: dict[str, int] = {
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
TINY = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
DRAFTER_TINY = [
    "hidden_size=32", "intermediate_size=48", "num_heads=4", "num_kv_heads=2", "head_dim=8", "vocab_size=256",
    "mask_token_id=255", "sliding_window=32", "attention=sdpa",
]  # fmt: skip


def make_target(config: TargetConfig, layer_ids: Sequence[int], *devices: torch.device) -> Target:
    """Random weights, made where they stay."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    began = time.perf_counter()
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.dtype))
    torch.manual_seed(0)
    try:
        with devices[0]:
            model: Any = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**(SIZES if CUDA else TINY)))
    finally:
        torch.set_default_dtype(before)
    size = sum(parameter.nbytes for parameter in model.parameters())
    report("target: parameters, bytes", f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} B, {size / 1e9:.1f} GB")
    target = Target(model, layer_ids, name="Qwen3.6-27B's shape")
    report("  made and tried in", f"{time.perf_counter() - began:.1f} s")
    return target


def config_of(root: Path, steps: int, rows: int) -> RunConfig:
    device = "cuda:0" if CUDA else "cpu"
    settings = [
        f"data.path={root / 'data'}", f"data.row_length={LENGTH}", f"data.rows_per_batch={rows}", f"train.steps={steps}",
        f"train.log_every={max(1, steps // 10)}", "train.save_every=100000", f"train.target_devices={device}",
        f"train.drafter_devices={device}",
    ]  # fmt: skip
    if not CUDA:
        settings += [*(f"drafter.{setting}" for setting in DRAFTER_TINY), "anchors.per_row=8", "target.dtype=float32"]
        settings += ["train.dtype=float32"]
    return load_config("qwen3.6-27b", settings)


def main() -> int:
    """Run within the time limit; 0 if every bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=1, help="rows of a batch (%(default)s)")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds for all (%(default)s)")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.limit, exit=True)
    compile_guard.install("record")
    # The last save, of 21 GB with the moments, is no part of this.
    trainer._Run._snapshot = lambda run: None  # type: ignore[method-assign,assignment,return-value]
    trainer.CheckpointWriter.submit = lambda writer, snapshot: None  # type: ignore[method-assign]
    card = torch.cuda.get_device_name() if CUDA else "CPU, tiny"
    print(f"torch {torch.__version__}, {card}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        config = config_of(root, options.steps, options.rows)
        vocab = config.drafter.vocab_size
        write_documents(root / "data", random_documents(64, (LENGTH, LENGTH), LENGTH // 8, vocab), vocab)
        limit = options.limit - 15 if CUDA else None
        run = judged_run("1 target, 1 drafter", config, root / "run", limit_s=limit, load=make_target)
    print(json.dumps(environment()))
    write_json(options.json, {"trainer_27b": run.figures()})
    faulthandler.cancel_dump_traceback_later()
    return verdict()


if __name__ == "__main__":
    sys.exit(main())
