import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from tiny import hidden_states, make_anchors, make_rows, tiny_config, tiny_drafter, tiny_vocabulary
from torch import Tensor

from dflash_train.config import ConfigError, LossConfig
from dflash_train.drafter import draft_slots
from dflash_train.losses import LossSums, add_sums, block_loss, dpace_weights, slot_weights
from dflash_train.vocabulary import Vocabulary

H, V, M, P = 16, 41, 7, 5
EVERYTHING = LossConfig(ce=0.5, kl=0.4, rkl=0.3, tv=0.2, lk=0.1, cap=0.25, decay_gamma=3.0)


Slots = tuple[Tensor, Tensor, Tensor, Vocabulary, Tensor]


@pytest.fixture
def slots() -> Slots:
    """hidden, labels, supervised, vocabulary, teacher; one block is wholly unsupervised, others have holes."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(M, P, H, generator=generator, requires_grad=True)
    supervised = torch.rand(M, P, generator=generator) < 0.7
    supervised[3] = False
    vocabulary = Vocabulary(embedding=torch.empty(0), head=torch.randn(V, H, generator=generator) * 0.6)
    labels = torch.randint(0, V, (M, P), generator=generator)
    with torch.no_grad():  # make about half the labels the drafter's own choice, so that CAP and acceptance have work
        best = vocabulary.logits(hidden).argmax(-1)
    labels = torch.where(torch.rand(M, P, generator=generator) < 0.5, best, labels)
    return hidden, labels, supervised, vocabulary, torch.randn(M, P, H, generator=generator)


def naive(q_logits: Tensor, p_logits: Tensor, label: int, config: LossConfig) -> float:
    """One slot, one vocabulary entry at a time."""
    q, p = q_logits.double().softmax(-1).tolist(), p_logits.double().softmax(-1).tolist()
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    rkl = sum(b * math.log(b / a) for a, b in zip(p, q, strict=True))
    share = math.exp(-config.lk_eta * alpha)
    total = config.ce * -math.log(q[label]) + config.kl * kl + config.rkl * rkl + config.tv * (1 - alpha)
    total += config.lk * (share * kl + (1 - share) * (1 - alpha))
    if q.index(max(q)) == label:
        total += config.cap * -sum(b * math.log(b) for b in q)
    return total


def naive_weights(q_logits: Tensor, labels: Tensor, supervised: Tensor, config: LossConfig) -> list[float]:
    """Weights of one block."""
    if config.weighting == "uniform":
        return [1.0] * len(labels)
    if config.weighting == "decay":
        return [math.exp(-k / config.decay_gamma) for k in range(len(labels))]
    q = q_logits.double().softmax(-1).gather(-1, labels[:, None])[:, 0].tolist()
    reach, product = [], 1.0
    for confidence, counts in zip(q, supervised.tolist(), strict=True):
        product *= (1 - config.dpace_alpha) * confidence + config.dpace_alpha if counts else 1.0
        reach.append(product)
    return [sum(r for r, s in zip(reach[k:], supervised[k:].tolist(), strict=True) if s) for k in range(len(labels))]


@pytest.mark.parametrize("weighting", ["uniform", "decay", "dpace"])
def test_the_loss_is_its_formula_slot_by_slot(slots: Slots, weighting: str) -> None:
    hidden, labels, supervised, vocabulary, teacher = slots
    config = dataclasses.replace(EVERYTHING, weighting=weighting)
    sums = block_loss(hidden, labels, supervised, vocabulary, config, teacher)
    numerator = denominator = 0.0
    with torch.no_grad():
        q_logits, p_logits = vocabulary.logits(hidden), vocabulary.logits(teacher)
    for block in range(M):
        weights = naive_weights(q_logits[block], labels[block], supervised[block], config)
        for k in range(P):
            if supervised[block, k]:
                numerator += weights[k] * naive(q_logits[block, k], p_logits[block, k], int(labels[block, k]), config)
                denominator += 1.0 if weighting == "dpace" else weights[k]
    assert sums.numerator.item() == pytest.approx(numerator, rel=1e-5)
    assert sums.denominator.item() == pytest.approx(denominator, rel=1e-6)
    assert sums.mean().item() == pytest.approx(numerator / denominator, rel=1e-5)


def softmax(z: Tensor) -> Tensor:
    return z.softmax(-1)


def tv_gradient(q: Tensor, p: Tensor) -> Tensor:
    below = (q <= p).float()
    return -q * (below - (q * below).sum(-1, keepdim=True))


def kl_gradient(q: Tensor, p: Tensor) -> Tensor:
    return q - p


def rkl_gradient(q: Tensor, p: Tensor) -> Tensor:
    difference = q.log() - p.log()
    return q * (difference - (q * difference).sum(-1, keepdim=True))


def lk_gradient(q: Tensor, p: Tensor) -> Tensor:
    share = torch.exp(-3 * torch.minimum(p, q).sum(-1, keepdim=True))
    return share * kl_gradient(q, p) + (1 - share) * tv_gradient(q, p)


@pytest.mark.parametrize(
    ("term", "gradient"), [("kl", kl_gradient), ("rkl", rkl_gradient), ("tv", tv_gradient), ("lk", lk_gradient)]
)
def test_the_gradient_of_a_divergence_is_the_documented_one(
    term: str, gradient: Callable[[Tensor, Tensor], Tensor]
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(4, 3, V, generator=generator, requires_grad=True)
    teacher = torch.randn(4, 3, V, generator=generator)
    identity = Vocabulary(embedding=torch.empty(0), head=torch.eye(V))
    config = LossConfig(**{"ce": 0.0, "weighting": "uniform", term: 1.0})  # type: ignore[arg-type]
    labels, supervised = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3, dtype=torch.bool)
    block_loss(logits, labels, supervised, identity, config, teacher).numerator.backward()
    torch.testing.assert_close(logits.grad, gradient(softmax(logits.detach()), softmax(teacher)), atol=1e-6, rtol=1e-5)


def test_cap_sharpens_right_slots_only_with_the_documented_gradient() -> None:
    logits = torch.randn(1, 2, V, generator=torch.Generator().manual_seed(1), requires_grad=True)
    labels = logits.detach().argmax(-1)
    labels[0, 1] = (labels[0, 1] + 1) % V
    identity = Vocabulary(embedding=torch.empty(0), head=torch.eye(V))
    plain, with_cap = (LossConfig(cap=cap, weighting="uniform") for cap in (0.0, 1.0))
    gradients = []
    for config in (plain, with_cap):
        sums = block_loss(logits, labels, torch.ones(1, 2, dtype=torch.bool), identity, config)
        gradients.append(torch.autograd.grad(sums.numerator, logits)[0])
    q = softmax(logits.detach())
    entropy = -(q * q.log()).sum(-1, keepdim=True)
    torch.testing.assert_close(
        (gradients[1] - gradients[0])[0, 0], (-q * (q.log() + entropy))[0, 0], atol=1e-6, rtol=1e-4
    )
    assert torch.equal(gradients[1][0, 1], gradients[0][0, 1])


def value_and_gradient(sums: LossSums, hidden: Tensor) -> tuple[Tensor, Tensor]:
    hidden.grad = None
    sums.mean().backward()  # not autograd.grad, which reentrant checkpoints refuse
    assert hidden.grad is not None
    return sums.mean().detach(), hidden.grad


@pytest.mark.parametrize("weighting", ["uniform", "decay", "dpace"])
@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant", "off"])
@pytest.mark.parametrize("chunk_rows", [1, 11, 15, 10_000])
def test_chunks_and_checkpoints_change_neither_value_nor_gradient(
    slots: Slots, weighting: str, mode: str, chunk_rows: int
) -> None:
    hidden, labels, supervised, vocabulary, teacher = slots
    dense = dataclasses.replace(EVERYTHING, weighting=weighting, chunk_rows=10_000, checkpoint="off")
    chunked = dataclasses.replace(dense, chunk_rows=chunk_rows, checkpoint=mode)
    expected = value_and_gradient(block_loss(hidden, labels, supervised, vocabulary, dense, teacher), hidden)
    actual = value_and_gradient(block_loss(hidden, labels, supervised, vocabulary, chunked, teacher), hidden)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "decay", "dpace"])
def test_accumulation_and_replicas_change_neither_value_nor_gradient(slots: Slots, weighting: str) -> None:
    """NeMo #2406, SpecForge #731: parts of unequal size, one of them without any supervised slot."""
    hidden, labels, supervised, vocabulary, teacher = slots
    config = dataclasses.replace(EVERYTHING, weighting=weighting)
    expected = value_and_gradient(block_loss(hidden, labels, supervised, vocabulary, config, teacher), hidden)
    parts = [slice(0, 3), slice(3, 4), slice(4, 7)]
    sums = [block_loss(hidden[p], labels[p], supervised[p], vocabulary, config, teacher[p]) for p in parts]
    denominator = add_sums(sums).denominator
    gradient = sum(torch.autograd.grad(s.numerator / denominator, hidden, retain_graph=True)[0] for s in sums)
    torch.testing.assert_close((add_sums(sums).mean().detach(), gradient), expected, atol=1e-6, rtol=1e-6)


