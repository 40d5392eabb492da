"""The trainer as a whole: what it computes does not depend on how the work is spread."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import torch
from runs import column, largest_difference, same_bits, small_config, small_run, weights_of

import compile_guard
from dflash_train.config import ConfigError
from dflash_train.data import Documents
from dflash_train.export import export_run
from dflash_train.metrics import StepRecord, read_metrics
from dflash_train.packing import PackedDocuments
from dflash_train.pipeline import Source, Topology, with_states
from dflash_train.replica import Replica
from dflash_train.targets import load_target
from dflash_train.trainer import train

TOLERANCE = 1e-4
"""Of weights after eight steps at a rate of 6e-3 in float32: the order of sums differs, and Adam divides small by small."""


def test_the_trainer_does_what_a_plain_loop_does(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run")
    config = small_config(tiny_data)
    target = load_target(config.target, config.drafter.taps)
    rows = PackedDocuments(Documents(tiny_data), config.data.row_length)
    source = Source(rows, config, Topology(drafters_here=1))
    replica = Replica(config, torch.device("cpu"), target.vocabulary())
    losses = []
    for step in range(config.train.steps):
        batch = with_states(source.batch(step), target)
        assert batch.states is not None
        sums = replica.accumulate(batch.rows, batch.anchors, batch.states)
        losses.append(float(sums.mean()))
        replica.update(step, float(sums.denominator))
    assert column(tmp_path / "run", "loss") == pytest.approx(losses, rel=1e-6)
    assert same_bits(weights_of(tmp_path / "run", 8), {name: w.detach() for name, w in replica.masters.items()})


@pytest.fixture(scope="module")
def reference(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drafter, four rows a batch."""
    run = tmp_path_factory.mktemp("reference") / "run"
    small_run(tiny_data, run, "data.rows_per_batch=4")
    return run


@pytest.mark.parametrize(
    "spread",
    [
        ["data.rows_per_batch=1", "train.drafter_devices=cpu,cpu,cpu,cpu"],
        ["data.rows_per_batch=1", "train.accumulation=4"],
        ["data.rows_per_batch=1", "train.accumulation=2", "train.drafter_devices=cpu:0,cpu:1", "train.target_devices=cpu,cpu"],
        ["data.rows_per_batch=2", "train.drafter_devices=cpu,cpu", "train.prefetch=1"],
    ],
)
def test_the_same_global_batch_trains_alike_however_it_is_spread(
    spread: list[str], reference: Path, tiny_data: Path, tmp_path: Path
) -> None:
    small_run(tiny_data, tmp_path / "run", *spread)
    assert column(tmp_path / "run", "loss") == pytest.approx(column(reference, "loss"), rel=1e-5)
    assert column(tmp_path / "run", "grad_norm") == pytest.approx(column(reference, "grad_norm"), rel=1e-3)
    difference = largest_difference(weights_of(reference, 8), weights_of(tmp_path / "run", 8))
    print(f"\n  weights differ by {difference:.1e} at most")
    assert difference < TOLERANCE


def test_the_same_documents_train_alike_however_they_are_packed(tiny_data: Path, tmp_path: Path) -> None:
    """Each step has all documents: one or two in a row, or many in a row and one row a batch."""
    documents = Documents(tiny_data)
    longest = int(documents.lengths.max())
    runs: list[Path] = []
    for row_length, accumulated in ((longest, False), (2 * longest, False), (8 * longest, True)):
        rows = len(PackedDocuments(documents, row_length))
        spread = (1, rows) if accumulated else (rows, 1)
        runs.append(tmp_path / str(row_length))
        settings = [f"data.row_length={row_length}", f"data.rows_per_batch={spread[0]}", f"train.accumulation={spread[1]}"]
        small_run(tiny_data, runs[-1], *settings, "anchors.per_document=4", "anchors.per_row=128")
        print(f"\n  {len(documents)} documents in {rows} rows")
    for run in runs[1:]:
        assert column(run, "loss") == pytest.approx(column(runs[0], "loss"), rel=1e-5)
        assert column(run, "accept") == pytest.approx(column(runs[0], "accept"))
        difference = largest_difference(weights_of(runs[0], 8), weights_of(run, 8))
        print(f"\n  weights differ by {difference:.1e} at most")
        assert difference < TOLERANCE


