"""Equality with three independent implementations: dflash 0.1.0 (z-lab), specforge 0.2.0 and speculators 0.9.0.

Each test skips with a reason where the peer is not installed. Install: `pip install torch transformers`, then
`pip install --no-deps dflash==0.1.0 specforge==0.2.0 speculators==0.9.0` and `pip install openai datasets
pydantic-settings loguru` for what they import. Run `pytest -m parity -s` to see the differences.
"""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny import VOCAB, Rows, hidden_states, make_anchors, make_rows, tiny_config, tiny_drafter, tiny_vocabulary
from torch import Tensor, nn

from dflash_train.config import DrafterConfig, LossConfig, RunConfig
from dflash_train.drafter import Drafter, draft_slots
from dflash_train.drafter_files import save_drafter
from dflash_train.export import export_run
from dflash_train.losses import block_loss
from dflash_train.vocabulary import Vocabulary

pytestmark = pytest.mark.parity

LENGTH, ANCHORS, B = 24, [6, 11, 18], 4
SLIDING = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6}


def peer(module: str, package: str) -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ImportError as error:
            pytest.skip(f"{package} is not installed: {error}")


def show(what: str, ours: Tensor | float, theirs: Tensor | float) -> float:
    difference = float((torch.as_tensor(ours) - torch.as_tensor(theirs)).detach().abs().max())
    print(f"\n  {what}: largest difference {difference:.2e}")
    return difference


def qwen3_config(config: DrafterConfig) -> Any:
    """What all three peers read, as a `transformers` config object."""
    transformers = pytest.importorskip("transformers")
    qwen3 = transformers.Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        layer_types=list(config.layers),
        use_sliding_window=config.sliding_window > 0,
        sliding_window=config.sliding_window or None,
    )
    # Qwen3Config resets both, from fields that a drafter does not have.
    qwen3.layer_types = list(config.layers)
    qwen3.sliding_window = config.sliding_window or None
    qwen3._attn_implementation = "eager"
    qwen3.num_target_layers = config.num_target_layers
    qwen3.block_size = config.block_size
    qwen3.dflash_config = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.taps)}
    return qwen3


def golden(**changes: Any) -> tuple[DrafterConfig, Drafter, Vocabulary, Rows]:
    """The golden experiment: one document of 24 tokens, its first five unsupervised."""
    config = tiny_config(rope_theta=1e6, **changes)
    rows = make_rows([[LENGTH]], LENGTH, config)
    rows.loss_mask[:] = torch.arange(LENGTH) >= 5
    return config, tiny_drafter(config), tiny_vocabulary(config), rows


def zlab_drafter(config: DrafterConfig, drafter: Drafter) -> nn.Module:
    model: nn.Module = peer("dflash.model", "dflash").DFlashDraftModel(qwen3_config(config))
    model.load_state_dict(drafter.state_dict(), strict=True)
    return model.eval()


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_hidden_states_equal_z_labs_one_block_at_a_time(changes: dict[str, Any]) -> None:
    """z-lab's inference needs no mask of ours: its context is what precedes the anchor, its sliding rule its own."""
    config, drafter, vocabulary, rows = golden(**changes)
    model = zlab_drafter(config, drafter)
    anchors = make_anchors([ANCHORS], 4)
    packed = hidden_states(drafter, vocabulary, rows, anchors).unflatten(1, (4, B))
    ids = rows.blocks(anchors, config).ids.unflatten(1, (4, B))
    worst = 0.0
    for j, a in enumerate(ANCHORS):
        theirs = model(
            position_ids=torch.arange(a + B)[None],
            noise_embedding=vocabulary.embed(ids[:, j]),
            target_hidden=rows.taps[:, :a],
        )
        worst = max(worst, show(f"z-lab, anchor {a}, {config.layers[0]}", packed[:, j], theirs))
    assert worst <= 1e-5


