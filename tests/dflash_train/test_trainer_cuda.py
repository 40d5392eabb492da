"""The trainer on real GPUs; `benchmarks/trainer_cuda_check.py` does more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import column, small_run

FLEX = ["drafter.attention=flex", "data.row_length=256", "anchors.per_row=32", "train.steps=12"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_flex_drafters_of_one_gpu_train_as_one(tiny_data: Path, tmp_path: Path, clean: None) -> None:
    one = ["train.target_devices=cuda:0", "train.drafter_devices=cuda:0", "data.rows_per_batch=2"]
    two = ["train.target_devices=cuda:0,cuda:0", "train.drafter_devices=cuda:0,cuda:0", "data.rows_per_batch=1"]
    first = small_run(tiny_data, tmp_path / "one", *FLEX, *one)
    second = small_run(tiny_data, tmp_path / "two", *FLEX, *two)
    assert first.findings == second.findings == ()
    assert column(tmp_path / "two", "loss") == pytest.approx(column(tmp_path / "one", "loss"), rel=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one(tiny_data: Path, tmp_path: Path, clean: None) -> None:
    one = ["train.target_devices=cuda:0", "train.drafter_devices=cuda:0", "data.rows_per_batch=2"]
    two = ["train.target_devices=cuda:1,cuda:0", "train.drafter_devices=cuda:0,cuda:1", "data.rows_per_batch=1"]
    small_run(tiny_data, tmp_path / "one", *FLEX, *one)
    outcome = small_run(tiny_data, tmp_path / "two", *FLEX, *two)
    assert outcome.findings == ()
    assert column(tmp_path / "two", "loss") == pytest.approx(column(tmp_path / "one", "loss"), rel=1e-3)
