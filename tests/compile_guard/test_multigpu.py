"""One thread for each device. Real GPUs, or `--logical-devices N`: N threads' worth on one GPU or the CPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from compile_guard import Worker

pytestmark = pytest.mark.multigpu


def run_workers(devices: list[torch.device], target: Any) -> list[Any]:
    workers = [
        Worker(target, device=device, args=[number, device], name=f"worker-{number}", seed=number)
        for number, device in enumerate(devices)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert not worker.is_alive(), f"{worker.name} hangs"
    return [worker.result for worker in workers]


def backend_for(device: torch.device) -> str:
    return "inductor" if device.type == "cuda" else "aot_eager"


class Drafter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(lambda x, layer=layer: layer(x).relu() + x, x, use_reentrant=False)
        return x


def test_each_device_trains_as_it_does_alone(guard: Any, devices: list[torch.device]) -> None:
    def train(number: int, device: torch.device) -> list[float]:
        generator = torch.Generator().manual_seed(number)
        drafter = Drafter()
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        drafter.to(device)
        compiled = compile_guard.compile(drafter, backend=backend_for(device))
        optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            loss = compiled(torch.randn(4, 16, generator=generator).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    together = run_workers(devices, train)
    alone = [
        run_workers([device], lambda _, device, number=number: train(number, device))[0]
        for number, device in enumerate(devices)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert [str(found) for found in guard.findings() if not found.prevented] == []


def test_one_wrapper_has_one_entry_for_each_device(guard: Any, devices: list[torch.device]) -> None:
    compiled = compile_guard.compile(lambda x: x.sin() * 2, backend=backend_for(devices[0]))
    together = threading.Barrier(len(devices))

    def call(number: int, device: torch.device) -> None:
        x = torch.full((8,), float(number), device=device)
        together.wait(60)
        torch.testing.assert_close(compiled(x), x.sin() * 2)

    run_workers(devices, call)
    info = compiled.cache_info()
    assert set(info) == set(devices)
    assert [each.num_entries for each in info.values()] == [1] * len(set(devices))


def test_more_devices_than_the_limit_run_compiled(guard: Any, devices: list[torch.device]) -> None:
    compiled = [compile_guard.compile(lambda x: x + 1, backend="eager", dynamic=False) for _ in range(12)]

    def call(number: int, device: torch.device) -> None:
        for each in compiled:
            each(torch.ones(2 + number, device=device))

    run_workers(devices, call)
    assert [found.code for found in guard.findings() if found.code == "recompile-limit"] == []


def test_worker_has_its_device_current(guard: Any, devices: list[torch.device]) -> None:
    if devices[0].type != "cuda":
        pytest.skip("the CPU has no current device")
    assert run_workers(devices, lambda _, device: torch.cuda.current_device() == device.index) == [True] * len(devices)
