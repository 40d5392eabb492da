"""What a batch of blocks is: its tokens, positions, labels and which of them count.

Slot k of the block at anchor a stands at position a+k. Slot 0 holds the clean token x_a, the others the mask token;
slot k predicts x_{a+k} (x_{a+1+k} with `sample_from_anchor`). The target's state that predicts label position l is at
l-1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash_train.anchors import Anchors
from dflash_train.config import DrafterConfig


@dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Blocks of R packed rows: N blocks of B slots, T = N·B; P slots per block predict (B-1, or B from the anchor)."""

    ids: Tensor
    """[R, T] int64, drafter input."""
    positions: Tensor
    """[R, T] int64, RoPE positions, counted within the document."""
    labels: Tensor
    """[R, N, P] int64, token to predict; 0 where not supervised."""
    label_positions: Tensor
    """[R, N, P] int64, where in the row the label stands, clamped into it."""
    supervised: Tensor
    """[R, N, P] bool: block valid, label in the same document and supervised."""

    @property
    def teacher_positions(self) -> Tensor:
        """[R, N, P] int64, positions of the target's states that predict the labels."""
        return (self.label_positions - 1).clamp(min=0)


def build_blocks(
    tokens: Tensor, loss_mask: Tensor, documents: Tensor, positions: Tensor, anchors: Anchors, config: DrafterConfig
) -> Blocks:
    """Lay out the blocks of a batch.

    Args:
        tokens: [R, S] int64.
        loss_mask: [R, S] bool.
        documents: [R, S] int64, -1 for padding.
        positions: [R, S] int64, position of each token in its document.
        anchors: of the same rows.
        config: block size, mask token and label rule.
    """
    length = tokens.shape[1]
    size = config.block_size
    anchor = anchors.positions.unsqueeze(-1)
    valid = anchors.valid.unsqueeze(-1)
    slots = torch.arange(size, device=tokens.device)

    def gather(source: Tensor, index: Tensor) -> Tensor:
        return source.gather(1, index.flatten(1)).view(index.shape)

    ids = torch.full((*anchors.positions.shape, size), config.mask_token_id, dtype=torch.int64, device=tokens.device)
    ids[..., :1] = torch.where(valid, gather(tokens, anchor), config.mask_token_id)
    # With and without `sample_from_anchor` the first label is a+1; what differs is the slot that predicts it.
    wanted = anchor + 1 + torch.arange(config.num_draft_tokens, device=tokens.device)
    inside = wanted.clamp(max=length - 1)
    same_document = (wanted < length) & (gather(documents, inside) == gather(documents, anchor))
    supervised = valid & same_document & gather(loss_mask, inside)
    return Blocks(
        ids=ids.flatten(1),
        positions=(gather(positions, anchor) + slots).flatten(1),
        labels=torch.where(supervised, gather(tokens, inside), 0),
        label_positions=inside,
        supervised=supervised,
    )
