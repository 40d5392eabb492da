"""The training objective on the slots of a batch, a chunk of logits at a time.

q is the drafter's distribution over the vocabulary at a slot, z its logits, y the label; p is the target's
distribution there, rebuilt from its final hidden state (logits are never stored). Terms, each per slot, and their
gradient in z:

=====  ==========================================  =====================================  ===========================
term   value                                       gradient                               source
=====  ==========================================  =====================================  ===========================
ce     -log q(y)                                   q - onehot(y)                          DFlash, arXiv 2602.06036
kl     sum p log(p/q)                              q - p                                  Hinton et al., 1503.02531
rkl    R = sum q log(q/p)                          q (log q - log p - R)                  MiniLLM, 2306.08543
tv     1 - alpha, alpha = sum min(p, q)            -q (1[q<=p] - sum of q where q<=p)     Leviathan et al., 2211.17192
lk     l kl + (1-l) tv, l = exp(-eta alpha)        the same mix; l is not differentiated  LK losses, 2602.23881
cap    H(q) if argmax q = y, else 0                -q (log q + H(q)); 1[.] is constant    LLaDA2.0, 2512.15745
=====  ==========================================  =====================================  ===========================

A slot's weight is 1 (`uniform`), exp(-(k-1)/gamma) for slot k (`decay`: DFlash), or D-PACE's (2605.18810): with
c_i = (1-a) q_i(y_i) + a, w_k = sum over supervised m >= k of c_1 … c_m, not differentiated; an unsupervised slot is a
factor 1 and no summand.

The loss is a numerator and a denominator, both sums over slots, so that they can be added over chunks, rows,
accumulation steps and replicas before the one division. The denominator is known from the data alone: the sum of the
weights for `uniform` and `decay`, the number of supervised slots for `dpace` (speculators' choice; SpecForge divides
by the number of rows instead, which makes its value grow with the number of blocks).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_guard import checkpoint
from dflash_train.config import ConfigError, LossConfig
from dflash_train.vocabulary import Vocabulary

_HAS_TRITON = importlib.util.find_spec("triton") is not None


@dataclass(frozen=True, kw_only=True, eq=False)
class LossSums:
    """Sums over the slots of a batch, fp32 scalars; only `numerator` carries a gradient."""

    numerator: Tensor
    """Weighted sum of the terms."""
    denominator: Tensor
    """What it is divided by; depends on the data, not on the weights of the drafter."""
    cross_entropy: Tensor
    """Unweighted sum of -log q(y) over supervised slots."""
    correct: Tensor
    """Supervised slots whose argmax is the label."""
    supervised: Tensor
    """Supervised slots."""
    accepted: Tensor
    """Per block, supervised slots before the first wrong one: summed. What greedy decoding of the text would accept."""
    blocks: Tensor
    """Blocks with a supervised slot."""
    alpha: Tensor
    """Sum of alpha, the chance that sampling accepts the draft, over supervised slots; 0 where no term needs the target."""

    def mean(self) -> Tensor:
        """numerator / denominator; 0 with zero gradient if nothing is supervised."""
        return self.numerator / self.denominator.clamp_min(torch.finfo(torch.float32).tiny)


def add_sums(parts: Iterable[LossSums]) -> LossSums:
    """The sums of several batches, chunks or replicas (on one device) as one.

    Raises:
        ValueError: there are none.
    """
    parts = list(parts)
    if not parts:
        raise ValueError("add_sums needs at least one part, got none")
    return LossSums(**{name: torch.stack([getattr(part, name) for part in parts]).sum() for name in vars(parts[0])})


def slot_weights(supervised: Tensor, config: LossConfig) -> Tensor:
    """Data-only weight of each slot, fp32 in the shape [..., P] of `supervised`; D-PACE's factor comes on top, in the
    chunk."""
    weights = supervised.float()
    if config.weighting == "decay":
        slot = torch.arange(supervised.shape[-1], device=supervised.device)
        weights = weights * torch.exp(-slot / config.decay_gamma)
    return weights


def dpace_weights(cross_entropy: Tensor, supervised: Tensor, alpha: float) -> Tensor:
    """D-PACE weights [..., P] from cross-entropy [..., P]: how much of the expected accepted length hangs on each
    slot."""
    confidence = (1 - alpha) * torch.exp(-cross_entropy.detach()) + alpha
    reach = torch.where(supervised, confidence, 1.0).cumprod(-1)
    return (reach * supervised).flip(-1).cumsum(-1).flip(-1)


def block_loss(
    hidden: Tensor,
    labels: Tensor,
    supervised: Tensor,
    vocabulary: Vocabulary,
    config: LossConfig,
    teacher: Tensor | None = None,
    teacher_index: Tensor | None = None,
) -> LossSums:
    """The objective of M blocks of P predicting slots.

    Logits exist a chunk at a time. In the reference a chunk is `config.chunk_rows` slots (whole blocks), whose logits are
    dropped and, with gradients on, rebuilt in backward, by `compile_guard.checkpoint` in the mode that `config.checkpoint`
    names; the fused implementation makes the gradient at once and rebuilds nothing.

    Args:
        hidden: [..., P, H] drafter's final states.
        labels: [..., P] int64.
        supervised: [..., P] bool.
        vocabulary: the target's head.
        config: terms and weights.
        teacher: the target's final hidden states, [L, H] with `teacher_index`, else [..., P, H]; needed by kl, rkl,
            tv, lk.
        teacher_index: [..., P] int64 into `teacher`, so that no copy per slot is made.

    Raises:
        ConfigError: a term needs the teacher and there is none, or `fused` cannot run here.
    """
    slots = labels.shape[-1]
    if config.needs_teacher and teacher is None:
        raise ConfigError("loss.kl, rkl, tv and lk compare with the target: pass its final hidden states as `teacher`")
    hidden = hidden.reshape(-1, slots, hidden.shape[-1])
    labels, supervised = labels.reshape(-1, slots), supervised.reshape(-1, slots)
    if teacher is not None and teacher_index is None:
        teacher = teacher.reshape(-1, teacher.shape[-1])
        teacher_index = torch.arange(labels.numel(), device=labels.device)
    rows = None if teacher_index is None else teacher_index.reshape(-1, slots)
    weights = slot_weights(supervised, config)
    if is_fused(config, hidden):
        from dflash_train.kernels.head_loss import head_loss  # needs Triton

        numerator, cross_entropy, best, alpha = head_loss(
            hidden, labels, supervised, weights, vocabulary, config, teacher, rows
        )
        totals = torch.stack([numerator, *_statistics(cross_entropy, best, alpha, supervised)])
    else:
        totals = _reference(hidden, labels, supervised, weights, vocabulary, config, teacher, rows)
    numerator, *statistics = totals.unbind()
    cross_entropy, correct, accepted, nonempty, alpha = (value.detach() for value in statistics)
    counted = supervised.sum(dtype=torch.float32)
    return LossSums(
        numerator=numerator,
        denominator=counted if config.weighting == "dpace" else weights.sum(),
        cross_entropy=cross_entropy,
        correct=correct,
        supervised=counted,
        accepted=accepted,
        blocks=nonempty,
        alpha=alpha,
    )


def is_fused(config: LossConfig, hidden: Tensor) -> bool:
    """Which implementation is meant for these states.

    Raises:
        ConfigError: `fused` is asked for where it cannot run.
    """
    if config.implementation == "reference":
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    runs = _HAS_TRITON and (hidden.is_cuda or (interpreted and hidden.device.type == "cpu"))
    if config.implementation == "fused" and not runs:
        raise ConfigError(
            f"loss.implementation = fused needs Triton and a GPU, and the states are on {hidden.device}"
            f"{'' if _HAS_TRITON else ', without Triton'}; use auto"
        )
    return runs and (hidden.is_cuda or config.implementation == "fused")


def _reference(
    hidden: Tensor,
    labels: Tensor,
    supervised: Tensor,
    weights: Tensor,
    vocabulary: Vocabulary,
    config: LossConfig,
    teacher: Tensor | None,
    rows: Tensor | None,
) -> Tensor:
    """[6] fp32: numerator and the statistics of `_statistics`; plain torch, in chunks."""
    slots = labels.shape[-1]
    run_checkpointed = config.checkpoint != "off" and torch.is_grad_enabled() and hidden.requires_grad

    def chunk_sums(
        hidden: Tensor, labels: Tensor, supervised: Tensor, weights: Tensor, rows: Tensor | None = None
    ) -> Tensor:
        states = teacher[rows.flatten()] if config.needs_teacher and teacher is not None and rows is not None else None
        return _chunk_sums(hidden, labels, supervised, weights, states, vocabulary, config)

    blocks_per_chunk = max(1, config.chunk_rows // slots)
    parts = [hidden, labels, supervised, weights] + ([] if rows is None else [rows])
    totals = hidden.new_zeros(6, dtype=torch.float32)
    # Split, not sliced: the gradients of slices would each be padded to the size of the whole.
    for inputs in zip(*(torch.split(part, blocks_per_chunk) for part in parts), strict=True):
        if run_checkpointed:
            # Nothing in a chunk draws random numbers.
            options = {"use_reentrant": config.checkpoint == "reentrant", "preserve_rng_state": False}
            totals = totals + checkpoint(chunk_sums, *inputs, **options)
        else:
            totals = totals + chunk_sums(*inputs)
    return totals


@torch.no_grad()
def _statistics(cross_entropy: Tensor, best: Tensor, alpha: Tensor, supervised: Tensor) -> list[Tensor]:
    """Cross-entropy, correct, accepted, blocks, alpha, summed over slots, each [M, P]; `best`: the argmax is the label."""
    right = best.bool() & supervised
    accepted = (right | ~supervised).cumprod(-1).bool() & supervised
    return [
        (cross_entropy * supervised).sum(),
        right.sum(dtype=torch.float32),
        accepted.sum(dtype=torch.float32),
        supervised.any(-1).sum(dtype=torch.float32),
        (alpha * supervised).sum(),
    ]


def _chunk_sums(
    hidden: Tensor,
    labels: Tensor,
    supervised: Tensor,
    weights: Tensor,
    teacher: Tensor | None,
    vocabulary: Vocabulary,
    config: LossConfig,
) -> Tensor:
    """[6] fp32: numerator and the statistics of one chunk [m, P]."""
    logits = vocabulary.logits(hidden.flatten(0, 1))
    log_q = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    cross_entropy = F.nll_loss(log_q, labels.flatten(), reduction="none").view(labels.shape)
    with torch.no_grad():
        best = logits.argmax(-1).view(labels.shape) == labels
        alpha = torch.zeros_like(cross_entropy)
    if config.weighting == "dpace":
        weights = weights * dpace_weights(cross_entropy, supervised, config.dpace_alpha)
    terms = config.ce * cross_entropy
    if teacher is not None:
        with torch.no_grad():
            log_p = torch.log_softmax(vocabulary.logits(teacher), dim=-1, dtype=torch.float32)
            alpha = _acceptance(log_q, log_p).view(labels.shape)
        terms = terms + _divergences(log_q, log_p, config).view(labels.shape)
    if config.cap:
        terms = terms + config.cap * (best & supervised) * _entropy(log_q).view(labels.shape)
    # `where`, not a product: a slot that does not count may hold anything, and 0 * inf is NaN.
    numerator = torch.where(supervised, terms * weights, 0.0).sum()
    return torch.stack([numerator, *_statistics(cross_entropy, best, alpha, supervised)])


def _acceptance(log_q: Tensor, log_p: Tensor) -> Tensor:
    return torch.minimum(log_p, log_q).exp().sum(-1)


def _entropy(log_q: Tensor) -> Tensor:
    return -(log_q.exp() * log_q).sum(-1)


def _divergences(log_q: Tensor, log_p: Tensor, config: LossConfig) -> Tensor:
    """Weighted sum of the terms that compare with the target, [rows], from log-probabilities [rows, V]."""
    total = log_q.new_zeros(log_q.shape[0])
    if config.kl or config.lk:
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        total = total + config.kl * kl
    if config.rkl:
        total = total + config.rkl * (log_q.exp() * (log_q - log_p)).sum(-1)
    if config.tv or config.lk:
        acceptance = _acceptance(log_q, log_p)
        total = total + config.tv * (1 - acceptance)
    if config.lk:
        share = torch.exp(-config.lk_eta * acceptance.detach())
        total = total + config.lk * (share * kl + (1 - share) * (1 - acceptance))
    return total


__all__ = ["LossSums", "add_sums", "block_loss", "dpace_weights", "is_fused", "slot_weights"]