def test_packing_changes_neither_value_nor_gradient() -> None:
    """The same documents and anchors, one per row or all in one row."""
    config = tiny_config()
    loss = dataclasses.replace(EVERYTHING, weighting="decay")
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    lengths, anchors = [9, 14, 6], [[2, 3], [0, 8, 12], [1]]
    packed = make_rows([lengths], 32, config)
    starts = [0, 9, 23]
    results = []
    for rows, drawn in [
        (packed, make_anchors([[s + a for s, row in zip(starts, anchors, strict=True) for a in row]], 8)),
        (None, make_anchors(anchors, 4)),
    ]:
        if rows is None:
            rows = make_rows([[n] for n in lengths], 14, config)
            for i, (start, n) in enumerate(zip(starts, lengths, strict=True)):
                for name in ("tokens", "loss_mask", "taps", "final"):
                    getattr(rows, name)[i, :n] = getattr(packed, name)[0, start : start + n]
        blocks = rows.blocks(drawn, config)
        slots = draft_slots(hidden_states(drafter, vocabulary, rows, drawn), blocks, config)
        index = blocks.teacher_positions + 14 * torch.arange(len(rows.tokens)).view(-1, 1, 1) * (len(rows.tokens) > 1)
        sums = block_loss(slots, blocks.labels, blocks.supervised, vocabulary, loss, rows.final.flatten(0, 1), index)
        results.append((sums.mean(), *torch.autograd.grad(sums.mean(), list(drafter.parameters()))))
    torch.testing.assert_close(results[0], results[1], atol=2e-6, rtol=2e-5)
    assert abs(results[0][0].item() - results[1][0].item()) < 1e-6 * results[0][0].item()


