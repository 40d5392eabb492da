"""Builders that the tests of decoding share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny import gemma3, qwen3, qwen36, spread, tiny_config, tiny_drafter
from torch import Tensor, nn

from dflash_train import decode
from dflash_train.config import DrafterConfig
from dflash_train.decode import Decoder
from dflash_train.targets import Target

WAYS: list[tuple[decode.Mode, int | None]] = [("chain", None), ("ddtree", 16), ("ddtree", 64), ("lookup", None)]


def hybrid() -> nn.Module:
    """Three GatedDeltaNet layers and a full one, twice."""
    return qwen36(8)


TARGETS: dict[str, Callable[[], nn.Module]] = {"qwen3": qwen3, "gemma3": gemma3, "hybrid": hybrid}


def tiny_decoder(make: Callable[[], nn.Module], **changes: object) -> Decoder:
    """A random target and a random drafter for it."""
    torch.manual_seed(0)
    model = spread(make())
    sizes = {"vocab_size": model.config.vocab_size, "num_target_layers": model.config.num_hidden_layers}
    config: DrafterConfig = tiny_config(**{**sizes, "mask_token_id": sizes["vocab_size"] - 1, **changes})
    return Decoder(Target(model, config.taps), tiny_drafter(config))


def random_prompts(count: int, seed: int = 0, vocab: int = 110, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def oracle(texts: Sequence[Sequence[int]], hit: float, seed: int = 0, margin: float = 1.0) -> Callable[[decode._Run], Tensor]:
    """A stand-in for the drafter's pass that knows each row's text, and at each slot tells it with probability `hit`.

    Random drafters are seldom right, so little of the tree would ever be accepted.
    """
    generator = torch.Generator().manual_seed(seed)

    def draft(run: decode._Run) -> Tensor:
        drafter = run._decoder.drafter
        assert drafter is not None
        count, vocab = drafter.config.num_draft_tokens, drafter.config.vocab_size
        logits = torch.randn(len(texts), count, vocab, generator=generator)
        told = torch.rand(len(texts), count, generator=generator) < hit
        for row, text in enumerate(texts):
            done = len(run.generations[row].tokens)
            for slot, token in enumerate(text[done : done + count]):
                # Half of what is told stands second or third, where only a tree finds it.
                logits[row, slot, token] = logits[row, slot].max() + (margin if told[row, slot] else -0.2)
        return logits

    return draft
