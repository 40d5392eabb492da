"""Attention masks of a target, made by us on its device and in the form in which its decoder takes them.

`transformers` makes its own from the positions, and asks the host on the way (`find_packed_sequence_indices`: are there
several documents at all?). What is given here is taken as it is.

Legend of shapes: R rows, L queries, C keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dflash_train.config import FULL, SLIDING


def text_config(model: nn.Module) -> Any:
    """The settings of a model's decoder; those of a model for images as well stand around it."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


class TargetMasks:
    """Which kinds of attention layers a target has, and the mask of each.

    Args:
        model: of `transformers`.
        dtype: of its hidden states.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        config = text_config(model)
        self._dtype = dtype
        self.kinds: tuple[str, ...] = tuple(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        self._window: int | None = None if getattr(config, "use_sliding_window", True) is False else window
        assert SLIDING not in self.kinds or self._window is not None

    def of(self, seen: Tensor, distance: Tensor) -> dict[str, Tensor] | Tensor:
        """Additive [R, 1, L, C], the one form that both eager attention and SDPA take; by kind where layers have kinds.

        Args:
            seen: [R, L, C] bool, which keys a query of a full layer sees.
            distance: [R, L, C] int64, how far behind the query a key is, in positions.
        """
        if not self.kinds and self._window is None:
            return self._additive(seen)
        masks = {FULL: seen}
        if self._window is not None:
            masks[SLIDING] = seen & (distance < self._window)
        if not self.kinds:
            return self._additive(masks[SLIDING])
        return {kind: self._additive(mask) for kind, mask in masks.items() if kind in self.kinds}

    def of_packed(self, documents: Tensor, positions: Tensor) -> dict[str, Tensor] | Tensor:
        """The same for rows of several documents, each by itself: causal, padding among padding."""
        index = torch.arange(documents.shape[1], device=documents.device)
        mine = documents.unsqueeze(2) == documents.unsqueeze(1)
        return self.of(mine & (index.unsqueeze(1) >= index), positions.unsqueeze(2) - positions.unsqueeze(1))

    def _additive(self, seen: Tensor) -> Tensor:
        mask = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return mask.masked_fill_(~seen, torch.finfo(self._dtype).min).unsqueeze(1)
