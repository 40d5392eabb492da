"""The tree against brute force over all prefixes, and the walk against a loop."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dflash_train.ddtree import Tree, ancestor_mask, build_tree, chain_tree, walk_tree


def prefixes(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """Token path of each node but the root, by following parents one at a time."""
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    out = []
    for node in range(1, len(tokens)):
        path = []
        while node:
            path.append(tokens[node])
            assert parents[node] < node
            node = parents[node]
        out.append(tuple(reversed(path)))
    return out


def brute_force(logits: Tensor) -> dict[tuple[int, ...], float]:
    """fp32 log-probability of every prefix, added from the front as the tree adds them."""
    log = logits.log_softmax(-1).clamp(max=0.0)
    depth, vocab = logits.shape
    scores: dict[tuple[int, ...], Tensor] = {(): torch.tensor(0.0)}
    for d in range(depth):
        for prefix in itertools.product(range(vocab), repeat=d):
            for token in range(vocab):
                scores[(*prefix, token)] = scores[prefix] + log[d, token] if d else log[0, token]
    del scores[()]
    return {prefix: float(score) for prefix, score in scores.items()}


def draw_marginals(depth: int, vocab: int, seed: int, steps: int | None) -> Tensor:
    """[3, depth, vocab] logits; rounded to 1/`steps` there are ties, within a position and between prefixes."""
    logits = torch.randn(3, depth, vocab, generator=torch.Generator().manual_seed(seed)) * 2
    return logits if steps is None else (logits * steps).round() / steps


marginals = st.builds(
    draw_marginals, st.integers(1, 4), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from([None, 1, 2, 4])
)


@settings(max_examples=150, deadline=None)
@given(marginals, st.integers(1, 60))
def test_the_tree_is_the_most_probable_prefixes_of_all(logits: Tensor, budget: int) -> None:
    tree = build_tree(torch.tensor([7, 8, 9]), logits, budget)
    for row in range(3):
        every = brute_force(logits[row])
        found = prefixes(tree, row)
        size = min(budget, len(every))
        assert len(found) == len(set(found)) == size
        scores = [every[prefix] for prefix in found]
        assert scores == tree.log_probs[row, 1:].tolist()
        # Equal scores are interchangeable: the best scores of all are what is compared.
        assert scores == sorted(every.values(), reverse=True)[:size]
        assert all(prefix[:-1] in found for prefix in found if len(prefix) > 1)
        assert [len(prefix) for prefix in found] == tree.depths[row, 1:].tolist()
    assert tree.tokens[:, 0].tolist() == [7, 8, 9]


@pytest.mark.parametrize("budget", [16, 64, 256, 1024])
def test_large_trees_equal_a_best_first_search(budget: int) -> None:
    """Reported budgets on a vocabulary too large for brute force: against a heap, one node at a time."""
    import heapq

    logits = torch.randn(1, 7, 2000, generator=torch.Generator().manual_seed(budget)) * 3
    log = logits[0].log_softmax(-1).sort(-1, descending=True).values.tolist()
    heap, popped = [(-log[0][0], (0,))], []
    while len(popped) < budget:
        negative, ranks = heapq.heappop(heap)
        popped.append(-negative)
        d = len(ranks) - 1
        heapq.heappush(heap, (negative + log[d][ranks[-1]] - log[d][ranks[-1] + 1], (*ranks[:-1], ranks[-1] + 1)))
        if d + 1 < len(log):
            heapq.heappush(heap, (negative - log[d + 1][0], (*ranks, 0)))
    tree = build_tree(torch.tensor([0]), logits, budget)
    torch.testing.assert_close(tree.log_probs[0, 1:], torch.tensor(popped), rtol=1e-5, atol=1e-4)
    assert len(set(prefixes(tree, 0))) == budget


@settings(max_examples=100, deadline=None)
@given(marginals, st.integers(0, 30))
def test_a_tree_is_expected_to_have_no_fewer_accepted_than_the_chain(logits: Tensor, extra: int) -> None:
    roots = torch.zeros(3, dtype=torch.int64)
    depth = logits.shape[1]
    chain = build_tree(roots, logits, depth, ranks=1)
    assert (build_tree(roots, logits, depth + extra).expected_accepted() >= chain.expected_accepted() - 1e-6).all()
    # E[accepted] by its definition, over every text that Q may write.
    q = logits.softmax(-1)
    for row in range(3):
        tree = set(prefixes(build_tree(roots, logits, depth + extra), row))
        expected = 0.0
        for text in itertools.product(range(logits.shape[2]), repeat=depth):
            probability = math.prod(float(q[row, i, token]) for i, token in enumerate(text))
            expected += probability * sum(text[: i + 1] in tree for i in range(depth))
        assert expected == pytest.approx(float(build_tree(roots, logits, depth + extra).expected_accepted()[row]), abs=1e-4)


@settings(max_examples=50, deadline=None)
@given(marginals)
def test_the_tree_of_rank_zero_is_the_chain(logits: Tensor) -> None:
    roots = torch.tensor([3, 1, 2])
    tree = build_tree(roots, logits, logits.shape[1], ranks=1)
    chain = chain_tree(roots, logits.topk(1).indices.squeeze(-1))
    for name in ("tokens", "parents", "depths", "ancestors"):
        assert torch.equal(getattr(tree, name), getattr(chain, name)), name
    assert torch.equal(chain.ancestors, ancestor_mask(chain.parents, chain.max_depth))


def test_a_sure_drafter_makes_the_chain_the_tree() -> None:
    logits = torch.full((1, 5, 9), -20.0)
    drafts = torch.tensor([[4, 0, 8, 2, 2]])
    logits.scatter_(2, drafts.unsqueeze(2), 20.0)
    tree = build_tree(torch.tensor([1]), logits, 5)
    assert torch.equal(tree.tokens, chain_tree(torch.tensor([1]), drafts).tokens)
    assert tree.parents.tolist() == [[0, 0, 1, 2, 3, 4]]


@settings(max_examples=100, deadline=None)
@given(marginals, st.integers(1, 40), st.integers(0, 2**31))
def test_the_walk_is_that_of_a_loop(logits: Tensor, budget: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = build_tree(torch.tensor([7, 8, 9]), logits, budget)
    posterior = torch.randint(0, logits.shape[2], tree.tokens.shape, generator=generator)
    walk = walk_tree(tree, posterior)
    for row in range(3):
        children = {
            (parent, token): node
            for node, (parent, token) in enumerate(zip(tree.parents[row].tolist(), tree.tokens[row].tolist(), strict=True))
            if node
        }
        path = [0]
        while (step := (path[-1], int(posterior[row, path[-1]]))) in children:
            path.append(children[step])
        assert walk.accepted[row] == len(path)
        assert walk.path[row, : len(path)].tolist() == path
        assert walk.next_tokens[row] == posterior[row, path[-1]]


@pytest.mark.parametrize(("name", "value"), [("num_nodes", 0), ("ranks", 0)])
def test_a_budget_of_nothing_is_refused(name: str, value: int) -> None:
    settings: dict[str, int] = {"num_nodes": 4, name: value}
    with pytest.raises(ValueError, match=f"{value}"):
        build_tree(torch.tensor([0]), torch.randn(1, 2, 3), **settings)
