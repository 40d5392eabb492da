"""One target over several devices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import column, same_bits, small_config, small_run, weights_of
from tiny import gemma3, qwen3, qwen36, spread
from torch import nn

from dflash_train import spread as spread_module
from dflash_train.config import ConfigError
from dflash_train.spread import plan_layers
from dflash_train.targets import Target, _find_decoder, load_target

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(0, 5000), st.data())
def test_layers_are_shared_out_in_order_and_no_device_is_left_out(sizes: list[int], rest: int, data: st.DataObject) -> None:
    num_devices = data.draw(st.integers(1, len(sizes)))
    places = plan_layers(sizes, rest, num_devices)
    assert places == sorted(places)
    assert set(places) | {0} == set(range(num_devices))


def test_equal_layers_are_shared_out_evenly_and_what_else_there_is_counts_for_the_first() -> None:
    assert plan_layers([10] * 8, 0, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert plan_layers([10] * 8, 20, 2) == [0, 0, 0, 1, 1, 1, 1, 1]
    with pytest.raises(ConfigError, match=r"target\.spread is 3, but the target has 2 layers; lower it"):
        plan_layers([1, 1], 0, 3)


@pytest.mark.parametrize("make", [qwen3, gemma3, lambda: qwen36(8)], ids=["qwen3", "gemma3", "qwen3.6"])
def test_a_target_over_three_devices_gives_the_states_of_one(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices are all the CPU; where each tensor is brought to is recorded."""
    pytest.importorskip("transformers")
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(spread(make()))
    whole, model = Target(models[0], (1, 3)), models[1]
    groups = [torch.device("cpu"), torch.device("cpu", 0), torch.device("cpu", 1)]
    visited: list[torch.device] = []
    original = spread_module._moved

    def moved(value: object, device: torch.device) -> object:
        visited.append(device)
        return original(value, torch.device("cpu"))

    monkeypatch.setattr(spread_module, "_moved", moved)
    monkeypatch.setattr(nn.Module, "to", lambda module, device: module)
    layers = _find_decoder(model, "tiny")[1]
    shared = Target(spread_module.spread(model, layers, groups), (1, 3))
    visited.clear()
    rows = torch.randint(0, 100, (2, 12)), torch.zeros(2, 12, dtype=torch.int64), torch.arange(12).expand(2, 12)
    ours, theirs = shared.states(*rows), whole.states(*rows)
    assert torch.equal(ours.taps, theirs.taps)
    assert torch.equal(ours.final, theirs.final)
    assert set(visited) == set(groups)
    assert visited[-1] == groups[0]  # brought back


def test_a_run_with_a_spread_target_is_the_run_without(tiny_data: Path, tmp_path: Path) -> None:
    small_run(tiny_data, tmp_path / "one")
    small_run(tiny_data, tmp_path / "spread", "target.spread=2", "train.target_devices=cpu,cpu,cpu,cpu")
    assert column(tmp_path / "one", "loss") == column(tmp_path / "spread", "loss")
    assert same_bits(weights_of(tmp_path / "one", 8), weights_of(tmp_path / "spread", 8))
    with pytest.raises(ConfigError, match=r"target\.spread is 2, but train\.target_devices has 3 devices; give a multiple"):
        small_run(tiny_data, tmp_path / "odd", "target.spread=2", "train.target_devices=cpu,cpu,cpu")


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_target_over_two_gpus_gives_the_states_of_one(tiny_data: Path) -> None:
    config = small_config(tiny_data)
    one = load_target(config.target, (1, 3, 5), "cuda:0")
    two = load_target(config.target, (1, 3, 5), "cuda:0", "cuda:1")
    assert {parameter.device.index for parameter in two.model.parameters()} == {0, 1}
    rows = [torch.randint(0, 200, (2, 12)), torch.zeros(2, 12, dtype=torch.int64), torch.arange(12).repeat(2, 1)]
    ours, theirs = (target.states(*(tensor.cuda(0) for tensor in rows)) for target in (two, one))
    assert torch.equal(ours.taps, theirs.taps)
    assert torch.equal(ours.final, theirs.final)
