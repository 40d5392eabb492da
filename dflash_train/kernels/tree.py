"""The tree of `ddtree.py` on a CUDA device: a best-first search in one program for each row, and its masks in a second launch.

The search is sequential by nature, but small: the frontier has at most one prefix for each node, so one warp keeps it in
registers and a node costs two reductions and two loads. Level by level, as on the CPU, the same tree is a hundred launches.

Legend of shapes: R rows, D positions drafted, W tokens looked at in each position, M drafted nodes, L = M+1.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_train.ddtree import Tree

MAX_NODES, MAX_DEPTH = 4096, 62
"""What fits the bits of a key: 6 for the depth, 13 each for the parent and for the rank of the token."""


def fits(num_nodes: int, max_depth: int) -> bool:
    """Whether a tree of this size can be made here."""
    return num_nodes <= MAX_NODES and max_depth <= MAX_DEPTH


def grow_tree(roots: Tensor, best_log: Tensor, best_tokens: Tensor, num_nodes: int) -> Tree:
    """`ddtree.grow_tree` in two launches.

    Args:
        roots: [R] int64.
        best_log: [R, D, W] fp32, 0 or less, in descending order.
        best_tokens: [R, D, W] int64, the tokens that they belong to.
        num_nodes: M, of which `fits` is true; that many prefixes must exist.
    """
    rows, max_depth, width = best_log.shape
    length = num_nodes + 1
    device = roots.device
    parents, depths, tokens = torch.zeros(3, rows, length, dtype=torch.int64, device=device).unbind(0)
    ranks = torch.zeros(rows, length, dtype=torch.int32, device=device)
    log_probs = torch.zeros(rows, length, dtype=torch.float32, device=device)
    ancestors = torch.empty(rows, length, length, dtype=torch.bool, device=device)
    search: Any = _search
    describe: Any = _describe
    block = 4
    # Triton launches on the current device. (Without a GPU, in Triton's interpreter, there is none to choose.)
    with torch.cuda.device_of(best_log):  # type: ignore[no-untyped-call]
        search[(rows,)](
            best_log.contiguous(), parents, depths, ranks, log_probs, NODES=num_nodes, DEPTH=max_depth, WIDTH=width,
            SLOTS=triton.next_power_of_2(num_nodes), num_warps=1 if num_nodes <= 1024 else 4,
        )  # fmt: skip
        describe[(rows, triton.cdiv(length, block))](
            roots.contiguous(), best_tokens.contiguous(), parents, depths, ranks, tokens, ancestors.view(torch.uint8),
            LENGTH=length, DEPTH=max_depth, WIDTH=width, BLOCK=block, COLUMNS=triton.next_power_of_2(length),
        )  # fmt: skip
    return Tree(
        tokens=tokens, parents=parents, depths=depths, ancestors=ancestors, log_probs=log_probs, max_depth=max_depth
    )


@triton.jit
def _key(score, depth, parent, rank):
    """One int64 in which a prefix that stands before another is larger: by its score (0 or less, so the bits of its size
    grow as it falls), then by depth, parent and rank. No two prefixes have the same."""
    size = (score.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64)
    place = (depth << 26) | (parent << 13) | rank
    return ((0x7FFFFFFF - size) << 32) | (0xFFFFFFFF - place)


@triton.jit
def _search(
    log_ptr, parents_ptr, depths_ptr, ranks_ptr, scores_ptr,
    NODES: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Pop the first prefix of the frontier; push its sibling of the next rank in its slot, and its first child in a new one.

    Whatever is pushed stands behind what was popped, ties included: so prefixes are popped in their order.
    """
    row = tl.program_id(0).to(tl.int64)
    log_ptr += row * DEPTH * WIDTH
    node_0 = row * (NODES + 1)
    slot = tl.arange(0, SLOTS)
    zero = tl.zeros([], tl.int64)
    keys = tl.where(slot == 0, _key(tl.load(log_ptr), zero + 1, zero, zero), zero - 1)
    # Score of the parent of the prefix in each slot: a sibling's is that plus its own token's.
    parent_scores = tl.zeros([SLOTS], tl.float32)
    for node in range(1, NODES + 1):
        best = tl.max(keys, 0)
        chosen = keys == best
        parent_score = tl.sum(tl.where(chosen, parent_scores, 0.0), 0)
        place = 0xFFFFFFFF - (best & 0xFFFFFFFF)
        depth, parent, rank = place >> 26, (place >> 13) & 8191, place & 8191
        score = -((0x7FFFFFFF - (best >> 32)).to(tl.int32).to(tl.float32, bitcast=True))
        tl.store(parents_ptr + node_0 + node, parent)
        tl.store(depths_ptr + node_0 + node, depth)
        tl.store(ranks_ptr + node_0 + node, rank.to(tl.int32))
        tl.store(scores_ptr + node_0 + node, score)
        has_sibling, has_child = rank + 1 < WIDTH, depth < DEPTH
        sibling = parent_score + tl.load(log_ptr + (depth - 1) * WIDTH + rank + 1, mask=has_sibling, other=0.0)
        child = score + tl.load(log_ptr + depth * WIDTH, mask=has_child, other=0.0)
        keys = tl.where(chosen, tl.where(has_sibling, _key(sibling, depth, parent, rank + 1), zero - 1), keys)
        keys = tl.where(slot == node, tl.where(has_child, _key(child, depth + 1, zero + node, zero), zero - 1), keys)
        parent_scores = tl.where(slot == node, score, parent_scores)


@triton.jit
def _describe(
    roots_ptr, best_tokens_ptr, parents_ptr, depths_ptr, ranks_ptr, tokens_ptr, ancestors_ptr,
    LENGTH: tl.constexpr, DEPTH: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Token and ancestors of each node."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = node < LENGTH
    first = row * LENGTH
    depth = tl.load(depths_ptr + first + node, mask=exists, other=0)
    rank = tl.load(ranks_ptr + first + node, mask=exists, other=0)
    drafted = exists & (node > 0)
    token = tl.load(best_tokens_ptr + (row * DEPTH + depth - 1) * WIDTH + rank, mask=drafted, other=0)
    tl.store(tokens_ptr + first + node, tl.where(node > 0, token, tl.load(roots_ptr + row)), mask=exists)
    column = tl.arange(0, COLUMNS)
    current = node.to(tl.int64)
    seen = current[:, None] == column[None, :]
    for _ in range(DEPTH):
        current = tl.load(parents_ptr + first + current, mask=exists, other=0)
        seen = seen | (current[:, None] == column[None, :])
    places = ancestors_ptr + (first + node)[:, None] * LENGTH + column[None, :]
    tl.store(places, seen.to(tl.uint8), mask=exists[:, None] & (column < LENGTH)[None, :])