def test_averaging_weights_every_step_is_not_averaging_gradients(reference: Path, tiny_data: Path, tmp_path: Path) -> None:
    """The mirror of the test above: it can tell."""
    settings = ["data.rows_per_batch=2", "train.drafter_devices=cpu,cpu", "train.synchronise=weights"]
    small_run(tiny_data, tmp_path / "run", *settings, "train.average_every=1")
    assert largest_difference(weights_of(reference, 8), weights_of(tmp_path / "run", 8)) > 10 * TOLERANCE


def test_a_run_is_the_same_bits_whatever_the_number_of_targets(tiny_data: Path, tmp_path: Path) -> None:
    two = "train.drafter_devices=cpu,cpu"
    small_run(tiny_data, tmp_path / "a", two)
    small_run(tiny_data, tmp_path / "b", two, "train.target_devices=cpu,cpu,cpu", "train.prefetch=4")
    assert column(tmp_path / "a", "loss") == column(tmp_path / "b", "loss")
    assert same_bits(weights_of(tmp_path / "a", 8), weights_of(tmp_path / "b", 8))


def test_averaged_weights_are_the_mean_of_drafters_that_trained_alone(tiny_data: Path, tmp_path: Path) -> None:
    """Two drafters of one window are two runs of one drafter on every other batch, averaged at the end."""
    rows = PackedDocuments(Documents(tiny_data), 96)
    config = small_config(tiny_data, "train.steps=4")
    target = load_target(config.target, config.drafter.taps)
    alone = []
    for which in range(2):
        source = Source(rows, config, Topology(drafters_here=2))
        replica = Replica(config, torch.device("cpu"), target.vocabulary())
        for step in range(4):
            batch = with_states(source.batch(2 * step + which), target)
            assert batch.states is not None
            sums = replica.accumulate(batch.rows, batch.anchors, batch.states)
            replica.update(step, float(sums.denominator))
        alone.append({name: weight.detach() for name, weight in replica.masters.items()})
    settings = ["train.drafter_devices=cpu,cpu", "train.synchronise=weights", "train.average_every=4", "train.steps=4"]
    small_run(tiny_data, tmp_path / "run", *settings)
    mean = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    assert same_bits(weights_of(tmp_path / "run", 4), mean)
    assert not (tmp_path / "run" / "step-000004" / "replica-00001.safetensors").exists()


