"""Which devices a run has, as its settings name them."""

from __future__ import annotations

import torch

from dflash_train.config import ConfigError, RunConfig


def parse_devices(text: str, role: str) -> list[torch.device]:
    """Devices as they are written: `0-4` and `0,2` are GPUs, else torch's names; repeats are logical devices of one.

    `auto`: without a GPU the CPU, with one that one for both roles, else about three drafters for five targets.

    Raises:
        ConfigError: no such device, or unreadable text.
    """
    role_name = f"train.{role}_devices"
    num_gpus = torch.cuda.device_count()
    if text == "auto":
        if num_gpus == 0:
            return [torch.device("cpu")]
        num_drafters = max(1, round(num_gpus * 3 / 8))
        first, last = (0, max(1, num_gpus - num_drafters)) if role == "target" else (num_gpus - num_drafters, num_gpus)
        return [torch.device("cuda", i) for i in range(first, last)]
    devices: list[torch.device] = []
    for part in text.split(","):
        name = part.strip()
        start, dash, stop = name.partition("-")
        try:
            if start.isdecimal() and (stop.isdecimal() if dash else True):
                span = range(int(start), int(stop if dash else start) + 1)
                devices += [torch.device("cuda", i) for i in span]
                found = len(span) > 0
            else:
                device = torch.device(name)
                # `cpu:1` is a second logical device of the same memory, which torch calls `cpu`.
                devices.append(torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.index or 0))
                found = True
        except RuntimeError:
            found = False
        if not found:
            raise ConfigError(f"{role_name} is {text!r}; write GPUs as 0-4 or 0,2, or names such as cpu,cpu or cuda:0,cuda:0")
    missing = sorted({str(d) for d in devices if d.type == "cuda" and (d.index or 0) >= num_gpus})
    if missing:
        raise ConfigError(f"{role_name} names {', '.join(missing)}, but this machine has {num_gpus} GPUs; name those, or cpu")
    return devices


def target_groups(config: RunConfig) -> list[tuple[torch.device, ...]]:
    """The devices of each target thread: one, or the `target.spread` that hold its target together.

    Raises:
        ConfigError: no such device, or their number does not come out even.
    """
    devices, each = parse_devices(config.train.target_devices, "target"), config.target.spread
    if len(devices) % each:
        raise ConfigError(
            f"target.spread is {each}, but train.target_devices has {len(devices)} devices; give a multiple of {each}"
        )
    return [tuple(devices[i : i + each]) for i in range(0, len(devices), each)]


def group_name(group: tuple[torch.device, ...]) -> str:
    """The devices of a target thread, as they are shown."""
    return "+".join(map(str, group))
