"""A target's pass over rows of one shape as a CUDA graph, held against the pass that `transformers` runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dflash_train.cuda_graph import Graphed, NotCapturable, check_capturable
from dflash_train.model_files import TargetError
from dflash_train.packing import PackedRows
from dflash_train.target_masks import TargetMasks
from dflash_train.targets import Target

PackedPass = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def capture(target: Target, rows: PackedRows) -> str:
    """Have a target run rows of this shape as a CUDA graph from here on, if it can; what came of it, in words.

    Not while another thread uses the target.

    Args:
        target: on any device.
        rows: on that device; the states of both passes are compared on their documents.

    Raises:
        TargetError: capturing it broke off, which nothing told beforehand.
    """
    shape = "{} x {}".format(*rows.tokens.shape)
    try:
        graph, difference = _captured(target, rows)
    except NotCapturable as reason:
        return f"target {target.name} runs kernel by kernel, not as a CUDA graph: {reason}"
    except RuntimeError as error:
        raise TargetError(
            f"{target.name} could not be captured as a CUDA graph for {shape} tokens ({type(error).__name__}: {error}); set "
            "target.cuda_graph = false"
        ) from error
    target.graphs[rows.tokens.shape] = graph
    same = "bit for bit" if difference == 0 else f"within {difference:.2g} of their length"
    return f"target {target.name} runs {shape} tokens as a CUDA graph; its states are those of the plain pass {same}"


@torch.no_grad()
def _captured(target: Target, rows: PackedRows) -> tuple[Graphed, float]:
    """The graph, and by which part of its length a token's state differs at most."""
    if target.device.type != "cuda":
        raise NotCapturable(f"it is on {target.device}")
    places = sorted({str(parameter.device) for parameter in target.model.parameters()})
    if len(places) > 1:
        raise NotCapturable(f"its layers are on {', '.join(places)}")
    run, inputs = packed_pass(target), (rows.tokens, rows.documents, rows.positions)
    check_capturable(run, *inputs)
    graph = Graphed(run, *inputs)
    difference = difference_from_plain(target, rows, *graph(*inputs))
    allowed = 1e-3 if target.vocabulary().embedding.dtype in (torch.float32, torch.float64) else 0.1
    if not difference <= allowed:  # also true of NaN
        raise NotCapturable(f"its states would differ by {difference:.3g} of their length (allowed {allowed})")
    return graph, difference


def packed_pass(target: Target) -> PackedPass:
    """Taps and final states of packed rows, with masks of our own, for which nothing waits for the host.

    Returns:
        A function of tokens, documents and positions, as `Target.states` takes them.

    Raises:
        NotCapturable: the target runs each document by itself; of the function: its decoder does not take such masks.
    """
    if not target.packs_documents:
        raise NotCapturable("each document is run by itself, in shapes that change from batch to batch")
    masks = TargetMasks(target.model, target.vocabulary().embedding.dtype)

    def run(tokens: Tensor, documents: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        try:
            states = target.run(tokens, positions, masks.of_packed(documents, positions))
        except (AttributeError, TypeError, ValueError) as error:
            raise NotCapturable(f"its decoder does not take masks made for it ({type(error).__name__}: {error})") from error
        return states.taps, states.final

    return run


def difference_from_plain(target: Target, rows: PackedRows, taps: Tensor, final: Tensor) -> float:
    """By which part of its length a token's state is off at most, from the pass with the masks that `transformers` makes."""
    plain = target.run(rows.tokens, rows.positions)
    inside = rows.documents >= 0
    largest = 0.0
    for ours, theirs in ((taps, plain.taps), (final, plain.final)):
        off = (ours - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1).clamp_min(1e-6)
        largest = max(largest, float(off[inside].max()))
    return largest
