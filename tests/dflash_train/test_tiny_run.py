"""A few hundred steps of the whole chain on the CPU: tiny target, its data, packing, anchors, drafter, loss."""

from pathlib import Path

import pytest
import torch

from dflash_train.anchors import draw_anchors
from dflash_train.blocks import build_blocks
from dflash_train.config import RunConfig
from dflash_train.config_files import load_config
from dflash_train.data import Documents
from dflash_train.drafter import Drafter, draft_slots
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


def train(config: RunConfig, folder: Path, num_steps: int) -> tuple[list[float], Drafter, Target, PackedDocuments]:
    target = load_target(config.target, config.drafter.taps)
    target.check(config.drafter)
    make_tiny_data(target, folder, num_documents=24, answer_tokens=48)
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


def test_two_runs_of_the_same_seed_are_equal_bit_for_bit(tmp_path: Path) -> None:
    config = load_config("tiny-cpu")
    first, second = (train(config, tmp_path / name, 5)[0] for name in "ab")
    assert first == second
