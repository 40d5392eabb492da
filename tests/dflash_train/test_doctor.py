from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import small_config

from dflash_train.cli import main
from dflash_train.config_files import load_config
from dflash_train.doctor import predict_memory
from dflash_train.replica import Replica
from dflash_train.targets import load_target


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_predicted_of_weights_and_optimiser_is_what_a_drafter_has(dtype: str, tiny_data: Path) -> None:
    config = small_config(tiny_data, f"train.dtype={dtype}")
    target = load_target(config.target, config.drafter.taps)
    vocabulary = target.vocabulary().to("cpu", getattr(torch, dtype))
    replica = Replica(config, torch.device("cpu"), vocabulary)
    computing = {id(p): p for p in [*replica.drafter.parameters(), *replica.masters.values()]}.values()
    moments = [value for name, value in replica.moments().items() if not name.startswith("step.")]
    predicted = predict_memory(config)
    assert predicted.weights == sum(p.nbytes for p in computing)
    assert predicted.optimiser == sum(tensor.nbytes for tensor in [*replica.gradients, *moments])
    assert predicted.vocabulary == vocabulary.embedding.nbytes + vocabulary.head.nbytes
    assert predict_memory(config, lent=True).vocabulary == 0


def test_a_drafter_of_qwen3_8b_is_predicted_near_what_was_measured() -> None:
    """SpecForge: S 3072, 512 anchors, one row took 17.9 to 23.8 GiB on an H200, with bf16 moments and no masters."""
    config = load_config("qwen3-8b", ["data.rows_per_batch=1"])
    memory = predict_memory(config)
    parameters = memory.weights / 6
    assert parameters == pytest.approx(1.05e9, rel=0.02)
    without_masters = (memory.total - memory.weights - memory.optimiser) + parameters * 2 * 4
    assert 12 * 2**30 < without_masters < 32 * 2**30


def test_doctor_tells_memory_and_speed(capsys: pytest.CaptureFixture[str], tiny_data: Path) -> None:
    command = ["doctor", "tiny-cpu", f"--set=data.path={tiny_data}", "--drafter-devices=cpu,cpu", "--seconds=0.1"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "targets on cpu; drafters on cpu, cpu"
    assert lines[1].startswith("data: 24 documents, ")
    assert lines[2].startswith("memory of 2 drafters on cpu: 0.")
    assert lines[4].startswith("target: ")
    assert lines[5].startswith("one drafter keeps ")


def test_doctor_without_a_probe_loads_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "qwen3-8b", "--seconds=0", "--set=data.path=", "--target-devices=cpu", "--drafter-devices=cpu"]
    assert main(command) == 0
    assert "memory of 1 drafters on cpu" in capsys.readouterr().out
