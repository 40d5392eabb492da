"""Averaging, the learning rate, and what one drafter does with a batch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import small_config

from dflash_train.averaging import Hosts, combine
from dflash_train.config import ConfigError, TrainConfig
from dflash_train.config_files import parse_config
from dflash_train.data import Documents
from dflash_train.packing import PackedDocuments
from dflash_train.pipeline import Source, Topology, with_states
from dflash_train.replica import Replica, learning_rate
from dflash_train.targets import load_target


def test_combine_gives_every_drafter_the_sum_times_the_factor() -> None:
    drafters = [[torch.full((2, 3), float(i)), torch.tensor(10.0 * i)] for i in (1, 2, 4)]
    combine(drafters, Hosts(), 0.5)
    for matrix, scalar in drafters:
        assert torch.equal(matrix, torch.full((2, 3), 3.5))
        assert float(scalar) == 35.0


def test_combine_sums_in_the_order_of_the_drafters() -> None:
    parts = [1e8, 1.0, -1e8, 1.0]
    drafters = [[torch.tensor(part)] for part in parts]
    combine(drafters, Hosts())
    expected = torch.tensor(0.0)
    for part in parts:
        expected = expected + torch.tensor(part)
    assert all(torch.equal(tensor, expected) for (tensor,) in drafters)


def test_the_rate_rises_then_falls_as_the_schedule_says() -> None:
    cosine = TrainConfig(steps=100, learning_rate=1.0, warmup_share=0.1)
    assert [learning_rate(step, cosine) for step in (0, 9)] == [1 / 11, 10 / 11]
    assert learning_rate(10, cosine) == 1.0
    assert learning_rate(55, cosine) == pytest.approx(0.5)
    assert learning_rate(99, cosine) == pytest.approx(0.5 * (1 + math.cos(math.pi * 89 / 90)))
    wsd = replace(cosine, schedule="wsd", decay_share=0.2, final_share=0.1)
    assert [learning_rate(step, wsd) for step in (10, 80)] == [1.0, 1.0]
    assert learning_rate(90, wsd) == pytest.approx(0.1 + 0.9 * 0.5)
    assert learning_rate(200, wsd) == pytest.approx(0.1)
    assert learning_rate(99, replace(cosine, schedule="constant")) == 1.0


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps = 0", "train.steps must be at least 1, got 0"),
        ("learning_rate = 0", "train.learning_rate must be positive and finite"),
        ("warmup_share = 2", "train.warmup_share must lie in 0 … 1, got 2"),
        ("beta2 = 1", "train.beta2 must lie in 0 … 1, 1 excluded"),
        ("synchronise = 'both'", "train.synchronise must be one of gradients, weights, got 'both'"),
    ],
)
def test_bad_training_settings_are_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"f.toml:2: ") as caught:
        parse_config(f"[train]\n{setting}", "f.toml")
    assert message in str(caught.value)


def one_replica(data: Path, *overrides: str) -> tuple[Replica, Source, object]:
    config = small_config(data, *overrides)
    target = load_target(config.target, config.drafter.taps)
    rows = PackedDocuments(Documents(data), config.data.row_length)
    source = Source(rows, config, Topology(drafters_here=1))
    vocabulary = target.vocabulary().to("cpu", getattr(torch, config.train.dtype))
    return Replica(config, torch.device("cpu"), vocabulary), source, target


def test_masters_stay_in_float32_and_start_equal_in_both_types(tiny_data: Path) -> None:
    wide, _, _ = one_replica(tiny_data)
    narrow, _, _ = one_replica(tiny_data, "train.dtype=bfloat16")
    for name, weight in narrow.masters.items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, wide.masters[name])
    assert {p.dtype for p in narrow.drafter.parameters()} == {torch.bfloat16}


def test_a_small_update_reaches_bf16_weights_through_their_masters(tiny_data: Path) -> None:
    """Ten steps of a rate below bf16's resolution move the masters, where bf16 weights alone would stand still."""
    replica, source, target = one_replica(tiny_data, "train.dtype=bfloat16", "train.learning_rate=1e-4")
    before = {name: weight.detach().clone() for name, weight in replica.masters.items()}
    for step in range(10):
        batch = with_states(source.batch(step), target)  # type: ignore[arg-type]
        states = batch.states
        assert states is not None
        narrow = type(states)(taps=states.taps.bfloat16(), final=states.final.bfloat16())
        sums = replica.accumulate(batch.rows, batch.anchors, narrow)
        replica.update(step, float(sums.denominator))
    norm = "layers.0.input_layernorm.weight"
    moved = (replica.masters[norm].detach() - before[norm]).abs().max()
    assert 0 < float(moved) < 2**-8  # bf16 has no value between 1 and 1 - 2**-8
    published = dict(replica.drafter.named_parameters())[norm]
    assert torch.equal(published, replica.masters[norm].bfloat16())


def test_a_gradient_that_is_not_finite_or_of_nothing_changes_nothing(tiny_data: Path) -> None:
    replica, _, _ = one_replica(tiny_data)
    before = {name: weight.detach().clone() for name, weight in replica.masters.items()}
    replica.gradients[0].fill_(float("nan"))
    norm, finite = replica.update(0, 1.0)
    assert not finite
    assert math.isnan(norm)
    assert replica.update(0, 0.0) == (0.0, True)
    assert all(torch.equal(weight, before[name]) for name, weight in replica.masters.items())
    assert all(float(gradient.abs().max()) == 0 for gradient in replica.gradients)
    assert float(replica.moments()["step.fc.weight"]) == 0


def test_the_gradient_is_clipped_to_the_norm_that_is_set(tiny_data: Path) -> None:
    replica, _, _ = one_replica(tiny_data, "train.clip=0.5")
    for gradient in replica.gradients:
        gradient.fill_(3.0)
    norm, _ = replica.update(0, 2.0)
    count = sum(gradient.numel() for gradient in replica.gradients)
    assert norm == pytest.approx(1.5 * math.sqrt(count), rel=1e-5)
    # The first moment after one step is (1 - beta1) times the gradient that the optimiser saw.
    moments = [value for name, value in replica.moments().items() if name.startswith("exp_avg.")]
    seen = float(torch.nn.utils.get_total_norm(moments)) / (1 - replica.config.train.beta1)
    assert seen == pytest.approx(0.5, rel=1e-5)
