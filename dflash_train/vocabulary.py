"""The target's embedding and output head, frozen: the drafter's ends, which it borrows and never owns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """Frozen input embedding and output head of a target; not a module, so that no checkpoint of a drafter contains it.

    V may be larger than the tokenizer's vocabulary (padding rows). Embedding and head may be one tensor (tied).
    """

    embedding: Tensor
    """[rows, H], raw rows: without the factor that some targets apply (Gemma: sqrt(H))."""
    head: Tensor
    """[V, H]."""
    head_bias: Tensor | None = None
    """[V], for the few targets that have one."""
    embedding_scale: float = 1.0
    """Factor on the raw rows at the drafter's input."""
    logit_softcap: float = 0.0
    """c of c·tanh(z/c); 0 for none."""

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [...] to input states [..., H]."""
        states = F.embedding(ids, self.embedding)
        return states if self.embedding_scale == 1.0 else states * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [..., H] to logits [..., V], in the head's type."""
        logits = F.linear(hidden.to(self.head.dtype), self.head, self.head_bias)
        return self.logit_softcap * torch.tanh(logits / self.logit_softcap) if self.logit_softcap else logits

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> Vocabulary:
        """A copy on another device; tied weights stay one tensor."""
        head = self.head.to(device, dtype)
        embedding = head if self.embedding is self.head else self.embedding.to(device, dtype)
        bias = None if self.head_bias is None else self.head_bias.to(device, dtype)
        return replace(self, embedding=embedding, head=head, head_bias=bias)
