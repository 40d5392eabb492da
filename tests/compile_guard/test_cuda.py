"""What only a GPU can show: backwards on device threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard.device_cache import device_of
from tests.threads import Puppet, run_in_threads, until, wait

pytestmark = pytest.mark.cuda


def leaf() -> torch.Tensor:
    return torch.ones(4, device="cuda", requires_grad=True)


def test_trace_lock_held_across_a_backward_finishes(guard: Any, puppet: Callable[[], Puppet]) -> None:
    """Another thread's backward has to be compiled, on the device thread, while the holder asks for a gradient."""
    compiled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    first = leaf()
    loss = compiled(first).sum()
    other = puppet()
    with compile_guard.exclusive("a trace with a backward inside"):
        task = other.start(loss.backward)
        until(lambda: guard.trace_lock.statistics().num_waiting or task.done, "the backward to want the lock")
        mine = leaf()
        (mine.sin().sum()).backward()
        torch.testing.assert_close(mine.grad, mine.detach().cos())
    task.result()
    torch.testing.assert_close(first.grad, first.detach().cos() * 2)


def test_backward_of_the_holder_runs_on_its_own_thread(guard: Any) -> None:
    threads: list[int] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            threads.append(threading.get_ident())
            return gradient

    Note.apply(leaf()).sum().backward()
    with compile_guard.exclusive():
        Note.apply(leaf()).sum().backward()
    assert threads[0] != threading.get_ident(), "torch uses no device thread: this test shows nothing"
    assert threads[1] == threading.get_ident()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_dropout_of_three_threads_replays(guard: Any, use_reentrant: bool) -> None:
    together = threading.Barrier(3)

    def train() -> None:
        x = torch.ones(1000, device="cuda", requires_grad=True)
        seen = []

        def block(x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.dropout(x)
            seen.append(y.detach().clone())
            return y.sin()

        together.wait(60)
        y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=use_reentrant)
        together.wait(60)
        y.sum().backward()
        assert torch.equal(*seen)

    run_in_threads(*[train] * 3)


def test_recompute_on_the_device_thread_has_the_forwards_configuration(guard: Any) -> None:
    from torch._dynamo import config

    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(config.recompile_limit)
        return x.sin()

    def train() -> None:
        with config.patch(recompile_limit=33):
            torch.utils.checkpoint.checkpoint(block, leaf(), use_reentrant=False).sum().backward()

    run_in_threads(train)
    assert seen == [33, 33]


def test_current_device_is_that_of_a_call_without_tensors(guard: Any) -> None:
    leaf()
    assert device_of((), {}) == torch.device("cuda", torch.cuda.current_device())


def test_lazy_backward_in_threads_compiles_once(guard: Any) -> None:
    compiled = compile_guard.compile(lambda x: x.sin() * 2, backend="inductor")
    together = threading.Barrier(4)
    ready = threading.Event()

    def train() -> None:
        x = leaf()
        loss = compiled(x).sum()
        together.wait(120)
        ready.set()
        loss.backward()
        torch.testing.assert_close(x.grad, x.detach().cos() * 2)

    run_in_threads(*[train] * 4, timeout=200)
    wait(ready)
    assert compiled.cache_info()[torch.device("cuda", 0)].num_entries == 1
