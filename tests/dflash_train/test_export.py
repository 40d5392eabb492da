import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_config, tiny_drafter
from torch import Tensor

from dflash_train.config import ConfigError, DrafterConfig, LossConfig, RunConfig, default_tap_layers
from dflash_train.drafter_files import WEIGHTS, check_weights, read_run, save_drafter, weight_shapes
from dflash_train.export import export_run
from dflash_train.import_drafter import import_drafter

SLIDING: dict[str, Any] = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


def saved_run(folder: Path, **changes: Any) -> tuple[RunConfig, dict[str, Tensor]]:
    config = RunConfig(drafter=tiny_config(**{"rope_theta": 5e6, **changes}), loss=LossConfig(kl=0.5))
    weights = tiny_drafter(config.drafter).state_dict()
    save_drafter(folder, weights, config)
    return config, weights


def exported(tmp_path: Path, format: str, **changes: Any) -> dict[str, Any]:
    saved_run(tmp_path / "run", **changes)
    export_run(tmp_path / "run", tmp_path / "out", format=format, dtype="float32")  # type: ignore[arg-type]
    record: dict[str, Any] = json.loads((tmp_path / "out" / "config.json").read_text())
    return record


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
@pytest.mark.parametrize("changes", [{}, SLIDING, {"target_layer_ids": (0, 3, 7)}])
def test_what_is_exported_comes_back_equal(format: str, changes: dict[str, Any], tmp_path: Path) -> None:
    config, weights = saved_run(tmp_path / "run", **changes)
    export_run(tmp_path / "run", tmp_path / "out", format=format, dtype="float32")  # type: ignore[arg-type]
    drafter, read = import_drafter(tmp_path / "out")
    expected = dataclasses.replace(
        config.drafter,
        layer_types=config.drafter.layers,
        target_layer_ids=config.drafter.taps,
        num_taps=drafter.num_taps,
        sliding_rule=drafter.sliding_rule,
    )
    assert drafter == expected
    assert drafter.sliding_rule == ("specforge" if format == "z-lab" else "speculators")
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_only_the_drafters_body_is_written_in_the_asked_type(tmp_path: Path) -> None:
    """11 tensors a layer and 3 more; no embedding, head or rotary table (SpecForge #455)."""
    config, _ = saved_run(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", format="z-lab")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert weights.keys() == weight_shapes(config.drafter).keys()
    assert len(weights) == 11 * 2 + 3
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


def test_weight_names_and_shapes_are_the_modules() -> None:
    config = tiny_config(num_taps=3)
    assert {n: tuple(w.shape) for n, w in tiny_drafter(config).state_dict().items()} == weight_shapes(config)


def sglang(record: dict[str, Any]) -> dict[str, Any]:
    """SGLang's `parse_dflash_draft_config`: dflash_config first, then the top level; the mask token in the former
    only."""
    inner = record["dflash_config"]
    both = {k: inner.get(k, record.get(k)) for k in ("num_target_layers", "block_size", "target_layer_ids")}
    assert all(isinstance(both[k], int) and both[k] >= 1 for k in ("num_target_layers", "block_size"))
    assert all(0 <= i < both["num_target_layers"] for i in both["target_layer_ids"])
    assert isinstance(inner["mask_token_id"], int)
    assert inner["mask_token_id"] >= 0
    for absent in ("projector_type", "conv_kernel_size", "selector_rank", "shift_label", "attention_sink_bias"):
        assert absent not in inner
        assert absent not in record
    assert record["hidden_act"] == "silu"
    return both | {"mask_token_id": inner["mask_token_id"], "num_layers": record["num_hidden_layers"]}


def vllm_causal(record: dict[str, Any], layer: int) -> bool:
    """vLLM's rule for one layer: is_causal, then dflash_config.causal, then the kind of layer."""
    if record.get("is_causal") is not None:
        return bool(record["is_causal"])
    if record["dflash_config"].get("causal") is not None:
        return bool(record["dflash_config"]["causal"])
    return bool(record["layer_types"][layer] == "sliding_attention")


@pytest.mark.parametrize("changes", [{}, SLIDING, {**SLIDING, "sliding_rule": "modelopt"}])
def test_servers_read_every_field_as_it_was_trained(changes: dict[str, Any], tmp_path: Path) -> None:
    record = exported(tmp_path, "z-lab", **changes)
    drafter = tiny_config(**changes)
    assert sglang(record) == {
        "num_target_layers": 8, "block_size": 4, "target_layer_ids": [1, 5], "mask_token_id": 96, "num_layers": 2,
    }  # fmt: skip
    assert record["block_size"] == record["dflash_config"]["block_size"] == 4
    assert record["architectures"] == ["DFlashDraftModel"]
    assert (record["model_type"], record["tie_word_embeddings"]) == ("qwen3", False)
    # RoPE: the same base under both names, nothing partial or scaled (speculators #613, ModelOpt #2221).
    assert record["rope_theta"] == record["rope_parameters"]["rope_theta"] == 5e6
    assert record["rope_parameters"]["rope_type"] == "default"
    assert not {"rope_scaling", "partial_rotary_factor", "mrope_section"} & (
        record.keys() | record["rope_parameters"].keys()
    )
    assert record["layer_types"] == list(drafter.layers)
    assert record["use_sliding_window"] is bool(changes)
    assert record["sliding_window"] == (6 if changes else None)
    causal = [vllm_causal(record, layer) for layer in range(2)]
    assert causal == [
        drafter.layers[i] == "sliding_attention" and drafter.sliding_rule == "specforge" for i in range(2)
    ]


def test_gemma_style_scalars_are_written_where_dflash_reads_them(tmp_path: Path) -> None:
    record = exported(tmp_path, "z-lab", embedding_scale=25.25, logit_softcap=30.0)
    for place in (record, record["dflash_config"]):
        assert (place["input_embedding_scale"], place["final_logit_softcapping"]) == (25.25, 30.0)
    drafter, _ = import_drafter(tmp_path / "out")
    assert (drafter.embedding_scale, drafter.logit_softcap) == (25.25, 30.0)


def test_speculators_layers_and_token_counts_follow_its_conventions(tmp_path: Path) -> None:
    """Its ids are ours + 1 (vLLM #40727); B-1 speculative tokens, or B from the anchor (speculators #456)."""
    record = exported(tmp_path, "speculators")
    assert record["aux_hidden_state_layer_ids"] == [2, 6]
    assert record["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (record["sample_from_anchor"], record["draft_vocab_size"]) == (False, 97)
    from_anchor = exported(tmp_path / "b", "speculators", sample_from_anchor=True)
    assert from_anchor["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
    assert import_drafter(tmp_path / "b" / "out")[0].sample_from_anchor


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("z-lab", {"sample_from_anchor": True}, "off by one; export with --format speculators"),
        ("z-lab", {**SLIDING, "sliding_rule": "speculators"}, "count the window from the query"),
        (
            "speculators",
            {"embedding_scale": 2.0},
            "drafter.embedding_scale is 2.0, which speculators' format cannot say",
        ),
        ("speculators", {"logit_softcap": 5.0}, "export with --format z-lab"),
    ],
)
def test_what_a_format_cannot_say_is_refused(
    format: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path, format, **changes)
    assert message in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_card_states_what_a_server_needs(tmp_path: Path) -> None:
    exported(tmp_path, "z-lab", **SLIDING)
    card = (tmp_path / "out" / "README.md").read_text()
    for fact in (
        "proposes 3 tokens",
        "| 4, anchor included |",
        "1, 5",
        "sliding, full (window 6, rule specforge)",
        "ce 1, kl 0.5",
    ):
        assert fact in card


def test_an_existing_export_is_kept_unless_told(tmp_path: Path) -> None:
    exported(tmp_path, "z-lab")
    with pytest.raises(ConfigError, match="out exists; pass --overwrite or another -o DIR"):
        export_run(tmp_path / "run", tmp_path / "out", format="z-lab")
    export_run(tmp_path / "run", tmp_path / "out", format="speculators", overwrite=True)
    assert "speculators_model_type" in (tmp_path / "out" / "config.json").read_text()


def test_the_latest_finished_step_of_a_run_is_taken(tmp_path: Path) -> None:
    for step in (5, 100, 20):
        saved_run(tmp_path / f"step-{step:06d}", rope_theta=1000.0 + step)
    (tmp_path / "step-000200").mkdir()  # broken off before its weights
    assert read_run(tmp_path)[0].drafter.rope_theta == 1100.0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / WEIGHTS).unlink(), "has no drafter.safetensors, nor has any step-* folder"),
        (lambda d: (d / WEIGHTS).write_bytes(b"x"), "cannot be read as safetensors"),
        (
            lambda d: save_file({"fc.weight": torch.zeros(1)}, d / WEIGHTS),
            "fc.weight has shape (1,), its settings want (32, 64)",
        ),
        (lambda d: (d / "config.toml").unlink(), "neither a preset"),
    ],
)
def test_a_damaged_run_is_refused(damage: Any, message: str, tmp_path: Path) -> None:
    saved_run(tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError) as caught:
        read_run(tmp_path)
    assert message in str(caught.value)


