"""The objective of `losses.py` with its gradient made in the forward: two products with the frozen head instead of four.

A chunk of rows has all its logits at once, in the head's type, in a buffer of at most `LOGITS_BYTES`. cuBLAS makes them, one
kernel reads them for the statistics of each row, a second writes the gradient of the logits over them, and cuBLAS takes that
back through the head. The buffer is then free for the next chunk: [R, V] is never in memory, nothing is made twice, and
backward is one multiplication. A product of our own in Triton was not tried: what surrounds the two products takes under a
tenth of their time, and cuBLAS does those near the card's limit.

Everything in a row is summed in float32 and in one order, so that the same input gives the same bits. With Triton's
interpreter (`TRITON_INTERPRET=1` before Python starts) it also runs on the CPU.

Legend: R rows, V vocabulary, H width; z logits of the drafter, z' those of the target, log q and log p their log-softmax.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dflash_train.config import LossConfig
from dflash_train.vocabulary import Vocabulary

LOGITS_BYTES = 768 * 2**20
"""Most that the logits of a chunk take, those of the target included."""
_TILE_ROWS, _TILE_COLUMNS = 128, 256
"""Output tile of cuBLAS's bf16 products on Hopper: how many rows make whole waves follows from it."""
_BLOCK, _WARPS = 4096, 8

# Rows of the table of statistics, each [R] fp32.
# log q is (z - top) - log sum exp(z - top): with the two added up first, logits of 1e4 would cost it four digits.
_TOP_Q, _SUM_Q, _TOP_P, _SUM_P, _CROSS_ENTROPY, _BEST, _TERMS, _REVERSE, _ALPHA, _BELOW, _ENTROPY = map(tl.constexpr, range(11))
_NUM_STATISTICS = tl.constexpr(11)

_launching = threading.Lock()
"""Held while a kernel is launched, which takes microseconds, but for the first time, when Triton compiles it: N threads
then compile once."""


@triton.jit
def _capped(z, cap, HAS_CAP: tl.constexpr):
    """c·tanh(z/c)."""
    if HAS_CAP:
        z = cap * (2.0 * tl.sigmoid(2.0 * z / cap) - 1.0)
    return z


@triton.jit
def _share_below(log_q, log_p):
    """1[q < p], and a half where they are equal: the gradient that torch gives min(p, q)."""
    return tl.where(log_q < log_p, 1.0, tl.where(log_q == log_p, 0.5, 0.0))


@triton.jit
def _load(row, columns, V: tl.constexpr, cap, HAS_CAP: tl.constexpr):
    inside = columns < V
    z = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, _capped(z, cap, HAS_CAP), float("-inf"))


# Chunks start anywhere in these: Triton would compile each kernel again for other alignments and row counts.
_ANY_PLACE = {
    "do_not_specialize": ["num_rows"],
    "do_not_specialize_on_alignment": ["labels", "supervised", "weights", "statistics"],
}