def test_the_founding_topology_five_targets_and_three_drafters(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["train.target_devices=cpu,cpu,cpu,cpu,cpu", "train.drafter_devices=cpu,cpu,cpu", "train.steps=20"]
    before = set(threading.enumerate())
    outcome = small_run(tiny_data, tmp_path / "run", *settings, "data.rows_per_batch=1")
    assert outcome.progress.step == 20
    assert outcome.progress.place == 60
    left = [thread.name for thread in set(threading.enumerate()) - before if not thread.name.startswith("checkpoint")]
    assert left == []
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    names, accept = summary["seconds"], column(tmp_path / "run", "accept")
    assert summary["acceptance_teacher_forced"] == {"untrained": accept[0], "trained": sum(accept[-10:]) / 10}
    assert summary["lock_s"] == 0.0
    assert sorted(names) == [*(f"drafter-{i}" for i in range(3)), "reader", *(f"target-{i}" for i in range(5))]
    losses = column(tmp_path / "run", "loss")
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("synchronise", ["gradients", "weights"])
def test_batches_without_an_anchor_are_no_step_and_no_hang(
    synchronise: str, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo #2468: one drafter has nothing to train on in step 1, nobody has in step 2."""
    original = Source.batch

    def batch(source: Source, number: int) -> object:
        made = original(source, number)
        if number in (3, 4, 5):
            made.anchors.valid.fill_(False)
        return made

    monkeypatch.setattr(Source, "batch", batch)
    settings = ["train.drafter_devices=cpu,cpu", "train.steps=5", f"train.synchronise={synchronise}"]
    outcome = small_run(tiny_data, tmp_path / "run", *settings)
    assert outcome.progress.bad_steps == 0
    losses = column(tmp_path / "run", "loss")
    assert losses[2] == 0.0
    assert all(loss > 1 for i, loss in enumerate(losses) if i != 2)


def test_the_step_line_and_the_record_have_the_same_fields(tiny_data: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    config = small_config(tiny_data, "train.steps=2", "train.log_every=1")
    train(config, tmp_path / "run", report=lines.append)
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [list(record) for record in records] == [list(StepRecord.__dataclass_fields__)] * 2
    step_lines = [line for line in lines if line.startswith("step ")]
    for line, record in zip(step_lines, records, strict=True):
        assert line == StepRecord(**record).line()
        names = [part.split()[0] for part in line.split(" | ")]
        assert names == ["step", *list(record)[2:]]
    timeline = json.loads((tmp_path / "run" / "timeline.trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in timeline if event["ph"] == "M"} == {"reader", "target-0", "drafter-0"}
    assert all(event["dur"] >= 0 for event in timeline if event["ph"] == "X")


def test_a_run_can_be_exported(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=2")
    (tmp_path / "run" / "step-000002.tmp").mkdir()  # as a save that was killed leaves it
    (tmp_path / "run" / "step-000002.tmp" / "drafter.safetensors").write_bytes(b"half")
    export_run(tmp_path / "run", tmp_path / "out", format="z-lab")
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_drafters_in_bf16_learn(tiny_data: Path, tmp_path: Path) -> None:
    settings = ["train.dtype=bfloat16", "train.drafter_devices=cpu,cpu", "train.steps=30", "train.learning_rate=3e-3"]
    small_run(tiny_data, tmp_path / "run", *settings)
    losses = column(tmp_path / "run", "loss")
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_data_of_another_tokenizer_is_refused(tiny_data: Path, tmp_path: Path) -> None:
    manifest = tiny_data / "manifest.json"
    other = tmp_path / "data"
    other.mkdir()
    for path in tiny_data.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    record = json.loads(manifest.read_text())
    (other / "manifest.json").write_text(json.dumps({**record, "vocab_size": 5000}))
    with pytest.raises(ConfigError, match=r"tokenizer of 5000 ids, more than drafter\.vocab_size = 264"):
        small_run(other, tmp_path / "run")


def test_compiled_drafters_of_three_threads_compile_in_the_warm_up_and_never_after(
    tiny_data: Path, tmp_path: Path, clean: None
) -> None:
    """The whole drafter is compiled (flex_attention has no backward on the CPU), its loss is checkpointed."""
    plain = ["train.drafter_devices=cpu,cpu,cpu", "train.target_devices=cpu,cpu", "train.accumulation=2"]
    with compile_guard.watch("record") as found:
        outcome = small_run(tiny_data, tmp_path / "compiled", *plain, "train.compile=true")
    happened = [finding.key for finding in found if not finding.prevented]
    assert outcome.findings == ()
    assert happened == []
    small_run(tiny_data, tmp_path / "plain", *plain)
    assert column(tmp_path / "compiled", "loss") == pytest.approx(column(tmp_path / "plain", "loss"), rel=1e-4)


@pytest.mark.stress
def test_a_compile_after_the_warm_up_is_found_and_logged(
    tiny_data: Path, tmp_path: Path, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror: the second step has rows of another length."""
    original = Source.batch

    def batch(source: Source, number: int) -> object:
        made = original(source, number)
        if number == 1:
            cut = {n: getattr(made.rows, n)[:1] for n in ("tokens", "loss_mask", "documents", "positions")}
            rows = type(made.rows)(**cut, document_numbers=made.rows.document_numbers[:1])
            anchors = type(made.anchors)(
                positions=made.anchors.positions[:1], valid=made.anchors.valid[:1], num_empty_documents=0, num_over_budget=0
            )
            return type(made)(step=made.step, rows=rows, anchors=anchors, num_tokens=made.num_tokens)
        return made

    monkeypatch.setattr(Source, "batch", batch)
    with compile_guard.watch("record"):
        outcome = small_run(tiny_data, tmp_path / "run", "train.compile=true", "train.steps=3")
    assert outcome.progress.step == 3
    assert any(key.startswith("sealed:") for key in outcome.findings)
    assert "compiled after the program was sealed" in (tmp_path / "run" / "findings.log").read_text()


def test_a_run_that_exists_is_not_overwritten(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "run", "train.steps=1")
    with pytest.raises(ConfigError, match="has step-000001 already; pass --resume to go on, or another -o DIR"):
        small_run(tiny_data, tmp_path / "run", "train.steps=1")
    lines: list[str] = []
    outcome = train(small_config(tiny_data, "train.steps=1"), tmp_path / "run", resume=True, report=lines.append)
    assert outcome.progress.step == 1
    assert lines[-1].endswith("has all 1 steps already")


