"""DDTree (arXiv 2604.12989): the M most probable prefixes of a drafted block, as a tree that one target pass verifies.

A drafter gives one distribution per position, so a prefix u has probability Q(u) = Π q_i(u_i), and a prefix-closed tree
is expected to have Σ_{u in tree} Q(u) of its drafts accepted: the best tree of M nodes is the M most probable prefixes.

Everything here is tensor arithmetic of fixed shapes on the device of the logits: nothing is read back. The tree itself is
made level by level on the CPU, and by two Triton kernels (`kernels/tree.py`) on a CUDA device; node for node the same.

Legend of shapes: R rows, D positions drafted, V vocabulary, M drafted nodes, L = M+1 nodes with the root.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Tree:
    """Candidates of R rows. Node 0 is the root (the last token that is certain); a parent stands before its children."""

    tokens: Tensor
    """[R, L] int64."""
    parents: Tensor
    """[R, L] int64, index of the parent; the root is its own."""
    depths: Tensor
    """[R, L] int64, 0 for the root: a node's position is the root's plus its depth."""
    ancestors: Tensor
    """[R, L, L] bool: [r, i, j] whether j is i or an ancestor of i, which is what i may attend to."""
    log_probs: Tensor
    """[R, L] fp32, log Q of the node's prefix; 0 for the root. What drafts were not drawn from has NaN."""
    max_depth: int
    """D."""

    def expected_accepted(self) -> Tensor:
        """[R] fp32: drafts that would be accepted on average if Q were the target's distribution."""
        return self.log_probs[:, 1:].exp().sum(-1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Walk:
    """The path through a tree that the target agrees with."""

    path: Tensor
    """[R, min(D+1, L)] int64, nodes from the root down; what follows the accepted ones is filler."""
    accepted: Tensor
    """[R] int64, accepted nodes with the root: accepted drafts + 1."""
    next_tokens: Tensor
    """[R] int64, the target's own token after the last accepted node: the next root."""


def build_tree(roots: Tensor, logits: Tensor, num_nodes: int, *, ranks: int | None = None) -> Tree:
    """The `num_nodes` most probable prefixes of the block that follows each root.

    Ties go to the shorter prefix, then to the one whose parent, then whose token stands first; so a parent is always in
    the tree with its child. The result is that of a best-first search over all V^D prefixes: at one depth, a prefix with
    the i-th best parent and the j-th best token has (i+1)(j+1)-1 others before it, so only pairs with (i+1)(j+1) <= M
    are looked at: M ln M of them.

    Args:
        roots: [R] int64.
        logits: [R, D, V] of the drafter, any float type; the probabilities are fp32.
        num_nodes: M, drafted nodes wanted. Fewer come if there are fewer prefixes.
        ranks: consider the best `ranks` tokens of each position only. 1 with M = D is the chain.

    Raises:
        ValueError: `num_nodes` or `ranks` is below 1.
    """
    if num_nodes < 1:
        raise ValueError(f"a tree needs at least 1 drafted node, got num_nodes={num_nodes}")
    if ranks is not None and ranks < 1:
        raise ValueError(f"ranks must be at least 1 (the most probable token), got {ranks}")
    vocab = min(logits.shape[2], ranks or logits.shape[2])
    width, max_depth = min(num_nodes, vocab), logits.shape[1]
    num_nodes = min(num_nodes, sum(vocab**depth for depth in range(1, max_depth + 1)))
    # Ranks by the raw logits: two that are equal after rounding stay in their order. The probabilities at one position are
    # one kernel; rounding must not lift one above 1, or a child would stand before its parent.
    best_tokens = logits.topk(width, dim=-1).indices
    best_log = logits.log_softmax(-1, dtype=torch.float32).gather(-1, best_tokens).clamp_(max=0.0)
    kernel = _tree_kernel() if logits.is_cuda else None
    if kernel is not None and kernel.fits(num_nodes, max_depth):
        tree: Tree = kernel.grow_tree(roots, best_log, best_tokens, num_nodes)
        return tree
    return grow_tree(roots, best_log, best_tokens, num_nodes)


def grow_tree(roots: Tensor, best_log: Tensor, best_tokens: Tensor, num_nodes: int) -> Tree:
    """`build_tree` from the best tokens of each position, level by level; that many prefixes must exist.

    Args:
        roots: [R] int64.
        best_log: [R, D, W] fp32 log-probabilities in descending order.
        best_tokens: [R, D, W] int64, the tokens that they belong to.
        num_nodes: M.
    """
    rows, max_depth, width = best_log.shape
    device = best_log.device
    scores = best_log[:, 0]
    level_scores, level_tokens, level_parents = [scores], [best_tokens[:, 0]], [torch.zeros_like(best_tokens[:, 0])]
    offset = 1  # of the previous level in the list of all kept prefixes, the root being number 0
    for depth in range(1, max_depth):
        parent, rank = _pairs(scores.shape[1], width, num_nodes, device)
        candidates = scores[:, parent] + best_log[:, depth, rank]
        order = candidates.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes]
        level_parents.append(offset + parent[order])
        level_tokens.append(best_tokens[:, depth].gather(1, rank[order]))
        offset += scores.shape[1]
        scores = candidates.gather(1, order)
        level_scores.append(scores)

    # Levels stand in ascending depth, and the sort is stable: a child that ties with its parent comes after it.
    every_score = torch.cat(level_scores, dim=1)
    depths = torch.cat([torch.full_like(tokens[0], d) for d, tokens in enumerate(level_tokens, 1)])
    kept = every_score.sort(dim=-1, descending=True, stable=True).indices[:, :num_nodes]
    node_of = torch.zeros(rows, every_score.shape[1] + 1, dtype=torch.int64, device=device)
    node_of.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=device).expand_as(kept))
    root = torch.zeros_like(roots).unsqueeze(1)
    parents = torch.cat([root, node_of.gather(1, torch.cat(level_parents, dim=1).gather(1, kept))], dim=1)
    return Tree(
        tokens=torch.cat([roots.unsqueeze(1), torch.cat(level_tokens, dim=1).gather(1, kept)], dim=1),
        parents=parents,
        depths=torch.cat([root, depths[kept]], dim=1),
        ancestors=ancestor_mask(parents, max_depth),
        log_probs=torch.cat([root.float(), every_score.gather(1, kept)], dim=1),
        max_depth=max_depth,
    )


