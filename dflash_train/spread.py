"""One model over several devices: its layers in order, everything else on the first device.

For targets that no device holds alone. The devices work one after the other on a batch: it is room that is gained, not speed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from dflash_train.config import ConfigError


def plan_layers(sizes: Sequence[int], rest: int, num_devices: int) -> list[int]:
    """Which device each layer is on, so that all hold about the same.

    Args:
        sizes: bytes of each layer.
        rest: bytes of everything else, which is on device 0.
        num_devices: at least 1.

    Raises:
        ConfigError: fewer layers than devices.
    """
    if len(sizes) < num_devices:
        raise ConfigError(f"target.spread is {num_devices}, but the target has {len(sizes)} layers; lower it")
    share = (rest + sum(sizes)) / num_devices
    places: list[int] = []
    before, place = float(rest), 0
    for i, size in enumerate(sizes):
        wanted = int((before + size / 2) / share)
        # In order, no device left out, and a layer left for each that follows.
        at_least = max(wanted, place, num_devices - len(sizes) + i)
        place = min(at_least, place + 1, num_devices - 1)
        places.append(place)
        before += size
    return places


def spread(model: nn.Module, layers: nn.ModuleList, devices: Sequence[torch.device]) -> nn.Module:
    """Move a model to several devices; its `forward` takes and returns tensors of the first one, as before."""
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    rest = sum(parameter.nbytes for parameter in model.parameters()) - sum(sizes)
    for number, (layer, place) in enumerate(zip(layers, plan_layers(sizes, rest, len(devices)), strict=True)):
        layer.to(devices[place])
        back = devices[0] if number == len(layers) - 1 else devices[place]
        layer.forward = _run_on(layer.forward, devices[place], back)
    inside = set(layers.modules())
    for module in model.modules():
        if module not in inside:
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        tensor.data = tensor.data.to(devices[0])
    return model


def _run_on(forward: Callable[..., Any], device: torch.device, back: torch.device) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*arguments: Any, **options: Any) -> Any:
        # Triton launches on the current device, not on that of its tensors.
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return _moved(forward(*_moved(arguments, device), **_moved(options, device)), back)

    return run


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    if type(value) is dict:
        return {key: _moved(item, device) for key, item in value.items()}
    return value
