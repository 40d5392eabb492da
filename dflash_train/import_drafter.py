"""Published drafters as a warm start: both formats that `export` writes, read strictly.

Whatever would make a drafter behave otherwise than its weights were trained (scaled or partial RoPE, biases, a
projector that we do not have) is an error, never ignored.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_train.config import ConfigError, DrafterConfig
from dflash_train.drafter_files import check_weights, read_weights

_BORROWED = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.", "rotary_emb.")


def import_drafter(folder: Path, *, num_target_layers: int | None = None) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Settings and weights of a drafter in z-lab's or speculators' format.

    Args:
        folder: has config.json and model.safetensors (or its shards and index).
        num_target_layers: of the target, for files that do not say it (speculators').

    Raises:
        ConfigError: a file is missing or damaged, or describes something that our drafter is not.
    """
    record = _read_json(folder / "config.json")
    config = _Reader(record, folder / "config.json", num_target_layers).drafter()
    weights = {name: w for name, w in _read_shards(folder).items() if not name.startswith(_BORROWED)}
    check_weights(weights, config, folder)
    return config, weights


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return record


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.is_file():
        listed = _read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ConfigError(f"{index} has no weight_map")
        names = sorted(set(map(str, listed.values())))
    weights: dict[str, Tensor] = {}
    for name in names:
        for key, weight in read_weights(folder / name).items():
            weights[key.removeprefix("model.")] = weight
    if reduced := [name for name in ("t2d", "d2t") if name in weights]:
        raise ConfigError(f"{folder} drafts from a reduced vocabulary ({', '.join(reduced)}), which is not supported")
    return weights


