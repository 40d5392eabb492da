"""Compile, trace, export, call and reset, mixed, in four threads: no error, no hang, no growth that torch has not by itself.

`--stress-iterations 1000` is what the project promises; `make test` runs fewer.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import compile_guard
from tests.threads import run_in_threads

pytestmark = pytest.mark.stress
NUM_THREADS = 4


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Work:
    """The operations, each of which checks what it got."""

    def __init__(self, *, guarded: bool) -> None:
        compiler: Any = compile_guard.compile if guarded else torch.compile
        self.warm = compiler(step, backend="eager")
        self.layer = Layer()
        self.module = compiler(self.layer, backend="eager")
        self.x = torch.ones(2, 4)
        self.operations: list[Callable[[], None]] = [
            self.call,
            self.call,
            self.call_module,
            self.compile,
            self.train,
            self.trace,
            self.make_fx,
            self.checkpoint,
            self.eager,
            self.export,
            self.reset,
        ]

    def call(self) -> None:
        torch.testing.assert_close(self.warm(self.x), step(self.x))

    def call_module(self) -> None:
        torch.testing.assert_close(self.module(self.x), self.layer(self.x))

    def compile(self) -> None:
        torch.testing.assert_close(torch.compile(lambda x: x.cos() * 3, backend="eager")(self.x), self.x.cos() * 3)

    def train(self) -> None:
        leaf = self.x.clone().requires_grad_()
        torch.compile(lambda x: x.sin() * x, backend="aot_eager")(leaf).sum().backward()
        torch.testing.assert_close(leaf.grad, self.x.sin() + self.x * self.x.cos())

    def trace(self) -> None:
        graph = torch.fx.symbolic_trace(self.layer)
        assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "call_method", "output"]

    def make_fx(self) -> None:
        torch.testing.assert_close(make_fx(step)(self.x)(self.x), step(self.x))

    def checkpoint(self) -> None:
        leaf = self.x.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(nn.functional.dropout, leaf, use_reentrant=False)
        y.sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, y.detach())

    def eager(self) -> None:
        assert self.layer(self.x).shape == (2, 4)
        assert not torch.compiler.is_compiling()

    def export(self) -> None:
        # A module of its own: export puts fake tensors in place of the parameters of the one that it is given.
        layer = Layer()
        exported = torch.export.export(layer, (self.x,), strict=False)
        torch.testing.assert_close(exported.module()(self.x), layer(self.x))

    def reset(self) -> None:
        torch._dynamo.reset()


def test_mixed_work_in_four_threads_makes_no_error_and_no_hang(guard: Any, num_iterations: int) -> None:
    work = Work(guarded=True)
    call = nn.Module.__call__

    def go_on(seed: int) -> None:
        chooser = random.Random(seed)
        for _ in range(num_iterations):
            chooser.choice(work.operations)()

    run_in_threads(*[lambda seed=seed: go_on(seed) for seed in range(NUM_THREADS)], timeout=60 + num_iterations * 2)
    happened = [found for found in guard.findings() if not found.prevented]
    # Without resets a function would not be compiled so often; that its limit is reached is right to tell.
    assert [str(found) for found in happened if found.code not in ("recompile-limit", "duplicate-compile")] == []
    assert nn.Module.__call__ is call
    assert guard.trace_lock.owner is None
    assert guard.waits.waiting() == {}
    for operation in work.operations:
        operation()


def test_warm_calls_of_many_threads_under_tracing_and_resets(guard: Any, num_iterations: int) -> None:
    work = Work(guarded=True)
    stop = threading.Event()

    def call() -> None:
        while not stop.is_set():
            work.call()
            work.call_module()

    def disturb() -> None:
        try:
            for number in range(num_iterations):
                work.trace()
                work.make_fx()
                if number % 5 == 0:
                    work.reset()
        finally:
            stop.set()

    run_in_threads(call, call, call, disturb, timeout=60 + num_iterations)


MEASURE = """
import random, resource, sys, threading
import torch
how, num = sys.argv[1], int(sys.argv[2])
import compile_guard
if how == "guarded":
    compile_guard.install(mode="record")
from tests.compile_guard.test_mixed_stress import Work
from tests.threads import run_in_threads

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20

work = Work(guarded=how == "guarded")
def go_on(seed, num):
    chooser = random.Random(seed)
    for _ in range(num):
        chooser.choice(work.operations)()
def everything(num, round):
    if how == "guarded":
        run_in_threads(*[lambda seed=seed: go_on(seed + 4 * round, num) for seed in range(4)], timeout=500)
    else:
        for seed in range(4):
            go_on(seed + 4 * round, num)
everything(max(10, num // 4), 0)
before = resident()
everything(num, 1)
print(resident() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_grows_no_more_than_by_the_same_work_in_one_thread_on_bare_torch(num_iterations: int) -> None:
    def grown(how: str) -> float:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", MEASURE, how, str(num_iterations)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "MALLOC_ARENA_MAX": "1"},
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return float(done.stdout.split()[-1])

    bare, guarded = grown("bare"), grown("guarded")
    # Four threads have four times the state that a compile keeps for its thread; beyond that, the allocator's own noise.
    assert guarded <= bare * 1.5 + 24, f"{guarded:.1f} MiB with the guard, {bare:.1f} MiB without"
