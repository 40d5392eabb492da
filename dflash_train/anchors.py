"""Where blocks start: anchors per document, redrawn each step from a counter, the same for any number of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """Anchors of a batch of packed rows (R rows, N blocks each, always N)."""

    positions: Tensor
    """[R, N] int64, positions in the row, ascending; 0 where invalid. Invalid blocks stand last."""
    valid: Tensor
    """[R, N] bool."""
    num_empty_documents: int
    """Documents without an admissible anchor: skipped."""
    num_over_budget: int
    """Anchors drawn but left out, since the row had more than N."""


def admissible_anchors(loss_mask: np.ndarray) -> np.ndarray:
    """Positions a of one document at which a block may start: tokens a and a+1 are both supervised (SpecForge's rule).

    The tail is allowed: slots past the document's end simply carry no loss. `loss_mask` is [length] bool.
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def anchor_keys(seed: int, step: int, document: int, length: int) -> np.ndarray:
    """One random uint64 per token of a document, a pure function of (seed, step, document).

    Philox counter-based bits (Salmon et al., SC'11): no state to save, and nothing that depends on which replica, row
    or batch the document is in.
    """
    return np.random.Philox(key=seed, counter=[0, document, step, 0]).random_raw(length)


def draw_anchors(
    loss_mask: Tensor,
    documents: Tensor,
    document_numbers: Sequence[Sequence[int]],
    *,
    per_document: int,
    per_row: int,
    seed: int,
    step: int,
) -> Anchors:
    """Draw anchors uniformly without replacement in every document of every row.

    A document keeps its `per_document` admissible positions of smallest key; a row with more than `per_row` of them
    keeps the smallest keys again, so every position has the same chance and long documents get more blocks than short
    ones.

    Args:
        loss_mask: [R, S] bool on the CPU, whether a token is supervised.
        documents: [R, S] int64 on the CPU, index of the document within its row, ascending, -1 for padding.
        document_numbers: per row, the data set's number of each document: what the draw depends on.
        per_document: most anchors of one document.
        per_row: N, blocks per row in the result.
        seed: of the run; 0 … 2**63-1.
        step: redraws; the same step gives the same draw.
    """
    num_rows = loss_mask.shape[0]
    positions = np.zeros((num_rows, per_row), np.int64)
    valid = np.zeros((num_rows, per_row), np.bool_)
    empty = over = 0
    for row, numbers in enumerate(document_numbers):
        mask, owner = loss_mask[row].numpy(), documents[row].numpy()
        drawn, drawn_keys = [np.empty(0, np.int64)], [np.empty(0, np.uint64)]
        for index, number in enumerate(numbers):
            start, end = np.searchsorted(np.where(owner < 0, len(numbers), owner), [index, index + 1])
            candidates = admissible_anchors(mask[start:end])
            empty += not len(candidates)
            keys = anchor_keys(seed, step, number, int(end - start))[candidates]
            chosen = np.argsort(keys, kind="stable")[:per_document]
            drawn.append(candidates[chosen] + start)
            drawn_keys.append(keys[chosen])
        anchors, keys = np.concatenate(drawn), np.concatenate(drawn_keys)
        over += max(0, len(anchors) - per_row)
        kept = np.sort(anchors[np.argsort(keys, kind="stable")[:per_row]])
        positions[row, : len(kept)] = kept
        valid[row, : len(kept)] = True
    return Anchors(
        positions=torch.from_numpy(positions),
        valid=torch.from_numpy(valid),
        num_empty_documents=empty,
        num_over_budget=over,
    )
