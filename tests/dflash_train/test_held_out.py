"""Evaluation by decoding during training: what it reports, what it decides, and that it leaves the run alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from runs import column, quiet, same_bits, small_config, small_run, weights_of
from tiny import write_lines

from dflash_train.chat_tokenizers import ByteTokenizer
from dflash_train.checkpoint import checkpoints
from dflash_train.config import ConfigError, TargetConfig
from dflash_train.decode import DecodeConfig
from dflash_train.drafter_files import read_run
from dflash_train.evaluate import Prompt, decoder_of, list_ways, measure
from dflash_train.held_out import HeldOut
from dflash_train.metrics import read_metrics
from dflash_train.prepare import prepare
from dflash_train.targets import load_target
from dflash_train.tiny_data import make_tiny_data
from dflash_train.trainer import train

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents that are not trained on."""
    folder = tmp_path_factory.mktemp("held") / "data"
    target = load_target(TargetConfig(path="tiny", dtype="float32"), ())
    make_tiny_data(target, folder, num_documents=6, answer_tokens=30, seed=9)
    return folder


def settings(folder: Path, *more: str) -> list[str]:
    return [f"eval.path={folder}", "eval.every=3", "eval.prompts=4", "eval.max_new_tokens=16", *more]


def test_tau_is_reported_logged_and_that_of_the_checkpoint_and_changes_nothing(
    tiny_data: Path, held_out: Path, tmp_path: Path
) -> None:
    lines: list[str] = []
    config = small_config(tiny_data, *settings(held_out))
    train(config, tmp_path / "with", report=lines.append)
    small_run(tiny_data, tmp_path / "without")
    assert same_bits(weights_of(tmp_path / "with", 8), weights_of(tmp_path / "without", 8))
    assert column(tmp_path / "with", "loss") == column(tmp_path / "without", "loss")
    told = [line for line in lines if line.startswith("held out, step")]
    assert [int(line.split()[3].rstrip(":")) for line in told] == [3, 6, 8]  # every third step, and where it was saved
    taus = {r["step"]: r["tau"] for r in read_metrics(tmp_path / "with" / "metrics.jsonl") if "tau" in r}
    assert list(taus) == [3, 6, 8]

    run, weights = read_run(tmp_path / "with")
    target = load_target(run.target, run.drafter.taps)
    evaluation = HeldOut(run, target)
    assert len(evaluation.prompts) == 4
    prompts = [Prompt(task="all", tokens=tokens) for tokens in evaluation.prompts]
    ends = DecodeConfig(max_new_tokens=16, stop_ids=ByteTokenizer.stop_ids)
    [row] = measure(decoder_of(target, run.drafter, weights), prompts, list_ways(["chain"], []), ends, batch_size=4)
    assert taus[8] == row.tau == evaluation.tau(weights)
    meta = json.loads((tmp_path / "with" / "step-000008" / "meta.json").read_text("utf-8"))
    assert meta["acceptance"] == taus[8] - 1


def test_the_checkpoint_kept_as_best_is_best_in_decoding(
    tiny_data: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its acceptance in training grows; decoded it is made to fall after the second step."""
    taus = iter([1.5, 3.0, 2.0, 2.5])
    monkeypatch.setattr(HeldOut, "tau", lambda self, weights: next(taus))
    more = ["eval.every=100", "train.save_every=2", "train.keep_last=1"]
    train(small_config(tiny_data, *settings(held_out, *more)), tmp_path / "run", report=quiet)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-000004", "step-000008"]


def test_evaluation_without_held_out_prompts_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval.every needs eval.path"):
        small_config(tiny_data, "eval.every=5")
    texts = write_lines(tmp_path / "t.jsonl", {"text": "a plain text of some length"})
    prepare([texts], ByteTokenizer(), tmp_path / "plain")
    config = small_config(tiny_data, f"eval.path={tmp_path / 'plain'}", "eval.every=5")
    target = load_target(config.target, config.drafter.taps)
    # The token that begins a plain text is all that stands before what is supervised.
    assert HeldOut(config, target).prompts == [[ByteTokenizer.BEGIN]]
    narrow = small_config(tiny_data, f"eval.path={tiny_data}", "eval.every=5")
    object.__setattr__(narrow.drafter, "vocab_size", 8)
    with pytest.raises(ConfigError, match="made by a tokenizer of 264 ids"):
        HeldOut(narrow, target)