def test_a_batch_without_supervised_slots_has_zero_loss_and_gradient(slots: Slots) -> None:
    hidden, labels, supervised, vocabulary, teacher = slots
    for weighting in ("uniform", "decay", "dpace"):
        config = dataclasses.replace(EVERYTHING, weighting=weighting)
        sums = block_loss(hidden, labels, torch.zeros_like(supervised), vocabulary, config, teacher)
        value, gradient = value_and_gradient(sums, hidden)
        assert value == 0
        assert not gradient.any()


def test_no_blocks_at_all_have_zero_loss(slots: Slots) -> None:
    hidden, labels, supervised, vocabulary, teacher = slots
    sums = block_loss(hidden[:0], labels[:0], supervised[:0], vocabulary, EVERYTHING, teacher[:0])
    value, gradient = value_and_gradient(sums, hidden)
    assert value == 0
    assert not gradient.any()


def test_what_an_unsupervised_slot_holds_does_not_matter(slots: Slots) -> None:
    hidden, labels, supervised, vocabulary, teacher = slots
    expected = value_and_gradient(block_loss(hidden, labels, supervised, vocabulary, EVERYTHING, teacher), hidden)
    other = torch.where(supervised[..., None], hidden, 1e4).detach().requires_grad_()
    other_labels = torch.where(supervised, labels, 0)
    sums = block_loss(other, other_labels, supervised, vocabulary, EVERYTHING, teacher)
    torch.testing.assert_close(value_and_gradient(sums, other), expected, atol=1e-6, rtol=1e-5)


