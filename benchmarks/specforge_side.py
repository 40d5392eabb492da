"""SpecForge's drafter and loss with the sizes of one of our configs (`pip install --no-deps specforge==0.2.0`)."""

from __future__ import annotations

from typing import Any

from torch import nn

from dflash_train.config import RunConfig
from dflash_train.vocabulary import Vocabulary


def make_online(config: RunConfig, vocabulary: Vocabulary, num_anchors: int, attention: str, chunk: int) -> Any:
    """SpecForge's `OnlineDFlashModel`, its drafter (`.draft_model`) with weights of its own, on the CPU in float32.

    Raises:
        ImportError: it is not installed.
    """
    import transformers
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    drafter = config.drafter
    qwen3 = transformers.Qwen3Config(
        vocab_size=drafter.vocab_size,
        hidden_size=drafter.hidden_size,
        intermediate_size=drafter.intermediate_size,
        num_hidden_layers=drafter.num_layers,
        num_attention_heads=drafter.num_heads,
        num_key_value_heads=drafter.num_kv_heads,
        head_dim=drafter.head_dim,
        rms_norm_eps=drafter.rms_norm_eps,
        max_position_embeddings=drafter.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": drafter.rope_theta},
        layer_types=list(drafter.layers),
        attention_bias=False,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    qwen3.num_target_layers = drafter.num_target_layers
    qwen3.block_size = drafter.block_size
    qwen3.dflash_config = {"target_layer_ids": list(drafter.taps), "mask_token_id": drafter.mask_token_id}
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(vocabulary.head, requires_grad=False)
    return OnlineDFlashModel(
        DFlashDraftModel(qwen3), head, nn.Embedding.from_pretrained(vocabulary.embedding), drafter.mask_token_id,
        block_size=drafter.block_size, attention_backend=attention, num_anchors=num_anchors,
        loss_decay_gamma=config.loss.decay_gamma, objective_chunk_blocks=chunk,
    )  # fmt: skip
