"""The kernels that make the tree, against the tree that plain torch makes: node for node the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import DEVICE, hold_in_the_interpreter, kernel_runs
from torch import Tensor

from dflash_train.ddtree import Tree, grow_tree


def test_the_tests_below_hold_in_the_interpreter() -> None:
    hold_in_the_interpreter(__file__)


def both(best_log: Tensor, budget: int) -> tuple[Tree, Tree]:
    """From the kernels and from torch, of [R, D, W] log-probabilities in descending order; tokens are made up."""
    from dflash_train.kernels import tree

    rows, depth, width = best_log.shape
    generator = torch.Generator().manual_seed(width)
    tokens = torch.stack([torch.randperm(2000, generator=generator)[:width] for _ in range(rows * depth)])
    roots, tokens = torch.arange(rows) + 7, tokens.view(rows, depth, width)
    budget = min(budget, sum(width**d for d in range(1, depth + 1)))
    assert tree.fits(budget, depth)
    plain = grow_tree(roots, best_log, tokens, budget)
    return tree.grow_tree(roots.to(DEVICE), best_log.to(DEVICE), tokens.to(DEVICE), budget), plain


def assert_same(ours: Tree, plain: Tree) -> None:
    for field in dataclasses.fields(Tree):
        one, other = getattr(ours, field.name), getattr(plain, field.name)
        if isinstance(other, Tensor):
            assert one.dtype == other.dtype, field.name
            assert torch.equal(one.cpu(), other), field.name
        else:
            assert one == other, field.name


def marginals(rows: int, depth: int, width: int, seed: int, steps: int | None, banned: int) -> Tensor:
    """Rounded to 1/`steps` there are ties, within a position and between prefixes; `banned` tokens have probability 0."""
    logits = torch.randn(rows, depth, width + banned, generator=torch.Generator().manual_seed(seed)) * 2
    logits[..., :banned] = -torch.inf
    logits = logits if steps is None else (logits * steps).round() / steps
    return logits.log_softmax(-1).clamp_(max=0.0).sort(-1, descending=True).values


@kernel_runs
@settings(max_examples=60, deadline=None)
@given(
    st.builds(
        marginals, st.integers(1, 3), st.integers(1, 5), st.integers(1, 9), st.integers(0, 2**31),
        st.sampled_from([None, 1, 2]), st.integers(0, 2),
    ),
    st.integers(1, 70),
)  # fmt: skip
def test_the_kernels_make_the_tree_that_torch_makes(best_log: Tensor, budget: int) -> None:
    assert_same(*both(best_log, budget))


@kernel_runs
@pytest.mark.parametrize("budget", [16, 64, 256, 1024])
def test_reported_budgets(budget: int) -> None:
    assert_same(*both(marginals(1, 7, budget, budget, None, 0), budget))


@kernel_runs
def test_a_sure_position_and_a_chain() -> None:
    """Log-probabilities of exactly 0: a child ties with its parent, and comes after it."""
    best_log = torch.full((1, 4, 3), -torch.inf)
    best_log[..., 0] = 0.0
    ours, plain = both(best_log, 4)
    assert_same(ours, plain)
    assert ours.parents.tolist() == [[0, 0, 1, 2, 3]]


@kernel_runs
def test_what_does_not_fit_a_key_is_left_to_torch() -> None:
    from dflash_train.kernels import tree

    assert tree.fits(tree.MAX_NODES, tree.MAX_DEPTH)
    assert not tree.fits(tree.MAX_NODES + 1, 1)
    assert not tree.fits(1, tree.MAX_DEPTH + 1)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tree_of_a_large_vocabulary_on_the_gpu(dtype: torch.dtype) -> None:
    """Through `build_tree`, which takes the kernels there: the same scores as on the CPU, and parents before children."""
    from dflash_train.ddtree import build_tree

    logits = (torch.randn(2, 7, 150_000, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    ours, plain = build_tree(torch.tensor([1, 2]).cuda(), logits.cuda(), 256), build_tree(torch.tensor([1, 2]), logits, 256)
    torch.testing.assert_close(ours.log_probs.cpu(), plain.log_probs, rtol=1e-5, atol=1e-4)
    assert bool((ours.parents[:, 1:].cpu() < torch.arange(1, 257)).all())
    parent_depths = ours.depths.gather(1, ours.parents)
    assert torch.equal(ours.depths[:, 1:], parent_depths[:, 1:] + 1)