@triton.jit(**_ANY_PLACE)
def _statistics_kernel(
    logits,
    teacher_logits,
    labels,
    supervised,
    statistics,
    V: tl.constexpr,
    stride,
    num_rows,
    cap,
    kl_weight,
    reverse_weight,
    tv_weight,
    lk_weight,
    lk_eta,
    HAS_TEACHER: tl.constexpr,
    NEEDS_ENTROPY: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row: everything that is a sum over the vocabulary."""
    index = tl.program_id(0)
    if tl.load(supervised + index) == 0:
        for i in tl.static_range(_NUM_STATISTICS):
            tl.store(statistics + i * num_rows + index, 0.0)
        return
    row = logits + index.to(tl.int64) * stride
    teacher_row = teacher_logits + index.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    label = tl.load(labels + index)

    # Largest value with its first place, and the sum of exponentials, for each lane; the lanes are joined once, at the end.
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    teacher_top = tl.full((BLOCK,), float("-inf"), tl.float32)
    teacher_total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        columns = start + lanes
        z = _load(row, columns, V, cap, HAS_CAP)
        new_top = tl.maximum(top, z)
        place = tl.where(z > top, columns, place)
        # A lane that has seen nothing yet holds -inf, and -inf - -inf is NaN; a NaN of the logits goes on into the sum.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.exp(z - base)
        top = new_top
        if HAS_TEACHER:
            y = _load(teacher_row, columns, V, cap, HAS_CAP)
            new_top = tl.maximum(teacher_top, y)
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            teacher_total = teacher_total * tl.exp(teacher_top - base) + tl.exp(y - base)
            teacher_top = new_top
    best = tl.max(top, 0)
    first = tl.min(tl.where(top == best, place, V), 0)
    log_sum = tl.log(tl.sum(total * tl.exp(top - best), 0))
    label_logit = _capped(tl.load(row + label).to(tl.float32), cap, HAS_CAP)
    tl.store(statistics + _TOP_Q * num_rows + index, best)
    tl.store(statistics + _SUM_Q * num_rows + index, log_sum)
    tl.store(statistics + _CROSS_ENTROPY * num_rows + index, log_sum - (label_logit - best))
    tl.store(statistics + _BEST * num_rows + index, tl.where(first == label, 1.0, 0.0))
    teacher_best = 0.0
    teacher_log_sum = 0.0
    if HAS_TEACHER:
        teacher_best = tl.max(teacher_top, 0)
        teacher_log_sum = tl.log(tl.sum(teacher_total * tl.exp(teacher_top - teacher_best), 0))
    tl.store(statistics + _TOP_P * num_rows + index, teacher_best)
    tl.store(statistics + _SUM_P * num_rows + index, teacher_log_sum)

    forward = tl.zeros((BLOCK,), tl.float32)
    reverse = tl.zeros((BLOCK,), tl.float32)
    common = tl.zeros((BLOCK,), tl.float32)
    below = tl.zeros((BLOCK,), tl.float32)
    entropy = tl.zeros((BLOCK,), tl.float32)
    if HAS_TEACHER or NEEDS_ENTROPY:
        for start in range(0, V, BLOCK):
            columns = start + lanes
            inside = columns < V
            log_q = _load(row, columns, V, cap, HAS_CAP) - best - log_sum
            q = tl.exp(log_q)
            if NEEDS_ENTROPY:
                entropy -= tl.where(inside, q * log_q, 0.0)
            if HAS_TEACHER:
                log_p = _load(teacher_row, columns, V, cap, HAS_CAP) - teacher_best - teacher_log_sum
                p = tl.exp(log_p)
                forward += tl.where(inside, p * (log_p - log_q), 0.0)
                reverse += tl.where(inside, q * (log_q - log_p), 0.0)
                common += tl.where(inside, tl.minimum(p, q), 0.0)
                below += tl.where(inside, q * _share_below(log_q, log_p), 0.0)
    kl = tl.sum(forward, 0)
    rkl = tl.sum(reverse, 0)
    alpha = tl.sum(common, 0)
    share = tl.exp(-lk_eta * alpha)
    terms = 0.0
    if HAS_TEACHER:
        terms = kl_weight * kl + reverse_weight * rkl + tv_weight * (1 - alpha)
        terms += lk_weight * (share * kl + (1 - share) * (1 - alpha))
    tl.store(statistics + _TERMS * num_rows + index, terms)
    tl.store(statistics + _REVERSE * num_rows + index, rkl)
    tl.store(statistics + _ALPHA * num_rows + index, alpha)
    tl.store(statistics + _BELOW * num_rows + index, tl.sum(below, 0))
    tl.store(statistics + _ENTROPY * num_rows + index, tl.sum(entropy, 0))


@triton.jit(**_ANY_PLACE)
def _gradient_kernel(
    logits,
    teacher_logits,
    labels,
    weights,
    statistics,
    V: tl.constexpr,
    stride,
    num_rows,
    cap,
    ce_weight,
    kl_weight,
    reverse_weight,
    tv_weight,
    lk_weight,
    lk_eta,
    entropy_weight,
    HAS_TEACHER: tl.constexpr,
    NEEDS_ENTROPY: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Put the gradient of the weighted terms in the place of a block of a row's logits."""
    index = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < V
    row = logits + index.to(tl.int64) * stride
    weight = tl.load(weights + index)
    if weight == 0.0:
        # Whatever the row holds, NaN as well: a slot that does not count has no gradient.
        tl.store(row + columns, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=inside)
        return
    z = _load(row, columns, V, cap, HAS_CAP)
    log_q = z - tl.load(statistics + _TOP_Q * num_rows + index) - tl.load(statistics + _SUM_Q * num_rows + index)
    q = tl.exp(log_q)
    label = tl.load(labels + index)
    gradient = ce_weight * (q - tl.where(columns == label, 1.0, 0.0))
    if HAS_TEACHER:
        alpha = tl.load(statistics + _ALPHA * num_rows + index)
        share = tl.exp(-lk_eta * alpha)
        kl = kl_weight + lk_weight * share
        tv = tv_weight + lk_weight * (1 - share)
        teacher_row = teacher_logits + index.to(tl.int64) * stride
        log_p = _load(teacher_row, columns, V, cap, HAS_CAP) - tl.load(statistics + _TOP_P * num_rows + index)
        log_p -= tl.load(statistics + _SUM_P * num_rows + index)
        gradient += kl * (q - tl.exp(log_p))
        gradient += reverse_weight * q * (log_q - log_p - tl.load(statistics + _REVERSE * num_rows + index))
        gradient -= tv * q * (_share_below(log_q, log_p) - tl.load(statistics + _BELOW * num_rows + index))
    if NEEDS_ENTROPY:
        right = tl.load(statistics + _BEST * num_rows + index)
        entropy = tl.load(statistics + _ENTROPY * num_rows + index)
        gradient -= entropy_weight * right * q * (log_q + entropy)
    gradient *= weight
    if HAS_CAP:
        gradient *= 1.0 - (z / cap) * (z / cap)
    tl.store(row + columns, gradient.to(logits.dtype.element_ty), mask=inside)


def rows_per_chunk(num_rows: int, width: int, row_bytes: int, multiple: int, processors: int) -> int:
    """How many rows have their logits at once: a multiple of `multiple`, within `LOGITS_BYTES` where that is possible.

    The product that takes the gradient back has few output tiles ([rows, H]), so that its last wave may leave most
    multiprocessors idle; of all sizes, the one with the fewest tiles waited for is taken, the largest among equals.

    Args:
        num_rows: R.
        width: H.
        row_bytes: of one row's logits, those of the target included.
        multiple: slots of a block.
        processors: multiprocessors of the device.
    """
    columns = -(-width // _TILE_COLUMNS)

    def cost(rows: int) -> int:
        tiles = -(-rows // _TILE_ROWS) * columns
        return -(-tiles // processors) * processors + tiles

    most = max(multiple, min(num_rows, LOGITS_BYTES // row_bytes) // multiple * multiple)
    best, least = most, -1
    for chunk in {most, *(tiles * _TILE_ROWS // multiple * multiple for tiles in range(1, most // _TILE_ROWS + 1))}:
        if chunk == 0:
            continue
        whole, rest = divmod(num_rows, chunk)
        total = whole * cost(chunk) + (cost(rest) if rest else 0)
        if least < 0 or (total, -chunk) < (least, -best):
            best, least = chunk, total
    return best


@torch.library.custom_op("dflash_train::head_loss", mutates_args=())
def _head_loss(
    hidden: torch.Tensor,
    labels: torch.Tensor,
    supervised: torch.Tensor,
    weights: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    softcap: float,
    teacher: torch.Tensor | None,
    teacher_index: torch.Tensor | None,
    terms: list[float],
    dpace_alpha: float,
    with_gradient: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from dflash_train.losses import dpace_weights

    num_blocks, slots, width = hidden.shape
    num_rows, vocab = num_blocks * slots, head.shape[0]
    ce, kl, rkl, tv, lk, lk_eta, entropy = terms
    labels, supervised, weights = labels.contiguous(), supervised.contiguous(), weights.contiguous()
    table = torch.zeros(_NUM_STATISTICS.value, num_blocks, slots, dtype=torch.float32, device=hidden.device)
    gradient = torch.empty(num_blocks if with_gradient else 0, slots, width, dtype=head.dtype, device=hidden.device)
    scaled = torch.empty_like(weights)
    stride = -(-vocab // 8) * 8  # rows aligned for 16-byte loads
    both = 1 if teacher is None else 2
    processors = torch.cuda.get_device_properties(hidden.device).multi_processor_count if hidden.is_cuda else 1
    chunk = rows_per_chunk(num_rows, width, both * stride * head.element_size(), slots, processors)
    buffer = torch.empty(both, min(chunk, num_rows), stride, dtype=head.dtype, device=hidden.device)
    flags = {"HAS_TEACHER": teacher is not None, "NEEDS_ENTROPY": entropy != 0, "HAS_CAP": softcap != 0}

    def multiply(states: torch.Tensor, out: torch.Tensor) -> None:
        if bias is None:
            torch.mm(states, head.t(), out=out)
        else:
            torch.addmm(bias, states, head.t(), out=out)

    for start in range(0, num_blocks, chunk // slots):
        part = slice(start, min(num_blocks, start + chunk // slots))
        rows = (part.stop - part.start) * slots
        logits, teacher_logits = buffer[0, :rows, :vocab], buffer[-1, :rows, :vocab]
        multiply(hidden[part].reshape(rows, width).to(head.dtype), logits)
        if teacher is not None and teacher_index is not None:
            multiply(teacher[teacher_index[part].flatten()].to(head.dtype), teacher_logits)
        statistics = torch.empty(_NUM_STATISTICS.value, rows, dtype=torch.float32, device=hidden.device)
        pointers = (logits, teacher_logits, labels[part])
        sizes = (vocab, stride, rows, float(softcap))
        common = {**flags, "BLOCK": _BLOCK, "num_warps": _WARPS}
        with _launching:
            _statistics_kernel[(rows,)](
                *pointers, supervised[part].view(torch.uint8), statistics, *sizes, kl, rkl, tv, lk, lk_eta, **common
            )
        table[:, part] = statistics.view(_NUM_STATISTICS.value, -1, slots)
        scaled[part] = weights[part]
        if dpace_alpha >= 0:
            scaled[part] *= dpace_weights(table[_CROSS_ENTROPY.value, part], supervised[part], dpace_alpha)
        if with_gradient:
            grid = (rows, triton.cdiv(vocab, _BLOCK))
            with _launching:
                _gradient_kernel[grid](
                    *pointers, scaled[part], statistics, *sizes, ce, kl, rkl, tv, lk, lk_eta, entropy, **common
                )
            torch.mm(logits, head, out=gradient[part].view(rows, width))
    values = ce * table[_CROSS_ENTROPY.value] + table[_TERMS.value]
    values += entropy * table[_BEST.value] * table[_ENTROPY.value]
    numerator = torch.where(supervised, values * scaled, 0.0).sum()
    # Not indexed by a list: the host would wait while the list is copied to the device.
    reported = torch.stack([table[row.value] for row in (_CROSS_ENTROPY, _BEST, _ALPHA)])
    return numerator, reported, gradient.to(hidden.dtype)


@_head_loss.register_fake
def _(hidden, labels, supervised, weights, head, bias, softcap, teacher, teacher_index, terms, dpace_alpha, with_gradient):
    numerator = weights.new_empty((), dtype=torch.float32)
    reported = weights.new_empty((3, *labels.shape), dtype=torch.float32)
    return numerator, reported, hidden.new_empty((hidden.shape[0] if with_gradient else 0, *hidden.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2])


def _backward(ctx: Any, by_numerator: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return (None if by_numerator is None else gradient * by_numerator.to(gradient.dtype), *[None] * 11)


_head_loss.register_autograd(_backward, setup_context=_keep)


def head_loss(
    hidden: Tensor,
    labels: Tensor,
    supervised: Tensor,
    weights: Tensor,
    vocabulary: Vocabulary,
    config: LossConfig,
    teacher: Tensor | None = None,
    teacher_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted sum of the terms of M blocks of P slots, and what is reported of each slot.

    Opaque to Dynamo (one custom op), so that it can stand inside compiled code. It has no second derivative.

    Args:
        hidden: [M, P, H], the only input that gets a gradient.
        labels: [M, P] int64.
        supervised: [M, P] bool; other slots may hold anything.
        weights: [M, P] fp32, D-PACE's factor not included.
        vocabulary: the frozen head.
        config: the terms.
        teacher: [L, H] final hidden states of the target, where a term needs them.
        teacher_index: [M, P] int64 into `teacher`.

    Returns:
        The numerator, fp32 scalar, and without gradient, each [M, P] fp32: cross-entropy, 1 where the argmax is the label, and
        alpha = sum of min(p, q), 0 without a teacher. All are 0 where not supervised.

    Raises:
        ValueError: the head asks for a gradient, which is not made here.
    """
    if vocabulary.head.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "loss.implementation = fused makes no gradient of the output head, and vocabulary.head asks for one; detach it, "
            "or use reference"
        )
    c = config
    numerator, reported, _ = _head_loss(
        hidden,
        labels,
        supervised,
        weights,
        vocabulary.head,
        vocabulary.head_bias,
        vocabulary.logit_softcap,
        teacher if config.needs_teacher else None,
        teacher_index if config.needs_teacher else None,
        [c.ce, c.kl, c.rkl, c.tv, c.lk, c.lk_eta, c.cap],
        c.dpace_alpha if c.weighting == "dpace" else -1.0,
        hidden.requires_grad and torch.is_grad_enabled(),
    )
    cross_entropy, best, alpha = reported.detach().unbind()
    return numerator, cross_entropy, best, alpha
