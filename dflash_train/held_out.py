"""A short evaluation by decoding while a run trains: on held-out prompts, greedy, the chain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dflash_train.chat_tokenizers import Encoded
from dflash_train.config import ConfigError, RunConfig
from dflash_train.data import Documents
from dflash_train.decode import DecodeConfig, Decoder
from dflash_train.drafter import Drafter
from dflash_train.targets import Target


class HeldOut:
    """A decoder with a drafter of its own, on the target's device, and prompts.

    Raises:
        ConfigError: the folder's tokens are not this drafter's, or none of its documents has a prompt.
        DataError: the folder cannot be read.
        TargetError: the target cannot be decoded with.
    """

    def __init__(self, config: RunConfig, target: Target) -> None:
        folder = Path(config.eval.path)
        documents = Documents(folder)
        if documents.manifest.vocab_size > config.drafter.vocab_size:
            raise ConfigError(
                f"eval.path: {folder} was made by a tokenizer of {documents.manifest.vocab_size} ids, more than "
                f"drafter.vocab_size = {config.drafter.vocab_size}; it belongs to another target"
            )
        chosen = [document for i in range(len(documents)) if _prompt_length(document := documents[i])]
        chosen = chosen[: config.eval.prompts]
        if not chosen:
            raise ConfigError(
                f"eval.path: no document of {folder} has tokens before its first supervised one, which would be a prompt; "
                "prepare conversations, not plain text"
            )
        self.prompts = [document.tokens[: _prompt_length(document)].tolist() for document in chosen]
        self._config = DecodeConfig(max_new_tokens=config.eval.max_new_tokens, stop_ids=_stop_ids(chosen))
        dtype = target.vocabulary().embedding.dtype
        with torch.random.fork_rng([]):  # its first weights are not used, and a run draws the same with it as without
            drafter = Drafter(config.drafter)
        self._drafter = drafter.to(target.device, dtype).eval().requires_grad_(False)
        self._decoder = Decoder(target, self._drafter)

    def tau(self, weights: Mapping[str, Tensor]) -> float:
        """Acceptance length of a drafter of these weights: tokens per pass of the target, accepted drafts + 1."""
        self._drafter.load_state_dict(dict(weights))
        generations = self._decoder.generate(self.prompts, "chain", self._config).generations
        steps = [emitted for generation in generations for emitted in generation.emitted]
        return sum(steps) / len(steps) if steps else 1.0


def _prompt_length(document: Encoded) -> int:
    """Tokens before the first supervised one; 0 if there is none of either."""
    return int(document.supervised.argmax()) if document.supervised.any() else 0


def _stop_ids(documents: list[Encoded]) -> tuple[int, ...]:
    """The token that ends every answer, if there is one that does: the manifest does not tell it."""
    last = {int(document.tokens[np.flatnonzero(document.supervised)[-1]]) for document in documents}
    return tuple(last) if len(last) == 1 and len(documents) > 1 else ()
