"""A few hundred steps of the whole chain on the CPU: tiny target, its data, packing, anchors, drafter, loss."""

import time
from pathlib import Path

import pytest
import torch

from dflash_train.anchors import draw_anchors
from dflash_train.blocks import build_blocks
from dflash_train.chat_tokenizers import ByteTokenizer
from dflash_train.config import RunConfig
from dflash_train.config_files import load_config
from dflash_train.data import Documents
from dflash_train.drafter import Drafter, draft_slots
from dflash_train.drafter_files import save_drafter
from dflash_train.export import export_run
from dflash_train.losses import LossSums, block_loss
from dflash_train.packing import PackedDocuments, PackedRows, RowSampler
from dflash_train.targets import Target, load_target
from dflash_train.tiny_data import make_tiny_data

pytest.importorskip("transformers")


def step_loss(drafter: Drafter, target: Target, rows: PackedRows, config: RunConfig, step: int) -> LossSums:
    anchors = draw_anchors(
        rows.loss_mask, rows.documents, rows.document_numbers,
        per_document=config.anchors.per_document, per_row=config.anchors.per_row, seed=config.data.seed, step=step,
    )  # fmt: skip
    blocks = build_blocks(rows.tokens, rows.loss_mask, rows.documents, rows.positions, anchors, config.drafter)
    states = target.states(rows.tokens, rows.documents, rows.positions)
    vocabulary = target.vocabulary()
    masks = drafter.masks(anchors, rows.documents)
    hidden = drafter(vocabulary.embed(blocks.ids), drafter.fuse(states.taps), blocks.positions, rows.positions, masks)
    length = rows.tokens.shape[1]
    index = blocks.teacher_positions + length * torch.arange(len(rows.tokens)).view(-1, 1, 1)
    slots = draft_slots(hidden, blocks, config.drafter)
    teacher = states.final.flatten(0, 1)
    return block_loss(slots, blocks.labels, blocks.supervised, vocabulary, config.loss, teacher, index)


def train(
    config: RunConfig, folder: Path, num_steps: int, temperature: float = 0.5
) -> tuple[list[float], Drafter, Target, PackedDocuments]:
    target = load_target(config.target, config.drafter.taps)
    target.check(config.drafter)
    make_tiny_data(target, folder, num_documents=24, answer_tokens=48, temperature=temperature)
    documents = PackedDocuments(Documents(folder), config.data.row_length)
    sampler = RowSampler(len(documents), config.data.rows_per_batch, config.data.seed)
    torch.manual_seed(0)
    drafter = Drafter(config.drafter)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-3)
    losses = []
    for step in range(num_steps):
        sums = step_loss(drafter, target, documents.batch(sampler.rows(step)), config, step)
        optimizer.zero_grad()
        sums.mean().backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        losses.append(sums.mean().item())
    return losses, drafter, target, documents


@pytest.mark.parametrize(
    ("settings", "floor"),
    [(["loss.ce=1"], 0.9), (["loss.ce=0.3", "loss.lk=1", "loss.cap=0.1", "loss.weighting=dpace"], 0.8)],
)
def test_a_drafter_learns_its_tiny_target_by_heart(settings: list[str], floor: float, tmp_path: Path) -> None:
    """SpecForge #455, #469: what is learnt must show at anchors that training did not draw."""
    config = load_config("tiny-cpu", settings)
    losses, drafter, target, documents = train(config, tmp_path / "data", 300)
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    with torch.no_grad():
        fresh = step_loss(drafter, target, documents.batch(range(len(documents))), config, step=10**6)
    accuracy = float(fresh.correct / fresh.supervised)
    untrained = step_loss(Drafter(config.drafter), target, documents.batch(range(len(documents))), config, step=10**6)
    print(f"\n  accuracy {accuracy:.3f}, untrained {float(untrained.correct / untrained.supervised):.3f}")
    assert accuracy > floor
    assert float(untrained.correct / untrained.supervised) < 0.1
    assert float(fresh.accepted / fresh.blocks) > 2.2


def test_the_teacher_at_a_label_is_the_distribution_that_wrote_it(tmp_path: Path) -> None:
    """TorchSpec #87: in greedy text, the argmax of the target's state before each label is that label."""
    config = load_config("tiny-cpu")
    target = load_target(config.target, config.drafter.taps)
    make_tiny_data(target, tmp_path / "data", num_documents=12, answer_tokens=30, temperature=0.0)
    documents = PackedDocuments(Documents(tmp_path / "data"), config.data.row_length)
    rows = documents.batch(range(len(documents)))
    anchors = draw_anchors(
        rows.loss_mask, rows.documents, rows.document_numbers, per_document=99, per_row=400, seed=0, step=0
    )
    blocks = build_blocks(rows.tokens, rows.loss_mask, rows.documents, rows.positions, anchors, config.drafter)
    states = target.states(rows.tokens, rows.documents, rows.positions)
    index = blocks.teacher_positions.flatten(1)[..., None].expand(-1, -1, states.final.shape[-1])
    logits = target.vocabulary().logits(states.final.gather(1, index))
    logits[..., list(ByteTokenizer.suppressed_ids)] = -torch.inf
    # The prompt's tokens are unsupervised, and an answer that was cut by its length ends without the target's choosing
    # so.
    counted = blocks.supervised & (blocks.labels != ByteTokenizer.END)
    agree = (logits.argmax(-1).view_as(blocks.labels) == blocks.labels)[counted]
    assert len(agree) > 500
    assert agree.all()


@pytest.mark.parity
def test_what_training_reports_is_what_z_labs_decoding_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SpecForge #455, #533: a drafter that knows its text by heart, exported and run by `dflash` on the real loop."""
    zlab = pytest.importorskip("dflash.model", reason="dflash is not installed")
    monkeypatch.setattr(zlab, "_cuda_time", time.perf_counter)
    config = load_config("tiny-cpu", ["data.row_length=96"])
    _, drafter, target, documents = train(config, tmp_path / "data", 500, temperature=0.0)
    with torch.no_grad():
        sums = step_loss(drafter, target, documents.batch(range(len(documents))), config, step=10**6)
    reported = float(sums.accepted / sums.blocks)
    save_drafter(tmp_path / "run", drafter.state_dict(), config)
    export_run(tmp_path / "run", tmp_path / "out", format="z-lab", dtype="float32")
    model = zlab.DFlashDraftModel.from_pretrained(tmp_path / "out", attn_implementation="sdpa", dtype=torch.float32)
    accepted: list[int] = []
    for number in range(8):
        document = Documents(tmp_path / "data")[number]
        prompt = torch.from_numpy(document.tokens[~document.supervised].astype("int64"))[None]
        run = zlab.dflash_generate(
            model,
            target=target.model,
            input_ids=prompt,
            max_new_tokens=30,
            stop_token_ids=[ByteTokenizer.END],
            return_stats=True,
        )
        written = run.output_ids[0].tolist()
        assert written == document.tokens[: len(written)].tolist()
        # The last block is cut short by the end of the text.
        accepted += [n - 1 for n in run.acceptance_lengths[:-1]]
    decoded = sum(accepted) / len(accepted)
    print(f"\n  accepted drafts a block: {reported:.2f} reported in training, {decoded:.2f} by dflash, of 3")
    assert decoded > 2.0
    assert abs(decoded - reported) < 0.5


def test_two_runs_of_the_same_seed_are_equal_bit_for_bit(tmp_path: Path) -> None:
    config = load_config("tiny-cpu")
    first, second = (train(config, tmp_path / name, 5)[0] for name in "ab")
    assert first == second
