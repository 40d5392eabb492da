from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL
from tiny import write_lines

from dflash_train.cli import main
from dflash_train.config_files import load_config
from dflash_train.data import Documents


def overrides(*settings: str) -> list[str]:
    return [f"--set={setting}" for setting in settings]


def test_train_makes_its_own_data_and_names_the_last_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    run = tmp_path / "run"
    command = ["train", "tiny-cpu", "-o", str(run), *overrides(*SMALL, "train.steps=2", "train.log_every=1")]
    assert main([*command, "--target-gpus", "cpu:0,cpu:1", "--drafter-devices", "cpu,cpu"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{run}/step-000002\n"
    assert "step 00002/00002 | loss " in captured.err
    assert "drafter-1" in captured.err
    assert len(Documents(run / "data")) == 64
    resolved = load_config(run / "config.toml")
    assert (resolved.train.target_devices, resolved.train.drafter_devices) == ("cpu:0,cpu:1", "cpu,cpu")
    assert main(command) == 2
    assert "has step-000002 already; pass --resume to go on" in capsys.readouterr().err
    # The data and the devices are the run's own: resuming with other devices says so and goes on.
    assert main([*command, "--resume", "--set=train.steps=3"]) == 0
    assert "changed: train.drafter_devices was 'cpu,cpu' and is now 'auto'" in capsys.readouterr().err


def test_a_run_that_fails_exits_with_one_and_one_that_cannot_start_with_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", "tiny-cpu", "-o", str(tmp_path / "run"), *overrides(*SMALL, f"data.path={tiny_data}")]
    assert main([*command, "--drafter-devices", "cuda:77"]) == 2
    assert "train.drafter_devices names cuda:77, but this machine has" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "trackio", None)
    assert main([*command, "--log", "trackio"]) == 2
    assert "--log trackio needs that package: pip install trackio" in capsys.readouterr().err

    def broken(*arguments: object) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr("dflash_train.pipeline.Pipeline._read", broken)
    assert main(command) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dflash-train: thread reader failed after step 0: OSError: no such disk. No checkpoint")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.steps=abc", "train.steps must be a whole number, got 'abc'; such as train.steps = 10000"),
        ("target.path=/nope", "/nope is neither a folder with a config.json nor a .gguf file; models are read from disk only"),
        ("data.path=/nope", "/nope has no manifest.json; make it with `python -m dflash_train prepare -o /nope`"),
    ],
)
def test_what_cannot_start_says_the_value_the_place_and_the_next_step(
    setting: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "tiny-cpu", "-o", str(tmp_path / "run"), f"--set={setting}"]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be_read_say_what_would_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text("a = [")
    assert main(["config", str(bad)]) == 2
    assert "`dflash-train config tiny-cpu` prints a whole file to go by" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["train", "tiny-cpu", "-o", str(tmp_path / "file" / "run")]) == 2
    assert "run cannot be made: Not a directory; give another folder as -o DIR" in capsys.readouterr().err
    missing = ["prepare", "--input", str(tmp_path / "nope.jsonl"), "--tokenizer=bytes", "-o", str(tmp_path / "data")]
    assert main(missing) == 2
    assert "No such file or directory; name a JSONL file, one sample in each line" in capsys.readouterr().err


def test_the_example_script_trains_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    root = Path(__file__).parents[2]
    shim = tmp_path / "bin" / "dflash-train"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dflash_train "$@"\n')
    shim.chmod(0o755)
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"turns": [f"question {i}"]} for i in range(12)))
    environ = {**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    environ |= {"PRESET": "tiny-cpu", "TOKENIZER": "bytes", "OMP_NUM_THREADS": "1"}
    for steps in (2, 3):
        command = [str(root / "start_training.sh"), "tiny", str(prompts), str(tmp_path / "run")]
        command += overrides(*SMALL, f"train.steps={steps}")
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.endswith(f"{tmp_path}/run/step-{steps:06d}\n")


def test_a_target_on_disk_needs_data(tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "gemma3-270m", "-o", str(tmp_path / "run"), "--target-devices=cpu", "--drafter-devices=cpu"]
    assert main(command) == 2
    assert "data/gemma3-270m has no manifest.json; make it with" in capsys.readouterr().err
    assert main([*command, f"--set=data.path={tiny_data}"]) == 2
    assert "gemma-3-270m is neither a folder with a config.json" in capsys.readouterr().err
