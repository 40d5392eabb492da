"""One drafter on one device: its weights, forward and backward of a batch, and its optimiser."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import compile_guard
from dflash_train.anchors import Anchors
from dflash_train.blocks import build_blocks
from dflash_train.config import ConfigError, RunConfig, TrainConfig
from dflash_train.drafter import Drafter, Masks, draft_slots
from dflash_train.losses import LossSums, block_loss
from dflash_train.packing import PackedRows
from dflash_train.targets import TargetStates
from dflash_train.vocabulary import Vocabulary

MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter, under torch's names."""


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of step 0 … steps-1. A function of the step alone: there is no state of a scheduler to save."""
    warmup = round(config.warmup_share * config.steps)
    if step < warmup:
        return config.learning_rate * (step + 1) / (warmup + 1)
    floor = config.final_share
    if config.schedule == "constant":
        share = 1.0
    elif config.schedule == "cosine":
        progress = (step - warmup) / max(1, config.steps - warmup)
        share = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    else:
        left = (config.steps - step) / max(1, round(config.decay_share * config.steps))
        share = floor + (1 - floor) * min(1.0, max(0.0, left))
    return config.learning_rate * share


def _run_drafter(drafter: Drafter, embedded: Tensor, taps: Tensor, block: Tensor, context: Tensor, masks: Masks) -> Tensor:
    hidden: Tensor = drafter(embedded, drafter.fuse(taps), block, context, masks)
    return hidden


@functools.cache
def _compiled_drafter() -> Callable[..., Tensor]:
    return compile_guard.compile(_run_drafter, shared="dflash_train.replica", dynamic=False)


class Replica:
    """A drafter that trains on one device. Used by one thread at a time.

    Weights that the optimiser updates are float32 (`masters`); with `train.dtype` bfloat16 the drafter computes in a
    copy of them, since autocast and flex_attention's backward do not go together (pytorch #176025).

    Args:
        config: of the run.
        device: where it is.
        vocabulary: the target's embedding and head, on that device and in the drafter's type.
    """

    def __init__(self, config: RunConfig, device: torch.device, vocabulary: Vocabulary) -> None:
        self.config = config
        self.device = device
        self.vocabulary = vocabulary
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.train.seed)
            drafter = Drafter(config.drafter)
        self._own_masters = config.train.dtype != "float32"
        # Not from the rounded copy: the first weights of both types are the same.
        masters = {
            name: weight.detach().to(device, torch.float32, copy=True).requires_grad_()
            for name, weight in (drafter.named_parameters() if self._own_masters else ())
        }
        self.drafter = drafter.to(device, getattr(torch, config.train.dtype))
        self._computing = dict(self.drafter.named_parameters())
        self.masters: dict[str, Tensor] = masters if self._own_masters else dict(self._computing)
        matrices = [weight for weight in self.masters.values() if weight.ndim > 1]
        vectors = [weight for weight in self.masters.values() if weight.ndim < 2]
        train = config.train
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=train.learning_rate,
            betas=(train.beta1, train.beta2),
            fused=True,
        )
        # As torch makes it at the first step: averaging and saving find it there whatever steps were skipped.
        for weight in self.masters.values():
            self.optimizer.state[weight] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(weight),
                "exp_avg_sq": torch.zeros_like(weight),
            }
        self._zero = False
        """Whether the masters' gradients count as zero, whatever they hold."""
        self.zero_grad()

    def accumulate(self, rows: PackedRows, anchors: Anchors, states: TargetStates) -> LossSums:
        """Forward and backward of a batch on this device; adds the gradient of the loss's *numerator*.

        The denominator is that of all batches of the step, on all devices: whoever has them all divides.

        Returns:
            Sums over the batch's slots, without gradient.
        """
        config = self.config
        blocks = build_blocks(rows.tokens, rows.loss_mask, rows.documents, rows.positions, anchors, config.drafter)
        masks = self.drafter.masks(anchors, rows.documents)
        run = _compiled_drafter() if config.train.compile else _run_drafter
        embedded = self.vocabulary.embed(blocks.ids)
        hidden = run(self.drafter, embedded, states.taps, blocks.positions, rows.positions, masks)
        length = rows.tokens.shape[1]
        first = length * torch.arange(len(rows.tokens), device=self.device).view(-1, 1, 1)
        sums = block_loss(
            draft_slots(hidden, blocks, config.drafter),
            blocks.labels,
            blocks.supervised,
            self.vocabulary,
            config.loss,
            states.final.flatten(0, 1),
            blocks.teacher_positions + first,
        )
        sums.numerator.backward()  # type: ignore[no-untyped-call]
        if self._own_masters:
            self._collect()
        return LossSums(**{name: value.detach() for name, value in vars(sums).items()})

    @torch.no_grad()
    def _collect(self) -> None:
        """Move the gradients of the weights that compute to the masters."""
        made = [weight.grad for weight in self._computing.values()]
        computed = [gradient for gradient in made if gradient is not None]
        if self._zero and len(computed) == len(made):
            # The first batch of a step overwrites: zeroing first would be another pass over all of them.
            torch._foreach_copy_(self._gradients(), computed)
            self._zero = False
        else:
            for master, gradient in zip(self.gradients, made, strict=True):
                if gradient is not None:
                    master.add_(gradient)
        for weight in self._computing.values():
            weight.grad = None

    def _gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.masters.values() if weight.grad is not None]

    @property
    def gradients(self) -> list[Tensor]:
        """Gradients of the masters, float32, in the order of their names."""
        gradients = self._gradients()
        if self._zero:
            torch._foreach_zero_(gradients)
            self._zero = False
        return gradients

    def zero_grad(self) -> None:
        """Set the gradients to zero; they exist always, so that all drafters have the same ones to sum."""
        for weight in self.masters.values():
            if weight.grad is None:
                weight.grad = torch.empty_like(weight)
        # Backward adds to the gradients of weights that are their own masters; others are zeroed only if nothing overwrites.
        self._zero = self._own_masters
        if not self._own_masters:
            torch._foreach_zero_(self._gradients())

    def update(self, step: int, denominator: float) -> tuple[float, bool]:
        """Divide the gradient by the loss's denominator, clip it, take an optimiser step; the gradient is zero after.

        A gradient that is not finite, or of nothing (no slot was supervised), changes nothing. The host waits for the device
        once, at the end.

        Returns:
            Norm of the gradient before clipping, and whether it was finite.
        """
        if denominator <= 0:
            self.zero_grad()
            return 0.0, True
        norm = torch.nn.utils.get_total_norm(self.gradients) / denominator
        # Dividing and clipping are one division inside the optimiser's kernel, which also skips a step that is not finite:
        # the interface of torch's GradScaler to fused optimisers.
        optimizer: Any = self.optimizer
        optimizer.grad_scale = denominator * (norm / self.config.train.clip).clamp_min(1.0)
        optimizer.found_inf = 1.0 - norm.isfinite().float()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.config.train)
        self.optimizer.step()
        self.publish()
        self.zero_grad()
        length = float(norm)
        return length, math.isfinite(length)

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the weights that compute up to date with the masters."""
        if self._own_masters:
            torch._foreach_copy_(list(self._computing.values()), list(self.masters.values()))

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the weights of all names."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.publish()

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state, float32, not copied: `exp_avg.fc.weight` and so on."""
        return {
            f"{moment}.{name}": self.optimizer.state[weight][moment]
            for name, weight in self.masters.items()
            for moment in MOMENTS
        }

    def load_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Take over what `moments` gave.

        Raises:
            ConfigError: some are missing, or of another shape.
        """
        for name, weight in self.masters.items():
            state: dict[str, Tensor] = {}
            for moment in MOMENTS:
                value = moments.get(f"{moment}.{name}")
                shape = torch.Size() if moment == "step" else weight.shape
                if value is None or value.shape != shape:
                    raise ConfigError(f"the checkpoint has no {moment}.{name} of shape {tuple(shape)}; take an earlier one")
                state[moment] = value.to(self.device, torch.float32, copy=True)
            self.optimizer.state[weight] = state
