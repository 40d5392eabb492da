"""A drafter on disk: the weights and the settings that they were trained with.

A folder of ours has `drafter.safetensors` (fp32 or bf16, z-lab's names, nothing of the target) and `config.toml`. A
run's folder is one itself, or has such folders named `step-000100`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_train.config import ConfigError, DrafterConfig, RunConfig
from dflash_train.config_files import dump_config, load_config

WEIGHTS, SETTINGS = "drafter.safetensors", "config.toml"


def save_drafter(folder: Path, weights: Mapping[str, Tensor], config: RunConfig) -> None:
    """Write weights and settings; the weights appear last and at once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SETTINGS).write_text(dump_config(config), "utf-8")
    unfinished = folder / f"{WEIGHTS}.tmp"
    save_file({name: weight.detach().cpu().contiguous() for name, weight in weights.items()}, unfinished)
    os.replace(unfinished, folder / WEIGHTS)


def read_run(run: Path) -> tuple[RunConfig, dict[str, Tensor]]:
    """Settings and weights of a run: of the folder itself, else of its latest finished step.

    Raises:
        ConfigError: there are none, or they do not fit each other.
    """
    # A save that was killed leaves `step-000100.tmp`.
    steps = sorted(run.glob(f"step-*[0-9]/{WEIGHTS}"), key=lambda path: path.parent.name)
    folder = run if (run / WEIGHTS).is_file() or not steps else steps[-1].parent
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(f"{run} has no {WEIGHTS}, nor has any step-* folder in it; name the folder of a run")
    settings = folder / SETTINGS if (folder / SETTINGS).is_file() else run / SETTINGS
    config = load_config(settings)
    weights = read_weights(folder / WEIGHTS)
    check_weights(weights, config.drafter, folder / WEIGHTS)
    return config, weights


def read_weights(path: Path) -> dict[str, Tensor]:
    """A safetensors file.

    Raises:
        ConfigError: it is missing or damaged.
    """
    try:
        weights: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as safetensors: {error}") from error
    return weights


def weight_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight of a drafter, 11 per layer and three more, as z-lab names them."""
    width, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config.taps) * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config.num_layers):
        for name, shape in {
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (query, width),
            "self_attn.k_proj": (key, width),
            "self_attn.v_proj": (key, width),
            "self_attn.o_proj": (width, query),
            "self_attn.q_norm": (config.head_dim,),
            "self_attn.k_norm": (config.head_dim,),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }.items():
            shapes[f"layers.{i}.{name}.weight"] = shape
    return shapes


def check_weights(weights: Mapping[str, Tensor], config: DrafterConfig, place: Path) -> None:
    """Whether these are all the weights of such a drafter and nothing else.

    Raises:
        ConfigError: the first weight that is missing, left over, or of another shape.
    """
    expected = weight_shapes(config)
    for name in sorted(expected.keys() | weights.keys()):
        if name not in weights:
            raise ConfigError(
                f"{place} lacks {name}; its settings want {sorted(expected)[:3]} … ({len(expected)} weights)"
            )
        if name not in expected:
            raise ConfigError(f"{place} has {name}, which a drafter with its settings does not have")
        if tuple(weights[name].shape) != expected[name]:
            raise ConfigError(
                f"{place}: {name} has shape {tuple(weights[name].shape)}, its settings want {expected[name]}"
            )