def chain_tree(roots: Tensor, drafts: Tensor) -> Tree:
    """The tree of one path: `drafts` [R, D] int64 (D may be 0) one after another behind `roots` [R] int64."""
    rows, max_depth = drafts.shape
    nodes = torch.arange(max_depth + 1, device=drafts.device)
    return Tree(
        tokens=torch.cat([roots.unsqueeze(1), drafts], dim=1),
        parents=(nodes - 1).clamp(min=0).expand(rows, -1),
        depths=nodes.expand(rows, -1),
        ancestors=(nodes <= nodes.unsqueeze(1)).expand(rows, -1, -1),
        log_probs=torch.full((rows, max_depth + 1), torch.nan, device=drafts.device),
        max_depth=max_depth,
    )


def ancestor_mask(parents: Tensor, max_depth: int) -> Tensor:
    """[R, L] parents (the root its own) to [R, L, L] bool as in `Tree.ancestors`."""
    rows, length = parents.shape
    current = torch.arange(length, device=parents.device).expand(rows, -1)
    mask = torch.zeros(rows, length, length, dtype=torch.bool, device=parents.device)
    for _ in range(max_depth + 1):
        mask.scatter_(2, current.unsqueeze(2), True)
        current = parents.gather(1, current)
    return mask


def walk_tree(tree: Tree, posterior: Tensor) -> Walk:
    """Follow the target's tokens down the tree.

    Lossless: what comes out is the target's own token at every step; the tree only decides how many of them are known
    after one pass. Children of one node have different tokens, so at most one path agrees.

    Args:
        tree: as verified.
        posterior: [R, L] int64, the target's token (argmax or sample) after each node.
    """
    agrees = tree.tokens == posterior.gather(1, tree.parents)
    agrees[:, 0] = True
    on_path = (agrees.unsqueeze(1) | ~tree.ancestors).all(-1)
    accepted = on_path.sum(-1)
    length = tree.tokens.shape[1]
    nodes = torch.arange(length, device=posterior.device)
    # Along a path the nodes' numbers ascend; filler is the last node, whose place is in range.
    path = torch.where(on_path, nodes, length).sort(dim=-1).values[:, : tree.max_depth + 1].clamp(max=length - 1)
    last = path.gather(1, accepted.unsqueeze(1) - 1)
    return Walk(path=path, accepted=accepted, next_tokens=posterior.gather(1, last).squeeze(1))


@functools.cache
def _tree_kernel() -> Any:
    """The module of kernels, or None where there is no Triton."""
    try:
        return importlib.import_module("dflash_train.kernels.tree")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "triton":
            raise
        return None


@functools.lru_cache(maxsize=64)
def _pairs(num_parents: int, width: int, num_nodes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(rank of the parent, rank of the token) of every child that can be among the best `num_nodes` of its depth, in
    the order that decides ties; made once per shape, so that the loop copies nothing to the device."""
    parents: list[int] = []
    ranks: list[int] = []
    for parent in range(min(num_parents, num_nodes)):
        count = min(width, num_nodes // (parent + 1))
        parents += [parent] * count
        ranks += range(count)
    return torch.tensor(parents, device=device), torch.tensor(ranks, device=device)