def test_accuracy_and_accepted_length_respect_the_mask() -> None:
    """verl-SpeCo #62: a hole neither breaks a run nor lengthens it."""
    labels = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [5, 5, 5, 5]])
    predicted = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 9, 3, 9], [5, 5, 5, 5]])
    supervised = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    hidden = torch.nn.functional.one_hot(predicted, V).float() * 9
    identity = Vocabulary(embedding=torch.empty(0), head=torch.eye(V))
    sums = block_loss(hidden, labels, supervised, identity, LossConfig())
    assert (sums.correct.item(), sums.supervised.item()) == (8, 10)
    assert (sums.accepted.item(), sums.blocks.item()) == (4 + 1 + 1, 3)


def test_decay_starts_at_one_on_the_first_predicting_slot() -> None:
    weights = slot_weights(torch.ones(1, 3, dtype=torch.bool), LossConfig(decay_gamma=4.0))
    torch.testing.assert_close(weights, torch.tensor([[1.0, math.exp(-0.25), math.exp(-0.5)]]))


def test_dpace_weights_by_hand() -> None:
    """Confidences .6, (hole), 1, .5 at alpha .5: factors .8, 1, 1, .75."""
    cross_entropy = -torch.tensor([[0.6, 0.9, 1.0, 0.5]]).log()
    supervised = torch.tensor([[True, False, True, True]])
    expected = torch.tensor([[0.8 + 0.8 + 0.6, 0.8 + 0.6, 0.8 + 0.6, 0.6]])
    torch.testing.assert_close(dpace_weights(cross_entropy, supervised, 0.5), expected)


def test_softcapped_logits_are_capped_for_drafter_and_teacher() -> None:
    vocabulary = Vocabulary(embedding=torch.empty(0), head=torch.eye(V) * 100, logit_softcap=3.0)
    logits = vocabulary.logits(torch.eye(V))
    assert logits.max().item() == pytest.approx(3.0)


def test_a_divergence_without_the_targets_states_is_refused(slots: Slots) -> None:
    hidden, labels, supervised, vocabulary, _ = slots
    with pytest.raises(ConfigError, match="pass its final hidden states"):
        block_loss(hidden, labels, supervised, vocabulary, LossConfig(kl=1.0))


@pytest.mark.parametrize("mode", ["non-reentrant", "reentrant"])
def test_only_one_chunk_of_logits_exists_at_a_time(slots: Slots, mode: str) -> None:
    """speculators #951: the largest logits ever made, and those saved for backward, stay within a chunk."""
    hidden, labels, supervised, _, teacher = slots
    made: list[int] = []

    class Recording(Vocabulary):
        def logits(self, hidden: Tensor) -> Tensor:
            made.append(hidden.shape[0])
            return super().logits(hidden)

    vocabulary = Recording(embedding=torch.empty(0), head=torch.ones(V, H))
    config = dataclasses.replace(EVERYTHING, chunk_rows=10, checkpoint=mode)
    saved: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sums = block_loss(hidden, labels, supervised, vocabulary, config, teacher)
    assert max(made) == 10
    assert not [n for n in saved if n >= 10 * V]
    sums.mean().backward()
    assert len(made) == 2 * 4 * 2  # drafter and teacher, four chunks, forward and recomputed