def specforge_model(
    config: DrafterConfig, drafter: Drafter, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> Any:
    family = peer("specforge.algorithms.common.dflash_family_model", "specforge")
    module = peer("specforge.modeling.draft.dflash", "specforge")
    model = module.DFlashDraftModel(qwen3_config(config))
    model.load_state_dict(drafter.state_dict(), strict=True)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    head.weight = nn.Parameter(vocabulary.head, requires_grad=False)
    embedding = nn.Embedding.from_pretrained(vocabulary.embedding)
    online = family.OnlineDFlashModel(
        model, head, embedding, config.mask_token_id, block_size=B, attention_backend="eager", **settings
    )
    fixed = torch.tensor([ANCHORS]), torch.ones(1, len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(online, "_sample_anchor_positions", lambda *_: fixed)
    return online


def our_loss(drafter: Drafter, vocabulary: Vocabulary, rows: Rows, loss: LossConfig) -> tuple[Any, dict[str, Tensor]]:
    anchors = make_anchors([ANCHORS], 4)
    blocks = rows.blocks(anchors, drafter.config)
    hidden = draft_slots(hidden_states(drafter, vocabulary, rows, anchors), blocks, drafter.config)
    teacher = rows.final.flatten(0, 1)
    sums = block_loss(hidden, blocks.labels, blocks.supervised, vocabulary, loss, teacher, blocks.teacher_positions)
    drafter.zero_grad()
    sums.mean().backward()
    return sums, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("changes", [{}, SLIDING])
def test_packed_hidden_states_equal_specforges(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    config, drafter, vocabulary, rows = golden(**changes)
    online = specforge_model(config, drafter, vocabulary, monkeypatch)
    _, _, theirs = online._forward_draft_blocks(rows.tokens, rows.taps, rows.loss_mask.float())
    ours = hidden_states(drafter, vocabulary, rows, make_anchors([ANCHORS], 3))
    assert show(f"SpecForge, {config.layers[0]}", ours, theirs) <= 1e-5


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({"loss_decay_gamma": 7.0}, LossConfig(decay_gamma=7.0)),
        ({"loss_decay_gamma": 7.0, "objective_chunk_blocks": 1}, LossConfig(decay_gamma=7.0, chunk_rows=3)),
        ({}, LossConfig(weighting="uniform")),
        ({"loss_type": "dpace", "dpace_alpha": 0.5}, LossConfig(weighting="dpace")),
    ],
    ids=["decay", "decay-chunked", "uniform", "dpace"],
)
def test_loss_and_gradients_equal_specforges(
    settings: dict[str, Any], loss: LossConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, drafter, vocabulary, rows = golden()
    rows.loss_mask[0, 13] = False
    online = specforge_model(config, drafter, vocabulary, monkeypatch, **settings)
    value, accuracy, _ = online(rows.tokens, rows.taps, rows.loss_mask.float())
    value.backward()
    sums, gradients = our_loss(drafter, vocabulary, rows, loss)
    # SpecForge divides D-PACE by the number of rows (1 here), we by the number of supervised slots.
    factor = sums.denominator.item() if loss.weighting == "dpace" else 1.0
    assert show("SpecForge loss", sums.mean().detach() * factor, value.detach()) <= 1e-5 * abs(value.item())
    assert (sums.correct / sums.supervised).item() == pytest.approx(accuracy.item())
    worst = max(
        float((gradients[name] * factor - p.grad).abs().max() / p.grad.abs().max())
        for name, p in online.draft_model.named_parameters()
    )
    print(f"\n  SpecForge gradients ({len(gradients)} tensors): largest relative difference {worst:.2e}")
    assert worst <= 1e-4
    assert set(gradients) == {name for name, _ in online.draft_model.named_parameters()}


def speculators_model(
    config: DrafterConfig, drafter: Drafter, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> Any:
    core = peer("speculators.models.dflash.core", "speculators")
    dflash = peer("speculators.models.dflash", "speculators")
    model = core.DFlashDraftModel(
        dflash.DFlashSpeculatorConfig(
            transformer_layer_config=qwen3_config(config),
            draft_vocab_size=config.vocab_size,
            block_size=B,
            aux_hidden_state_layer_ids=[i + 1 for i in config.taps],
            mask_token_id=config.mask_token_id,
            sample_from_anchor=config.sample_from_anchor,
        )
    )
    loaded = model.load_state_dict(drafter.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert {key.split(".")[0] for key in loaded.missing_keys} == {
        "embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm",
    }  # fmt: skip
    for name in ("lm_head", "verifier_lm_head"):
        getattr(model, name).weight.data.copy_(vocabulary.head)
    model.embed_tokens.weight.data.copy_(vocabulary.embedding)
    model.verifier_norm = nn.Identity()  # our teacher states are already normalised
    fixed = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *_: fixed)
    float_mask = core.create_float_mask
    # Its eager mask is bf16 by default, whose minimum is finite in fp32 all the same: keep the type of the model.
    monkeypatch.setattr(model, "_create_mask_fn", lambda *a, **k: float_mask(*a, **k).to(torch.float32))
    return model


def speculators_inputs(rows: Rows) -> dict[str, Tensor]:
    return {
        "hidden_states": rows.taps,
        "input_ids": rows.tokens,
        "loss_mask": rows.loss_mask.float(),
        "verifier_last_hidden_states": rows.final,
        "document_ids": rows.documents,
        "position_ids": rows.positions,
    }


@pytest.mark.parametrize("lengths", [[LENGTH], [9, 15]])
@pytest.mark.parametrize("rule", [None, "speculators"])
def test_packed_hidden_states_equal_speculators(
    lengths: list[int], rule: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed documents, and its own sliding rule."""
    config, drafter, vocabulary, _ = golden(**({**SLIDING, "sliding_rule": rule} if rule else {}))
    rows = make_rows([lengths], LENGTH, config)
    model = speculators_model(config, drafter, vocabulary, monkeypatch)
    theirs, *_ = model._backbone_forward(**speculators_inputs(rows), max_anchors=len(ANCHORS))
    ours = hidden_states(drafter, vocabulary, rows, make_anchors([ANCHORS], 3))
    assert show(f"speculators, documents {lengths}, {rule}", ours, theirs) <= 1e-5


@pytest.mark.parametrize(("term", "theirs"), [("kl", "kl_div"), ("rkl", "rkl"), ("tv", "tv"), ("lk", "lk_hybrid")])
@pytest.mark.parametrize("sample_from_anchor", [False, True])
def test_divergences_and_their_gradients_equal_speculators(
    term: str, theirs: str, sample_from_anchor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, drafter, vocabulary, rows = golden(sample_from_anchor=sample_from_anchor)
    model = speculators_model(config, drafter, vocabulary, monkeypatch)
    eager = peer("speculators.losses.eager", "speculators")
    function = {"kl_div": eager.kl_div_loss, "rkl": eager.reverse_kl_div_loss, "tv": eager.tv_loss,
                "lk_hybrid": eager.lk_hybrid_loss}[theirs]  # fmt: skip
    _, value, _ = model(
        **speculators_inputs(rows), max_anchors=len(ANCHORS), gamma=7.0, loss_config={theirs: (function, 1.0)}
    )
    value.backward()
    sums, gradients = our_loss(drafter, vocabulary, rows, LossConfig(**{"ce": 0.0, term: 1.0}))  # type: ignore[arg-type]
    # speculators divides by the undecayed count + 1e-5, we by the sum of the weights.
    factor = float(sums.denominator / (sums.supervised + 1e-5))
    assert show(f"speculators {theirs}", sums.mean().detach() * factor, value.detach()) <= 1e-5 * abs(value.item())
    worst = max(
        float((gradients[name] * factor - p.grad).abs().max() / p.grad.abs().max())
        for name, p in model.named_parameters()
        if name in gradients
    )
    print(f"\n  speculators {theirs} gradients: largest relative difference {worst:.2e}")
    assert worst <= 1e-4


def test_dpace_weights_equal_speculators() -> None:
    utils = peer("speculators.losses.utils", "speculators")
    from dflash_train.losses import dpace_weights

    generator = torch.Generator().manual_seed(0)
    cross_entropy = torch.rand(5, 3, generator=generator) * 4
    supervised = torch.rand(5, 3, generator=generator) < 0.7
    theirs = utils.dpace_loss_decay(
        None, supervised.view(1, -1), 3, 0.5, elementwise_loss=cross_entropy.view(1, -1)
    ).view(5, 3)
    ours = dpace_weights(cross_entropy, supervised, 0.5) * supervised
    assert show("speculators D-PACE weights", ours, theirs) <= 1e-6


@pytest.mark.parametrize("num_layers", [18, 28, 32, 36, 40, 48, 62, 64, 94])
@pytest.mark.parametrize("num_taps", [1, 3, 5, 6])
def test_tap_layers_equal_z_labs_and_specforges(num_layers: int, num_taps: int) -> None:
    from dflash_train.config import default_tap_layers

    for module in ("dflash.model", "specforge.modeling.draft.dflash"):
        theirs = peer(module, module.split(".")[0]).build_target_layer_ids(num_layers, num_taps)
        assert default_tap_layers(num_layers, num_taps) == tuple(theirs)


@pytest.mark.parametrize("changes", [{}, SLIDING, {**SLIDING, "sliding_rule": "modelopt"}])
def test_an_exported_drafter_gives_the_same_logits_in_dflash(changes: dict[str, Any], tmp_path: Path) -> None:
    """Loaded as `dflash` loads it, strictly; z-lab's own masks and RoPE."""
    zlab = peer("dflash.model", "dflash")
    config, drafter, vocabulary, rows = golden(**changes)
    save_drafter(tmp_path / "run", drafter.state_dict(), RunConfig(drafter=config))
    export_run(tmp_path / "run", tmp_path / "out", format="z-lab", dtype="float32")
    model, info = zlab.DFlashDraftModel.from_pretrained(
        tmp_path / "out", attn_implementation="sdpa", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (model.block_size, model.mask_token_id, tuple(model.target_layer_ids)) == (B, VOCAB - 1, config.taps)
    a = ANCHORS[1]
    anchors = make_anchors([[a]], 1)
    ids = rows.blocks(anchors, config).ids
    theirs = model(
        position_ids=torch.arange(a + B)[None],
        noise_embedding=vocabulary.embed(ids),
        target_hidden=rows.taps[:, :a],
    )
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    head.weight = nn.Parameter(vocabulary.head)
    ours = vocabulary.logits(hidden_states(drafter, vocabulary, rows, anchors))
    difference = show(f"z-lab logits of an export, {config.layers[0]}", ours, model.compute_logits(theirs, head))
    assert difference <= 1e-5 * float(ours.detach().abs().max())


@pytest.mark.parametrize("changes", [{}, {**SLIDING, "sliding_rule": "speculators"}])
def test_an_exported_drafter_gives_the_same_logits_in_speculators(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = peer("speculators.models.dflash.core", "speculators")
    config, drafter, vocabulary, rows = golden(**changes)
    save_drafter(tmp_path / "run", drafter.state_dict(), RunConfig(drafter=config))
    export_run(tmp_path / "run", tmp_path / "out", format="speculators", dtype="float32")
    model, info = core.DFlashDraftModel.from_pretrained(str(tmp_path / "out"), output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.target_layer_ids == [i + 1 for i in config.taps]
    assert model.config.speculators_config.proposal_methods[0].speculative_tokens == B - 1
    for name in ("lm_head", "verifier_lm_head"):
        getattr(model, name).weight.data.copy_(vocabulary.head)
    model.embed_tokens.weight.data.copy_(vocabulary.embedding)
    fixed = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
    monkeypatch.setattr(core, "select_anchors", lambda *_: fixed)
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    monkeypatch.setattr(model, "_create_mask_fn", lambda *a, **k: core.create_float_mask(*a, **k).to(torch.float32))
    _, theirs, *_ = model._backbone_forward(**speculators_inputs(rows), max_anchors=len(ANCHORS))
    ours = vocabulary.logits(hidden_states(drafter, vocabulary, rows, make_anchors([ANCHORS], 3)))
    assert show(f"speculators logits of an export, {config.layers[0]}", ours, theirs) <= 1e-5 * float(
        ours.detach().abs().max()
    )
