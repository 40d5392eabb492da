"""One thread for each device. Real GPUs, or `--logical-devices N`: N threads' worth on one GPU or the CPU."""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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


def train_steps(device: torch.device, seed: int, num_steps: int = 3) -> list[float]:
    """Losses of a checkpointed drafter that is compiled on the device."""
    generator = torch.Generator().manual_seed(seed)
    drafter = Drafter()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    drafter.to(device)
    compiled = compile_guard.compile(drafter, backend=backend_for(device))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=0.1)
    losses = []
    for _ in range(num_steps):
        loss = compiled(torch.randn(4, 16, generator=generator).to(device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def nothing_happened(guard: Any) -> bool:
    return [str(found) for found in guard.findings() if not found.prevented] == []


def test_each_device_trains_as_it_does_alone(guard: Any, devices: list[torch.device]) -> None:
    together = run_workers(devices, lambda number, device: train_steps(device, number))
    alone = [
        run_workers([device], lambda _, device, number=number: train_steps(device, number))[0]
        for number, device in enumerate(devices)
    ]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert nothing_happened(guard)


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


def test_drafters_that_share_one_device_train_as_they_do_alone(guard: Any, devices: list[torch.device]) -> None:
    shared = [devices[0]] * 3
    together = run_workers(shared, lambda number, device: train_steps(device, number))
    alone = [run_workers([devices[0]], lambda _, device, seed=seed: train_steps(device, seed))[0] for seed in range(3)]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert nothing_happened(guard)


def test_targets_feed_drafters_through_a_queue(guard: Any, devices: list[torch.device]) -> None:
    """Threads that only call forward, on the first devices, hand their outputs to threads that train, on the last."""
    num_batches, num_targets = 4, 2
    handed: queue.Queue[torch.Tensor] = queue.Queue(maxsize=2)
    target = compile_guard.compile(lambda x: x.sin() * 2, backend=backend_for(devices[0]))

    def body(number: int, device: torch.device) -> int:
        if number < num_targets:
            with torch.no_grad():
                for batch in range(num_batches):
                    made = target(torch.full((4, 16), float(batch), device=device))
                    handed.put(made, timeout=60)
            return num_batches
        drafter = Drafter().to(device)
        compiled = compile_guard.compile(drafter, backend=backend_for(device))
        for _ in range(num_targets * num_batches // 2):
            compiled(handed.get(timeout=60).to(device)).sum().backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())
        return num_targets * num_batches // 2

    done = run_workers([devices[0], devices[-1], devices[-1], devices[0]], body)
    assert done == [num_batches, num_batches, 4, 4]
    assert handed.empty()
    assert nothing_happened(guard)


def test_an_evaluation_beside_training_has_grad_mode_dropout_and_results_of_its_own(
    guard: Any, devices: list[torch.device]
) -> None:
    layer = nn.Sequential(nn.Linear(16, 16), nn.ReLU()).to(devices[0]).eval()
    evaluated = compile_guard.compile(layer, backend=backend_for(devices[0]))
    x = torch.ones(4, 16, device=devices[0])
    with torch.no_grad():
        expected = layer(x)

    def body(number: int, device: torch.device) -> Any:
        if number:
            return train_steps(device, seed=7)
        with torch.no_grad():
            for _ in range(10):
                made = evaluated(x)
                assert not made.requires_grad
                torch.testing.assert_close(made, expected)
        return None

    _, losses = run_workers([devices[0], devices[-1]], body)
    assert losses == pytest.approx(run_workers([devices[-1]], lambda _, device: train_steps(device, seed=7))[0], rel=1e-4)
    assert nothing_happened(guard)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_loader_that_forks_beside_training_hangs_nobody(guard: Any, devices: list[torch.device]) -> None:
    """CUDA does not work in a forked child: the loader's workers keep to the CPU, as they must."""
    if devices[0].type == "cuda" and torch.cuda.is_initialized():
        pytest.skip("a process that has initialised CUDA is not forked here: its driver has threads of its own")
    numbers = [torch.full((16,), float(number)) for number in range(8)]

    def body(number: int, device: torch.device) -> Any:
        if number:
            return train_steps(device, seed=number)
        loader = DataLoader(numbers, batch_size=2, num_workers=2, multiprocessing_context="fork", timeout=120)
        return [batch[:, 0].tolist() for batch in loader]

    loaded, *losses = run_workers([devices[0], *devices], body)
    assert loaded == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    assert all(len(each) == 3 for each in losses)


def test_worker_has_its_device_current(guard: Any, devices: list[torch.device]) -> None:
    if devices[0].type != "cuda":
        pytest.skip("the CPU has no current device")
    assert run_workers(devices, lambda _, device: torch.cuda.current_device() == device.index) == [True] * len(devices)
