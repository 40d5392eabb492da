"""What a block token may see, as ranges of keys, and the masks of each attention backend made from them.

Keys are [S context | N·B block tokens]. With documents contiguous in a row, everything that a query sees is one range
of the context and one range inside its own block, for full attention and for every sliding rule; so a mask is four
numbers per query.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from dflash_train.config import SlidingRule

FLEX_TILE = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class KeyRanges:
    """Keys visible to each of T = N·B queries of R rows, as two half-open ranges."""

    context_start: Tensor
    """[R, T] int64."""
    context_end: Tensor
    """[R, T] int64; equal to the start or less: no context."""
    block_start: Tensor
    """[R, T] int64, from S on."""
    block_end: Tensor
    """[R, T] int64."""
    num_keys: int
    """S + N·B."""


def visible_keys(
    anchors: Tensor,
    valid: Tensor,
    documents: Tensor,
    block_size: int,
    *,
    sliding_window: int | None = None,
    sliding_rule: SlidingRule = "specforge",
) -> KeyRanges:
    """The rule: context p is visible iff the block is valid, p is in the anchor's document and p < a; a block token is
    visible iff it is in the same block. Sliding layers see less, by `sliding_rule` (`DrafterConfig.sliding_rule` has
    the formulas).

    A block that is not valid sees itself only, so that no softmax row is empty; it carries no loss.

    Args:
        anchors: [R, N] int64 positions in the row.
        valid: [R, N] bool.
        documents: [R, S] int64, contiguous per document, -1 for padding.
        block_size: B.
        sliding_window: W in tokens; None for full attention.
        sliding_rule: whose reading of W.
    """
    length = documents.shape[1]
    num_blocks = anchors.shape[1]
    offsets = torch.arange(block_size, device=anchors.device)
    owner = documents.gather(1, anchors)
    # Documents stand in ascending order with padding (-1) last, hence the first position of each is a sorted search.
    ascending = torch.where(documents < 0, torch.iinfo(torch.int64).max, documents).contiguous()
    document_start = torch.searchsorted(ascending, owner.contiguous())
    start = document_start.unsqueeze(-1).expand(-1, -1, block_size)
    end = torch.where(valid, anchors, document_start).unsqueeze(-1).expand(-1, -1, block_size)
    first = length + block_size * torch.arange(num_blocks, device=anchors.device).view(1, -1, 1).expand_as(start)
    last = first + block_size
    if sliding_window is not None:
        anchor = anchors.unsqueeze(-1)
        from_query = sliding_rule in ("specforge", "modelopt")
        oldest = anchor + offsets - (sliding_window - 1) if from_query else anchor - sliding_window
        start = torch.maximum(start, oldest.expand_as(start))
        if sliding_rule in ("specforge", "speculators"):
            last = first + offsets + 1
    return KeyRanges(
        context_start=start.flatten(1),
        context_end=end.flatten(1),
        block_start=first.flatten(1),
        block_end=last.flatten(1),
        num_keys=length + num_blocks * block_size,
    )


def dense_mask(ranges: KeyRanges) -> Tensor:
    """[R, 1, T, S + T] bool, True where visible: for SDPA and the eager reference."""
    key = torch.arange(ranges.num_keys, device=ranges.context_start.device)
    in_context = (key >= ranges.context_start[..., None]) & (key < ranges.context_end[..., None])
    in_block = (key >= ranges.block_start[..., None]) & (key < ranges.block_end[..., None])
    return (in_context | in_block).unsqueeze(1)


def flex_mask(ranges: KeyRanges) -> BlockMask:
    """The same mask for flex_attention.

    Which tiles of 128 by 128 are empty, partial or full follows from the ranges, without the [T, S+T] grid that
    `create_block_mask` fills. A tile is called full only if one range covers it for all its queries; any other is
    partial, where `mask_mod` decides, so this can cost time but never a wrong value.
    """
    context_start, context_end = ranges.context_start, ranges.context_end
    block_start, block_end = ranges.block_start, ranges.block_end
    num_queries = context_start.shape[1]

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (key >= context_start[row, query]) & (key < context_end[row, query])
        in_block = (key >= block_start[row, query]) & (key < block_end[row, query])
        return in_context | in_block

    tile_start = torch.arange(0, ranges.num_keys, FLEX_TILE, device=context_start.device)
    tile_end = tile_start + FLEX_TILE
    touched = torch.zeros((), dtype=torch.bool, device=context_start.device)
    covered = touched
    for start, end in ((context_start, context_end), (block_start, block_end)):
        start, end = start[..., None], end[..., None]
        touched = touched | ((start < tile_end) & (end > tile_start) & (start < end))
        covered = covered | ((start <= tile_start) & (end >= tile_end))
    padding = -num_queries % FLEX_TILE
    touched = torch.nn.functional.pad(touched, (0, 0, 0, padding), value=False)
    covered = torch.nn.functional.pad(covered, (0, 0, 0, padding), value=True)
    per_tile = (touched.shape[0], -1, FLEX_TILE, touched.shape[-1])
    full = covered.view(per_tile).all(2)
    partial = touched.view(per_tile).any(2) & ~full
    return BlockMask.from_kv_blocks(
        *_as_lists(partial),
        *_as_lists(full),
        BLOCK_SIZE=FLEX_TILE,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, ranges.num_keys),
    )


def _as_lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """[R, q tiles, kv tiles] bool to flex's (count [R, 1, q tiles], indices [R, 1, q tiles, kv tiles], set ones
    first)."""
    count = tiles.sum(-1, dtype=torch.int32)
    indices = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count.unsqueeze(1), indices.unsqueeze(1)