class _Reader:
    """The fields of one config.json, wherever its format has them."""

    def __init__(self, record: dict[str, Any], path: Path, num_target_layers: int | None) -> None:
        self._path = path
        self._speculators = record.get("speculators_model_type")
        self._record = record
        self._decoder = self._section("transformer_layer_config") if self._speculators else record
        self._dflash = {} if self._speculators else self._section("dflash_config")
        self._num_target_layers = num_target_layers

    def drafter(self) -> DrafterConfig:
        if self._speculators not in (None, "dflash"):
            raise self._refuse(f"is a {self._speculators} speculator; only dflash is supported")
        self._check_unsupported()
        layers = tuple(self._decoder.get("layer_types") or ())
        sliding = "sliding_attention" in layers
        values: dict[str, Any] = {
            "hidden_size": self._int(self._decoder, "hidden_size"),
            "intermediate_size": self._int(self._decoder, "intermediate_size"),
            "num_layers": self._int(self._decoder, "num_hidden_layers"),
            "num_heads": self._int(self._decoder, "num_attention_heads"),
            "num_kv_heads": self._int(self._decoder, "num_key_value_heads"),
            "head_dim": self._int(self._decoder, "head_dim"),
            "vocab_size": self._int(self._decoder, "vocab_size"),
            "max_position_embeddings": self._int(self._decoder, "max_position_embeddings"),
            "rms_norm_eps": self._number(self._decoder, "rms_norm_eps"),
            "rope_theta": self._rope_theta(),
            "layer_types": layers,
            "sliding_window": self._int(self._decoder, "sliding_window") if sliding else 0,
            "block_size": self._int(self._dflash, "block_size", self._record),
            "mask_token_id": self._int(self._dflash, "mask_token_id", self._record),
        }
        values |= self._taps()
        if self._speculators:
            values["sample_from_anchor"] = self._record.get("sample_from_anchor") is True
            bidirectional = self._record.get("sliding_window_non_causal") is True
            values["sliding_rule"] = "speculators-bidirectional" if bidirectional else "speculators"
        else:
            causal = self._record.get("is_causal", self._dflash.get("causal"))
            values["sliding_rule"] = "modelopt" if causal is False else "specforge"
            for ours, theirs in (
                ("embedding_scale", "input_embedding_scale"),
                ("logit_softcap", "final_logit_softcapping"),
            ):
                if self._dflash.get(theirs, self._record.get(theirs)) is not None:
                    values[ours] = self._number(self._dflash, theirs, self._record)
        if any(kind not in ("full_attention", "sliding_attention") for kind in layers):
            raise self._refuse(
                f"has layer_types {sorted(set(map(str, layers)))}; full and sliding attention are supported"
            )
        try:
            return DrafterConfig(**values)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from None

    def _taps(self) -> dict[str, Any]:
        num_layers = self._dflash.get(
            "num_target_layers", self._record.get("num_target_layers", self._num_target_layers)
        )
        if not _is_int(num_layers):
            raise self._refuse("does not say how many layers the target has; pass num_target_layers")
        if self._num_target_layers not in (None, num_layers):
            raise self._refuse(
                f"was trained on a target of {num_layers} layers, this one has {self._num_target_layers}"
            )
        key = "aux_hidden_state_layer_ids" if self._speculators else "target_layer_ids"
        ids = self._dflash.get(key, self._record.get(key))
        if ids is None and not self._speculators:
            return {"num_target_layers": num_layers, "num_taps": self._int(self._decoder, "num_hidden_layers")}
        if not isinstance(ids, list) or not ids or not all(map(_is_int, ids)):
            raise self._refuse(f"has {key} {ids!r}; a list of layer numbers is needed")
        shift = 1 if self._speculators else 0  # theirs are the layers that the states go into
        return {"num_target_layers": num_layers, "target_layer_ids": tuple(i - shift for i in ids)}

    def _rope_theta(self) -> float:
        parameters = self._decoder.get("rope_parameters")
        if isinstance(parameters, dict) and "rope_theta" in parameters:
            return self._number(parameters, "rope_theta")
        if "rope_theta" in self._decoder:
            return self._number(self._decoder, "rope_theta")
        raise self._refuse("has neither rope_parameters.rope_theta nor rope_theta; guessing it would ruin acceptance")

    def _check_unsupported(self) -> None:
        for place in (self._decoder, self._decoder.get("rope_parameters"), self._decoder.get("rope_scaling")):
            if not isinstance(place, dict):
                continue
            kind = place.get("rope_type", place.get("type", "default"))
            if place is not self._decoder and kind != "default":
                raise self._refuse(f"has RoPE of type {kind!r}; only unscaled RoPE is supported")
            if place.get("partial_rotary_factor", 1.0) != 1.0:
                raise self._refuse(
                    f"rotates {place['partial_rotary_factor']} of each head; only the whole head is supported"
                )
        for name, plain in (("attention_bias", False), ("hidden_act", "silu"), ("attention_sink_bias", None)):
            if self._decoder.get(name, plain) not in (plain, None):
                raise self._refuse(f"has {name} {self._decoder[name]!r}; only {plain!r} is supported")
        for name in ("projector_type", "conv_kernel_size", "selector_rank", "shift_label", "output_multiplier"):
            value = self._dflash.get(name, self._record.get(name))
            if value not in (None, False, 1.0, "dflash"):
                raise self._refuse(f"has {name} {value!r}, which plain DFlash does not have")
        causal = self._record.get("is_causal", self._dflash.get("causal"))
        layers = self._decoder.get("layer_types") or []
        if causal is True and "full_attention" in layers:
            raise self._refuse("has full layers that are causal in the block; only bidirectional ones are supported")

    def _section(self, name: str) -> dict[str, Any]:
        section = self._record.get(name)
        if not isinstance(section, dict):
            raise self._refuse(f"has no {name}; it is no drafter in z-lab's or speculators' format")
        return section

    def _int(self, section: dict[str, Any], name: str, fallback: dict[str, Any] | None = None) -> int:
        value = section.get(name, (fallback or {}).get(name))
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._refuse(f"has {name} {value!r}; a whole number is needed")
        return value

    def _number(self, section: dict[str, Any], name: str, fallback: dict[str, Any] | None = None) -> float:
        value = section.get(name, (fallback or {}).get(name))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._refuse(f"has {name} {value!r}; a number is needed")
        return float(value)

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path} {what}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
