from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dflash_train.anchors import Anchors
from dflash_train.blocks import Blocks, build_blocks
from dflash_train.config import DrafterConfig
from dflash_train.drafter import Drafter
from dflash_train.vocabulary import Vocabulary

VOCAB = 97


def tiny_config(**changes: object) -> DrafterConfig:
    settings: dict[str, object] = {
        "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": VOCAB, "block_size": 4, "mask_token_id": VOCAB - 1, "num_target_layers": 8, "num_taps": 2,
        "rope_theta": 1e4,
    }  # fmt: skip
    return DrafterConfig(**{**settings, **changes})  # type: ignore[arg-type]


def tiny_drafter(config: DrafterConfig, seed: int = 0) -> Drafter:
    torch.manual_seed(seed)
    drafter = Drafter(config)
    for (
        parameter
    ) in drafter.parameters():  # larger than at the start of training, so that attention is far from uniform
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return drafter


def tiny_vocabulary(config: DrafterConfig, seed: int = 1) -> Vocabulary:
    generator = torch.Generator().manual_seed(seed)
    shape = (config.vocab_size, config.hidden_size)
    return Vocabulary(
        embedding=torch.randn(shape, generator=generator), head=torch.randn(shape, generator=generator) * 0.3
    )


@dataclass(kw_only=True)
class Rows:
    """A packed batch with random contents."""

    tokens: Tensor
    loss_mask: Tensor
    documents: Tensor
    positions: Tensor
    taps: Tensor
    final: Tensor

    def blocks(self, anchors: Anchors, config: DrafterConfig) -> Blocks:
        return build_blocks(self.tokens, self.loss_mask, self.documents, self.positions, anchors, config)


def make_rows(lengths: Sequence[Sequence[int]], row_length: int, config: DrafterConfig, seed: int = 2) -> Rows:
    """One row per list of document lengths; what remains of a row is padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), row_length)
    documents = torch.full(shape, -1)
    positions = torch.zeros(shape, dtype=torch.int64)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for index, length in enumerate(row_lengths):
            documents[row, start : start + length] = index
            positions[row, start : start + length] = torch.arange(length)
            start += length
        assert start <= row_length
    width = config.hidden_size
    return Rows(
        tokens=torch.randint(0, config.vocab_size - 1, shape, generator=generator),
        loss_mask=(torch.rand(shape, generator=generator) < 0.8) & (documents >= 0),
        documents=documents,
        positions=positions,
        taps=torch.randn(*shape, len(config.taps) * width, generator=generator),
        final=torch.randn(*shape, width, generator=generator),
    )


def make_anchors(positions: Sequence[Sequence[int]], num_blocks: int) -> Anchors:
    padded = torch.zeros(len(positions), num_blocks, dtype=torch.int64)
    valid = torch.zeros(len(positions), num_blocks, dtype=torch.bool)
    for row, anchors in enumerate(positions):
        padded[row, : len(anchors)] = torch.tensor(anchors, dtype=torch.int64)
        valid[row, : len(anchors)] = True
    return Anchors(positions=padded, valid=valid, num_empty_documents=0, num_over_budget=0)


def hidden_states(drafter: Drafter, vocabulary: Vocabulary, rows: Rows, anchors: Anchors) -> Tensor:
    """[R, T, H] of a packed, masked forward."""
    blocks = rows.blocks(anchors, drafter.config)
    masks = drafter.masks(anchors, rows.documents)
    context = drafter.fuse(rows.taps)
    out: Tensor = drafter(vocabulary.embed(blocks.ids), context, blocks.positions, rows.positions, masks)
    return out


def write_lines(path: Path, *records: object) -> Path:
    path.write_bytes(b"".join(r if isinstance(r, bytes) else json.dumps(r).encode() + b"\n" for r in records))
    return path


def _transformers() -> Any:
    return pytest.importorskip("transformers")


SIZES = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def qwen3() -> nn.Module:
    return _transformers().Qwen3ForCausalLM(
        _transformers().Qwen3Config(**SIZES, head_dim=8, num_hidden_layers=6, use_sliding_window=False)
    )


def gemma3() -> nn.Module:
    """Sliding window of 4 in five of six layers; scaled embedding, tied head."""
    config = _transformers().Gemma3TextConfig(**SIZES, head_dim=8, num_hidden_layers=6, sliding_window=4)
    return _transformers().Gemma3ForCausalLM(config)


def qwen36(num_layers: int = 64) -> nn.Module:
    """Layers of a Qwen3.6 27B (three GatedDeltaNet, one full, and so on), narrow."""
    if not hasattr(_transformers(), "Qwen3_5TextConfig"):
        pytest.skip("this version of transformers has no Qwen3.5")
    config = _transformers().Qwen3_5TextConfig(
        **SIZES, head_dim=16, num_hidden_layers=num_layers,
        linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    )  # fmt: skip
    return _transformers().Qwen3_5ForCausalLM(config)


def spread(model: nn.Module) -> nn.Module:
    """Random weights large enough for context to matter."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data.add_(torch.randn(parameter.shape, generator=generator) * (0.05 if "norm" in name else 0.2))
    return model.eval()
