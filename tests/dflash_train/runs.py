"""Small runs of the trainer, on data made once for the session."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.drafter_files import read_weights
from dflash_train.metrics import read_metrics
from dflash_train.targets import load_target
from dflash_train.tiny_data import make_tiny_data
from dflash_train.trainer import Outcome, train

SMALL = ["data.row_length=96", "anchors.per_row=12", "train.steps=8", "train.save_every=100", "train.log_every=100"]


def make_data(folder: Path) -> Path:
    target = load_target(TargetConfig(path="tiny", dtype="float32"), ())
    make_tiny_data(target, folder, num_documents=24, answer_tokens=40)
    return folder


def small_config(data: Path, *overrides: str) -> RunConfig:
    return load_config("tiny-cpu", [f"data.path={data}", *SMALL, *overrides])


def quiet(message: str) -> None:
    pass


def small_run(data: Path, run: Path, *overrides: str, resume: bool = False) -> Outcome:
    return train(small_config(data, *overrides), run, resume=resume, report=quiet)


def weights_of(run: Path, step: int) -> dict[str, Tensor]:
    return read_weights(run / f"step-{step:06d}" / "drafter.safetensors")


def column(run: Path, name: str) -> list[float]:
    return [record[name] for record in read_metrics(run / "metrics.jsonl")]


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