def test_a_missing_or_extra_weight_is_named() -> None:
    config = tiny_config()
    weights = tiny_drafter(config).state_dict()
    extra = weights | {"layers.2.mlp.up_proj.weight": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"f has layers\.2\.mlp\.up_proj\.weight, which a drafter with its settings"):
        check_weights(extra, config, Path("f"))
    del weights["norm.weight"]
    with pytest.raises(ConfigError, match=r"f lacks norm\.weight"):
        check_weights(weights, config, Path("f"))


def edited(tmp_path: Path, edit: Any, format: str = "z-lab") -> Path:
    record = exported(tmp_path, format)
    edit(record)
    (tmp_path / "out" / "config.json").write_text(json.dumps(record))
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda r: r.pop("rope_theta") and r.pop("rope_parameters"), "guessing it would ruin acceptance"),
        (lambda r: r["rope_parameters"].update(rope_type="yarn"), "RoPE of type 'yarn'"),
        (lambda r: r.update(rope_scaling={"type": "linear", "factor": 2}), "RoPE of type 'linear'"),
        (lambda r: r.update(partial_rotary_factor=0.25), "rotates 0.25 of each head"),
        (lambda r: r.update(attention_bias=True), "attention_bias True"),
        (lambda r: r["dflash_config"].update(projector_type="domino"), "projector_type 'domino'"),
        (lambda r: r["dflash_config"].update(conv_kernel_size=2), "conv_kernel_size 2"),
        (lambda r: r["dflash_config"].update(causal=True), "causal in the block"),
        (lambda r: r["dflash_config"].pop("mask_token_id"), "mask_token_id None; a whole number is needed"),
        (lambda r: r.update(hidden_size="32"), "hidden_size '32'; a whole number is needed"),
        (lambda r: r.update(layer_types=["linear_attention"] * 2), "full and sliding attention are supported"),
        (lambda r: r["dflash_config"].update(target_layer_ids=[9, 1]), "must lie in 0 … 7"),
        (lambda r: r.pop("dflash_config"), "has no dflash_config"),
        (lambda r: r.update(hidden_size=64), "has shape"),
    ],
)
def test_a_drafter_of_another_kind_is_never_read_as_ours(edit: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        import_drafter(edited(tmp_path, edit))
    assert message in str(caught.value)


def test_published_variants_of_the_same_fields_are_read(tmp_path: Path) -> None:
    """RoPE's base at one place only, block size inside only, ids left to the rule, a `model.` prefix, a borrowed
    head."""

    def edit(record: dict[str, Any]) -> None:
        del record["rope_theta"], record["block_size"], record["dflash_config"]["target_layer_ids"]
        record["rope_scaling"] = None

    folder = edited(tmp_path, edit)
    weights = load_file(folder / "model.safetensors")
    prefixed = {f"model.{name}": w for name, w in weights.items()} | {"lm_head.weight": torch.zeros(97, 32)}
    save_file(prefixed, folder / "model.safetensors")
    drafter, read = import_drafter(folder)
    assert (drafter.rope_theta, drafter.block_size, drafter.taps) == (5e6, 4, default_tap_layers(8, 2))
    assert read.keys() == weights.keys()


def test_speculators_files_need_the_targets_depth(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda record: record.pop("num_target_layers"), "speculators")
    with pytest.raises(ConfigError, match="pass num_target_layers"):
        import_drafter(folder)
    assert import_drafter(folder, num_target_layers=8)[0].taps == (1, 5)


def test_a_reduced_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = edited(tmp_path, lambda record: None, "speculators")
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"d2t": torch.zeros(4)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="reduced vocabulary"):
        import_drafter(folder)


def test_an_imported_drafter_is_a_warm_start(tmp_path: Path) -> None:
    _, weights = saved_run(tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "out", format="z-lab", dtype="float32")
    from dflash_train.drafter import Drafter

    config, read = import_drafter(tmp_path / "out")
    assert isinstance(config, DrafterConfig)
    drafter = Drafter(config)
    drafter.load_state_dict(read, strict=True)
    assert torch.equal(drafter.fc.weight, weights["fc.weight"])
