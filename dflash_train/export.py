"""`export`: a drafter in the formats that are served: z-lab's (SGLang, vLLM, dflash) and speculators' (vLLM,
speculators).

Both hold the drafter's body only; embedding and head come from the target at serving. The settings are written wherever
a known
reader looks, so that none falls back to a default of its own: sizes of blocks at both places, RoPE's base under both
names.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from dflash_train.config import SLIDING, ConfigError, DrafterConfig, RunConfig
from dflash_train.drafter_files import read_run

Format = Literal["z-lab", "speculators"]
Precision = Literal["bfloat16", "float32"]


def export_run(
    run: Path,
    output: Path,
    *,
    format: Format,
    dtype: Precision = "bfloat16",
    verifier: str | None = None,
    overwrite: bool = False,
) -> None:
    """Write `config.json`, `model.safetensors` and a model card of a run to a new folder.

    Args:
        run: a run's folder, or that of one of its steps.
        output: folder to make.
        format: who is to read it.
        dtype: of the weights.
        verifier: name under which servers find the target; written by speculators' format, whose readers load it.
        overwrite: replace an existing folder.

    Raises:
        ConfigError: `run` has no drafter, `output` exists, or the format cannot say what the drafter was trained to do.
    """
    config, weights = read_run(run)
    if output.exists() and not overwrite:
        raise ConfigError(f"{output} exists; pass --overwrite or another -o DIR")
    record = zlab_config(config.drafter, dtype) if format == "z-lab" else speculators_config(config, dtype, verifier)
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    (unfinished / "config.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    _save_weights(unfinished / "model.safetensors", weights, getattr(torch, dtype))
    (unfinished / "README.md").write_text(model_card(config, format, dtype), "utf-8")
    if output.exists():
        shutil.rmtree(output)
    unfinished.rename(output)


def _save_weights(path: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    # `transformers` refuses a file that does not say which framework wrote it.
    save_file({n: w.to(dtype).contiguous() for n, w in weights.items()}, path, metadata={"format": "pt"})


def _decoder_config(config: DrafterConfig, dtype: Precision) -> dict[str, Any]:
    """What `transformers` calls a Qwen3 config. RoPE's base stands under the names of transformers 4 and 5."""
    sliding = SLIDING in config.layers
    return {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "layer_types": list(config.layers),
        "use_sliding_window": sliding,
        "sliding_window": config.sliding_window if sliding else None,
        # Qwen3 readers that derive the kinds of layers themselves make all from this one on sliding.
        "max_window_layers": _first_sliding(config),
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _first_sliding(config: DrafterConfig) -> int:
    return config.layers.index(SLIDING) if SLIDING in config.layers else config.num_layers


def zlab_config(config: DrafterConfig, dtype: Precision) -> dict[str, Any]:
    """`config.json` of z-lab's format.

    Raises:
        ConfigError: the format has no word for what the drafter was trained with.
    """
    if config.sample_from_anchor:
        raise ConfigError(
            "drafter.sample_from_anchor is true, which z-lab's format cannot say: its readers would be off by one; "
            "export with --format speculators"
        )
    if SLIDING in config.layers and config.sliding_rule.startswith("speculators"):
        raise ConfigError(
            f"drafter.sliding_rule is {config.sliding_rule}, but readers of z-lab's format count the window from the "
            "query; export with --format speculators"
        )
    dflash: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    scalars: dict[str, Any] = {}
    if config.embedding_scale != 1.0:
        scalars["input_embedding_scale"] = config.embedding_scale
    if config.logit_softcap:
        scalars["final_logit_softcapping"] = config.logit_softcap
    record = {
        "architectures": ["DFlashDraftModel"],
        **_decoder_config(config, dtype),
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        **scalars,
        "dflash_config": dflash | scalars,
    }
    if SLIDING in config.layers and config.sliding_rule == "modelopt":
        # dflash reads the one, vLLM either; left out, sliding layers are causal in the block for both.
        record["is_causal"] = False
        dflash["causal"] = False
        record["dflash_config"] = dflash | scalars
    return record


def speculators_config(config: RunConfig, dtype: Precision, verifier: str | None) -> dict[str, Any]:
    """`config.json` of speculators' format, whose layer ids name the layer that a state goes *into*, one more than
    ours.

    Raises:
        ConfigError: the format has no word for what the drafter was trained with.
    """
    drafter = config.drafter
    for name, neutral in (("embedding_scale", 1.0), ("logit_softcap", 0.0)):
        if getattr(drafter, name) != neutral:
            raise ConfigError(
                f"drafter.{name} is {getattr(drafter, name)}, which speculators' format cannot say; "
                "export with --format z-lab"
            )
    return {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashDraftModel"],
        "transformer_layer_config": _decoder_config(drafter, dtype),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.taps],
        "block_size": drafter.block_size,
        "mask_token_id": drafter.mask_token_id,
        "draft_vocab_size": drafter.vocab_size,
        "sample_from_anchor": drafter.sample_from_anchor,
        "sliding_window_non_causal": drafter.sliding_rule in ("modelopt", "speculators-bidirectional"),
        "num_target_layers": drafter.num_target_layers,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.num_draft_tokens}],
            # Not the path of the target on the training machine, which means nothing elsewhere.
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


def model_card(config: RunConfig, format: Format, dtype: Precision) -> str:
    """README.md of an exported drafter."""
    drafter = config.drafter
    target = Path(config.target.path).name
    layers = ", ".join(kind.removesuffix("_attention") for kind in drafter.layers)
    window = f" (window {drafter.sliding_window}, rule {drafter.sliding_rule})" if SLIDING in drafter.layers else ""
    terms = ", ".join(
        f"{name} {getattr(config.loss, name):g}"
        for name in ("ce", "kl", "rkl", "tv", "lk", "cap")
        if getattr(config.loss, name)
    )
    return f"""---
tags: [speculative-decoding, dflash]
---
# DFlash drafter for {target}

A block-diffusion drafter (arXiv 2602.06036) that proposes {drafter.num_draft_tokens} tokens per step from the hidden
states of {target}. It has no embedding and no output head: both are the target's. Format: {format}, {dtype}.

| | |
|---|---|
| block size | {drafter.block_size}, anchor included |
| tapped target layers (0-based outputs, of {drafter.num_target_layers}) | {", ".join(map(str, drafter.taps))} |
| mask token | {drafter.mask_token_id} |
| layers | {drafter.num_layers}: {layers}{window} |
| sizes | hidden {drafter.hidden_size}, MLP {drafter.intermediate_size}, \
heads {drafter.num_heads}/{drafter.num_kv_heads} of {drafter.head_dim} |
| RoPE | base {drafter.rope_theta:g}, whole head, neox layout, no scaling |
| first slot that predicts | {"0 (sample_from_anchor)" if drafter.sample_from_anchor else "1"} |
| loss | {terms}; weights {config.loss.weighting} |

Trained on answers of the target in the mode (thinking or not) of its training data; expect less acceptance in the
other.
"""
