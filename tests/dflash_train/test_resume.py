"""Checkpoints, and runs that go on from them."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import SMALL, column, largest_difference, same_bits, small_config, small_run, weights_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_train import checkpoint as checkpoints_module
from dflash_train.checkpoint import checkpoints, is_complete, read_checkpoint
from dflash_train.config import ConfigError
from dflash_train.trainer import TrainingError, train

TWO = "train.drafter_devices=cpu,cpu"
WEIGHTS_MODE = ["train.synchronise=weights", "train.average_every=3"]
EXACT = ["loss", "accept", "accuracy", "lr", "grad_norm", "epoch", "bad_steps"]


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the run receive SIGTERM while it combines the gradients of a step."""
    from dflash_train.trainer import _Run

    original = _Run._combine

    def combine(run: _Run) -> None:
        if run.progress.step == step - 1:
            run.signals.received = signal.SIGTERM
        original(run)

    monkeypatch.setattr(_Run, "_combine", combine)


def all_state(run: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint but the process-wide generator's state."""
    folder = run / f"step-{step:06d}"
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}:{name}": value for name, value in load_file(path).items() if name != "rng.cpu"}
    return found


@pytest.mark.parametrize(
    ("mode", "at"),
    [
        (["train.accumulation=2"], 1),
        ([TWO], 4),
        ([TWO, *WEIGHTS_MODE, "train.accumulation=2"], 4),
        ([TWO, *WEIGHTS_MODE], 6),
        ([TWO, *WEIGHTS_MODE, "train.average_moments=false"], 6),
        ([TWO, *WEIGHTS_MODE, "train.average_moments=false", "train.dtype=bfloat16"], 4),
    ],
)
def test_a_run_that_a_signal_ended_goes_on_bit_for_bit(
    mode: list[str], at: int, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 is within a window of averaging, step 6 at the end of one."""
    settings = mode
    small_run(tiny_data, tmp_path / "unbroken", *settings)
    with monkeypatch.context() as patch:
        interrupt_after(at, patch)
        outcome = small_run(tiny_data, tmp_path / "broken", *settings)
    assert (outcome.progress.step, outcome.signal) == (at, signal.SIGTERM)
    torch.rand(3)  # somebody else draws from the process-wide generator meanwhile
    small_run(tiny_data, tmp_path / "broken", *settings, resume=True)
    for name in EXACT:
        assert column(tmp_path / "broken", name) == column(tmp_path / "unbroken", name)
    assert column(tmp_path / "broken", "step") == list(range(1, 9))
    assert same_bits(all_state(tmp_path / "broken", 8), all_state(tmp_path / "unbroken", 8))


def test_resuming_restores_the_state_of_the_generator(tiny_data: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    small_run(tiny_data, tmp_path / "run", "train.steps=2")
    expected = torch.rand(4)
    torch.manual_seed(6)
    small_run(tiny_data, tmp_path / "run", "train.steps=2", resume=True)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(
    "other", [["data.rows_per_batch=4"], ["train.accumulation=2"], ["train.accumulation=4", "data.rows_per_batch=1"]]
)
def test_another_topology_goes_on_in_the_same_global_order(other: list[str], tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "two", TWO)
    small_run(tiny_data, tmp_path / "changed", TWO, "train.save_every=3", "train.keep_last=9")
    shutil.rmtree(tmp_path / "changed" / "step-000008")
    shutil.rmtree(tmp_path / "changed" / "step-000006")
    small_run(tiny_data, tmp_path / "changed", *other, resume=True)
    assert column(tmp_path / "changed", "epoch") == column(tmp_path / "two", "epoch")
    assert column(tmp_path / "changed", "loss") == pytest.approx(column(tmp_path / "two", "loss"), rel=1e-5)
    assert largest_difference(weights_of(tmp_path / "changed", 8), weights_of(tmp_path / "two", 8)) < 1e-4


@pytest.mark.parametrize("now", [["train.drafter_devices=cpu,cpu,cpu", *WEIGHTS_MODE], [TWO], []])
def test_drafters_that_differ_go_on_from_their_mean_where_they_must(
    now: list[str], tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(4, patch)
        small_run(tiny_data, tmp_path / "run", TWO, *WEIGHTS_MODE)
    files = [load_file(tmp_path / "run" / "step-000004" / f"replica-0000{i}.safetensors") for i in range(2)]
    assert not torch.equal(files[0]["weight.fc.weight"], files[1]["weight.fc.weight"])
    mean = (files[0]["weight.fc.weight"] + files[1]["weight.fc.weight"]) / 2
    assert torch.equal(weights_of(tmp_path / "run", 4)["fc.weight"], mean)
    checkpoint = read_checkpoint(tmp_path / "run" / "step-000004")
    assert torch.equal(checkpoint.replica(1, 3, alike=False)["weight.fc.weight"], mean)
    assert torch.equal(checkpoint.replica(1, 2, alike=True)["weight.fc.weight"], mean)
    assert torch.equal(checkpoint.replica(1, 2, alike=False)["weight.fc.weight"], files[1]["weight.fc.weight"])
    assert small_run(tiny_data, tmp_path / "run", *now, resume=True).progress.step == 8


def test_changed_settings_are_told_with_what_they_mean(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=2")
    lines: list[str] = []
    config = small_config(tiny_data, "train.steps=3", "loss.kl=1", "train.log_every=7")
    train(config, tmp_path / "run", resume=True, report=lines.append)
    told = [line.strip() for line in lines if line.startswith("  changed")]
    assert told == [
        "changed: loss.kl was 0.0 and is now 1.0: the objective changes here, and losses before and after do not compare",
        "changed: train.steps was 2 and is now 3: the learning rate follows the schedule of the new length",
        "changed: train.log_every was 100 and is now 7: it applies from here on",
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("drafter.num_layers=3", "drafter.num_layers was 2 and is now 3: it would be another drafter"),
        ("data.seed=1", "data.seed was 0 and is now 1: the order of the rows would be another"),
        ("data.row_length=80", "data.row_length was 96 and is now 80: documents would be packed into other rows"),
        ("target.seed=4", "it would be another target"),
    ],
)
def test_settings_that_cannot_change_are_refused(change: str, message: str, tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=1")
    with pytest.raises(ConfigError) as caught:
        small_run(tiny_data, tmp_path / "run", "train.steps=2", change, resume=True)
    assert message in str(caught.value)
    assert "Set it back, or start a new run" in str(caught.value)


def test_other_data_under_the_same_path_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=1")
    meta = tmp_path / "run" / "step-000001" / "meta.json"
    record = json.loads(meta.read_text())
    meta.write_text(json.dumps({**record, "data": "7 documents"}))
    with pytest.raises(ConfigError, match=r"was trained on 7 documents, and data\.path now has 24 documents"):
        small_run(tiny_data, tmp_path / "run", "train.steps=2", resume=True)


@pytest.mark.parametrize("victim", ["drafter.safetensors", "replica-00000.safetensors", "config.toml", "meta.json"])
@pytest.mark.parametrize("damage", ["missing", "half"])
def test_a_checkpoint_that_is_not_complete_is_passed_over(
    victim: str, damage: str, tiny_data: Path, tmp_path: Path
) -> None:
    settings = ["train.steps=4", "train.save_every=2"]
    small_run(tiny_data, tmp_path / "run", *settings)
    path = tmp_path / "run" / "step-000004" / victim
    path.unlink() if damage == "missing" else path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert [kept.name for kept in checkpoints(tmp_path / "run")] == ["step-000002"]
    shutil.rmtree(tmp_path / "run" / "step-000004")
    assert small_run(tiny_data, tmp_path / "run", *settings, resume=True).progress.step == 4


@pytest.mark.parametrize("point", range(1, 7))
def test_a_save_that_is_killed_anywhere_leaves_the_checkpoint_before(
    point: int, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each file that is written, and after the rename. The first call that counts prunes after step 2."""
    run = tmp_path / "run"
    settings = ["train.steps=4", "train.save_every=2", TWO]
    writes = 0

    class Killed(BaseException):
        pass

    def dying(name: str) -> Callable[..., object]:
        original = getattr(checkpoints_module, name)

        def call(*arguments: object) -> object:
            nonlocal writes
            if (run / "step-000002").exists():
                writes += 1
                if writes > point:
                    raise Killed
            return original(*arguments)

        return call

    with monkeypatch.context() as patch:
        for name in ("_save", "_write_text", "_prune"):
            patch.setattr(checkpoints_module, name, dying(name))
        if point < 6:
            with pytest.raises(Killed):
                small_run(tiny_data, run, *settings)
        else:
            small_run(tiny_data, run, *settings)
    expected = ["step-000002"] if point < 5 else ["step-000002", "step-000004"]
    assert [path.name for path in checkpoints(run)] == expected
    assert small_run(tiny_data, run, *settings, resume=True).progress.step == 4
    assert not list(run.glob("*.tmp"))


def test_the_last_checkpoints_and_the_best_are_kept(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash_train.trainer import _Run

    original = _Run._snapshot
    acceptance = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.5}

    def snapshot(run: _Run) -> object:
        run._accepted = [acceptance[run.progress.step]]
        return original(run)

    monkeypatch.setattr(_Run, "_snapshot", snapshot)
    small_run(tiny_data, tmp_path / "run", "train.steps=6", "train.save_every=1", "train.keep_last=2")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000002", "step-000005", "step-000006"]


def test_loading_never_unpickles(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=1")

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("something was unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert small_run(tiny_data, tmp_path / "run", "train.steps=2", resume=True).progress.step == 2
    planted = tmp_path / "run" / "step-000002" / "replica-00000.safetensors"
    size = planted.stat().st_size
    planted.write_bytes(b"\x80\x04" + b"x" * (size - 2))
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        small_run(tiny_data, tmp_path / "run", "train.steps=3", resume=True)


@pytest.mark.parametrize("change", ["rename", "reshape"])
def test_an_optimiser_state_that_does_not_fit_is_refused(change: str, tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=1")
    path = tmp_path / "run" / "step-000001" / "replica-00000.safetensors"
    state = load_file(path)
    moment = state.pop("moment.exp_avg.norm.weight")
    state["moment.exp_avg.norm.weigh" if change == "rename" else "moment.exp_avg.norm.weight"] = moment[:-1].clone()
    save_file(state, path)
    meta = path.with_name("meta.json")
    record = json.loads(meta.read_text())
    record["files"][path.name] = path.stat().st_size
    meta.write_text(json.dumps(record))
    assert is_complete(path.parent)
    with pytest.raises(ConfigError, match=r"has no exp_avg\.norm\.weight of shape \(64,\)"):
        small_run(tiny_data, tmp_path / "run", "train.steps=2", resume=True)


def command(data: Path, run: Path, *settings: str) -> list[str]:
    overrides = [f"--set={setting}" for setting in (f"data.path={data}", *SMALL, *settings)]
    return [sys.executable, "-m", "dflash_train", "train", "tiny-cpu", "-o", str(run), "--resume", *overrides]


def test_a_run_killed_three_times_ends_with_the_weights_of_an_unbroken_one(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["train.steps=24", "train.save_every=4"]
    small_run(tiny_data, tmp_path / "unbroken", *settings)
    run = tmp_path / "run"
    for kill_at in (3, 10, 17):
        process = subprocess.Popen(
            command(tiny_data, run, *settings, "train.log_every=1"), stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith(f"step {kill_at:05d}"):
                process.send_signal(signal.SIGKILL)
                break
        process.stderr.read()
        assert process.wait(60) == -signal.SIGKILL
    outcome = small_run(tiny_data, run, *settings, resume=True)
    assert outcome.progress.step == 24
    assert same_bits(all_state(run, 24), all_state(tmp_path / "unbroken", 24))
    assert column(run, "loss") == column(tmp_path / "unbroken", "loss")


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.stress)])
def test_a_signal_saves_and_says_how_to_go_on(number: signal.Signals, tiny_data: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        command(tiny_data, tmp_path / "run", "train.steps=100000", "train.log_every=1"), stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 00003"):
            process.send_signal(number)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 128 + number
    (kept,) = checkpoints(tmp_path / "run")
    step = int(kept.name[len("step-") :])
    assert f"stopped by {number.name} at step {step}; the same command with --resume goes on" in rest


def test_a_second_signal_leaves_at_once(tiny_data: Path, tmp_path: Path) -> None:
    """The first one cannot end the run, since no step ends: the reader is held up for ever."""
    script = (
        "import sys, threading\n"
        "from dflash_train import cli, pipeline\n"
        "original = pipeline.Source.batch\n"
        "def batch(source, number):\n"
        "    if number == 2:\n"
        "        print('held', file=sys.stderr, flush=True)\n"
        "        threading.Event().wait()\n"
        "    return original(source, number)\n"
        "pipeline.Source.batch = batch\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    arguments = command(tiny_data, tmp_path / "run", "train.log_every=1")[3:]
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen = ""
    while not ("held" in seen and "step 00002" in seen):
        line = process.stderr.readline()
        assert line
        seen += line
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 128 + signal.SIGTERM
    process.stderr.close()


def test_a_disk_that_fills_up_during_a_save_ends_the_run_with_its_cause(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = checkpoints_module._save

    def save(tensors: object, path: Path) -> None:
        if "step-000002" not in str(path):
            path.write_bytes(b"half")
            raise OSError(28, os.strerror(28), str(path))
        original(tensors, path)  # type: ignore[arg-type]

    settings = ["train.save_every=2", TWO]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "_save", save)
        with pytest.raises(TrainingError) as caught:
            small_run(tiny_data, tmp_path / "run", *settings)
    assert "No space left on device" in str(caught.value)
    assert "step-000002 is complete; --resume goes on from it" in str(caught.value)
    assert not list((tmp_path / "run").glob("*.tmp"))
    assert small_run(tiny_data, tmp_path / "run", *settings, resume=True).progress.step == 8
