"""Hidden states on disk: a run from them is the run with the target."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from runs import SMALL, column, largest_difference, quiet, small_config, weights_of

from dflash_train import hidden_cache
from dflash_train.cli import main
from dflash_train.config import ConfigError
from dflash_train.conversations import DataError
from dflash_train.data import Documents
from dflash_train.hidden_cache import cache_hidden, predict_size
from dflash_train.packing import PackedDocuments
from dflash_train.targets import Target, load_target
from dflash_train.tiny_data import make_tiny_data
from dflash_train.trainer import TrainingError, train

CPU = torch.device("cpu")
SHARD = 200_000
"""Bytes: a few files for these documents."""


@pytest.fixture(scope="module")
def cache(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "hidden"
    cache_hidden(small_config(tiny_data), folder, [(CPU,), (CPU,)], quiet, shard_bytes=SHARD)
    return folder


def no_target(*arguments: object) -> Target:
    raise AssertionError("a target was loaded")


@pytest.mark.parametrize("mode", [["train.drafter_devices=cpu,cpu", "train.target_devices=cpu,cpu"], ["loss.lk=1"]])
def test_a_run_from_the_cache_is_the_run_with_the_target(mode: list[str], cache: Path, tiny_data: Path, tmp_path: Path) -> None:
    train(small_config(tiny_data, *mode), tmp_path / "online", report=quiet)
    cached = small_config(tiny_data, *mode, f"data.hidden={cache}")
    train(cached, tmp_path / "offline", report=quiet, load=no_target)
    assert column(tmp_path / "offline", "loss") == pytest.approx(column(tmp_path / "online", "loss"), rel=1e-5)
    difference = largest_difference(weights_of(tmp_path / "offline", 8), weights_of(tmp_path / "online", 8))
    print(f"\n  weights differ by {difference:.1e} at most")
    assert difference < 1e-4


def test_rows_of_any_packing_find_their_documents(cache: Path, tiny_data: Path) -> None:
    config = small_config(tiny_data, f"data.hidden={cache}")
    documents = Documents(tiny_data)
    target = load_target(config.target, config.drafter.taps)
    cached = hidden_cache.CachedTarget(cache, config, documents, CPU)
    rows = PackedDocuments(documents, 4 * int(documents.lengths.max()))
    batch = rows.batch(range(len(rows)))
    made, read = target.states_of(batch), cached.states_of(batch)
    real = batch.documents >= 0
    assert torch.allclose(read.taps[real], made.taps[real], atol=1e-4, rtol=1e-4)
    assert torch.allclose(read.final[real], made.final[real], atol=1e-4, rtol=1e-4)
    assert not read.taps[~real].any()
    for ours, theirs in zip(vars(cached.vocabulary(2.0)).values(), vars(target.vocabulary(2.0)).values(), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def test_the_size_told_is_the_size_on_disk(cache: Path, tiny_data: Path, tmp_path: Path) -> None:
    size = predict_size(small_config(tiny_data), Documents(tiny_data), SHARD)
    files = sorted(cache.glob("states-*.safetensors"))
    assert len(size.shards) == len(files) > 2
    on_disk = sum(path.stat().st_size for path in files)
    assert size.bytes <= on_disk < size.bytes + 1024 * len(files)
    lines: list[str] = []
    cache_hidden(small_config(tiny_data), tmp_path / "x", [(CPU,)], lines.append, size_only=True, load=no_target)
    assert f"{size.tokens:,} tokens: {size.bytes / 2**30:.3f} GiB of hidden states in 1 files" in lines[0]
    assert not (tmp_path / "x").exists()


def test_a_disk_without_room_is_told_before_anything_is_loaded(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 9, 1))
    with pytest.raises(ConfigError, match=r"has room for 0\.0 GiB, and 0\.0 are needed; name a folder on another disk"):
        cache_hidden(small_config(tiny_data), tmp_path / "x", [(CPU,)], quiet, load=no_target)


def test_what_was_begun_is_gone_on_with(cache: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, folder = small_config(tiny_data), tmp_path / "hidden"
    original, made = hidden_cache._write, 0

    def write(tensors: dict[str, torch.Tensor], path: Path) -> None:
        nonlocal made
        made += 1
        if made == 2:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        original(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(hidden_cache, "_write", write)
        with pytest.raises(OSError, match="No space left"):
            cache_hidden(config, folder, [(CPU,)], quiet, shard_bytes=SHARD)
    with pytest.raises(ConfigError, match=r"has no hidden\.json; make it, or go on with it, by `dflash-train cache-hidden`"):
        train(small_config(tiny_data, f"data.hidden={folder}"), tmp_path / "run", report=quiet)
    lines: list[str] = []
    cache_hidden(config, folder, [(CPU,)], lines.append, shard_bytes=SHARD)
    there = len(list(cache.glob("states-*")))
    assert f"in {there} files, of which {there - len(lines) + 1} are there" in lines[0]
    assert len(lines) < there + 1
    for path in cache.glob("states-*"):
        assert path.read_bytes() == (folder / path.name).read_bytes()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("drafter.target_layer_ids=[2,3]", r"has hidden states of tapped layers \[1, 3\], and the run has \[2, 3\]"),
        ("target.seed=1", r"has hidden states of target\.seed 0, and the run has 1"),
        ("data.path=", r"data\.hidden needs data\.path"),
    ],
)
def test_a_cache_of_something_else_is_refused(
    setting: str, message: str, cache: Path, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small_config(tiny_data, f"data.hidden={cache}", setting), tmp_path / "run", report=quiet, load=no_target)
    if setting != "data.path=":
        with pytest.raises(ConfigError, match="holds hidden states of other data or settings; delete it, or name another"):
            cache_hidden(small_config(tiny_data, setting), cache, [(CPU,)], quiet, load=no_target)


def test_a_file_that_was_damaged_is_named(cache: Path, tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hidden"
    shutil.copytree(cache, folder)
    (folder / "states-00001.safetensors").write_bytes(b"half")
    config = small_config(tiny_data, f"data.hidden={folder}")
    with pytest.raises((DataError, TrainingError), match=r"states-00001\.safetensors cannot be read.*cache-hidden"):
        train(config, tmp_path / "run", report=quiet)


def test_from_the_command_line(tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, settings = tmp_path / "hidden", [f"--set={s}" for s in (*SMALL, f"data.path={tiny_data}", "train.steps=2")]
    assert main(["cache-hidden", "tiny-cpu", "-o", str(folder), *settings]) == 0
    assert capsys.readouterr().out == f"{folder}\n"
    command = ["train", "tiny-cpu", "-o", str(tmp_path / "run"), *settings, f"--set=data.hidden={folder}"]
    assert main(command) == 0
    assert capsys.readouterr().out.endswith("step-000002\n")


def test_doctor_reads_the_cache_and_loads_no_target(
    cache: Path, tiny_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dflash_train.doctor.load_target", no_target)
    settings = [f"--set={setting}" for setting in (*SMALL, f"data.path={tiny_data}", f"data.hidden={cache}")]
    assert main(["doctor", "tiny-cpu", *settings, "--seconds=0.1"]) == 0
    said = capsys.readouterr().out
    assert f"hidden states in {cache} are of these documents" in said
    assert "reading hidden states: " in said


def test_doctor_refuses_a_cache_of_other_data(
    cache: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = load_target(small_config(tiny_data).target, ())
    make_tiny_data(target, tmp_path / "other", num_documents=4, answer_tokens=40)
    settings = [f"--set={setting}" for setting in (*SMALL, f"data.path={tmp_path / 'other'}", f"data.hidden={cache}")]
    assert main(["doctor", "tiny-cpu", *settings, "--seconds=0"]) == 2
    assert "has hidden states of data " in capsys.readouterr().err


def test_decoding_while_training_from_a_cache_is_refused_with_the_settings(cache: Path, tiny_data: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.every = 4 decodes with the target, and data.hidden = .* trains without one"):
        small_config(tiny_data, f"data.hidden={cache}", "eval.every=4", f"eval.path={tiny_data}")
