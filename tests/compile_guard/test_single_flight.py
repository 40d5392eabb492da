"""One compile where several threads miss the same cache."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from tests.threads import run_in_threads, until, wait

NUM_THREADS = 6
x = torch.ones(4, 4)
COMPILERS = [torch.compile, compile_guard.compile]


class Leader:
    """A backend that compiles once every thread stands in line; fails as often as it is told."""

    def __init__(self, num_waiting: int, num_failures: int = 0, error: type[BaseException] = RuntimeError) -> None:
        self.num_waiting = num_waiting
        self.num_failures = num_failures
        self.error = error
        self.num_compiles = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.num_compiles += 1
        if self.num_compiles == 1:
            until(lambda: compile_guard.trace_lock.statistics().num_waiting >= self.num_waiting, "the others to wait")
        if self.num_compiles <= self.num_failures:
            raise self.error("the leader fails")
        return graph.forward


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


TARGETS: dict[str, Callable[[], Any]] = {
    "function": lambda: step,
    "own module": Layer,
    "torch's module": lambda: nn.Linear(4, 4),
    "sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
    "bound method": lambda: Layer().forward,
    "lambda": lambda: lambda x: x * 2,
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_six_threads_and_one_cold_callable_compile_once(guard: Any, compiler: Any, target: str) -> None:
    made = TARGETS[target]()
    backend = Leader(NUM_THREADS - 1)
    compiled = compiler(made, backend=backend)
    expected = made(x)
    for returned in run_in_threads(*[lambda: compiled(x)] * NUM_THREADS):
        torch.testing.assert_close(returned, expected)
    assert backend.num_compiles == 1
    found = compile_guard.findings()
    assert [(each.code, each.prevented, each.count) for each in found] == [("duplicate-compile", True, NUM_THREADS - 1)]


def test_bare_torch_compiles_in_every_thread(clean: None) -> None:
    """The mirror: without the guard each thread compiles, so that the tests above can fail."""
    num_compiles = 0
    arrived = threading.Barrier(3)
    first = threading.Event()

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        first.set()
        return graph.forward

    compiled = torch.compile(step, backend=backend)

    @torch._dynamo.disable
    def meet() -> None:
        arrived.wait(30)

    def call() -> None:
        meet()
        compiled(x)

    lock = torch._dynamo.convert_frame.compile_lock
    with lock:  # every thread misses the cache before the first can compile
        threads = [threading.Thread(target=call, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        import sys

        def stands_at_the_lock(thread: threading.Thread) -> bool:
            frame = sys._current_frames().get(thread.ident or 0)
            return frame is not None and frame.f_code.co_filename.endswith("convert_frame.py")

        until(lambda: all(stands_at_the_lock(thread) for thread in threads), "all threads to stand at the lock")
    for thread in threads:
        thread.join(30)
    assert num_compiles == 3


@pytest.mark.parametrize("compiler", COMPILERS)
def test_when_the_leader_fails_the_next_one_compiles(guard: Any, compiler: Any) -> None:
    backend = Leader(NUM_THREADS - 1, num_failures=1)
    compiled = compiler(step, backend=backend)
    failed = []

    def call() -> None:
        try:
            torch.testing.assert_close(compiled(x), step(x))
        except Exception as error:
            failed.append(str(error))

    run_in_threads(*[call] * NUM_THREADS)
    assert len(failed) == 1
    assert "the leader fails" in failed[0]
    assert backend.num_compiles == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_when_the_leader_is_interrupted_the_next_one_compiles(guard: Any, error: type[BaseException]) -> None:
    backend = Leader(NUM_THREADS - 1, num_failures=1, error=error)
    compiled = compile_guard.compile(step, backend=backend)
    interrupted = []

    def call() -> None:
        try:
            torch.testing.assert_close(compiled(x), step(x))
        except BaseException as caught:
            interrupted.append(caught)

    run_in_threads(*[call] * NUM_THREADS)
    assert [type(each) for each in interrupted] == [error]
    assert backend.num_compiles == 2


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_barrier_inside_the_function_does_not_deadlock(guard: Any, compiler: Any) -> None:
    barrier = threading.Barrier(NUM_THREADS)

    @torch._dynamo.disable
    def collective(x: torch.Tensor) -> torch.Tensor:
        barrier.wait(30)
        return x

    def synchronised(x: torch.Tensor) -> torch.Tensor:
        return collective(x + 1) * 2

    compiled = compiler(synchronised, backend="eager")
    for _ in range(2):
        for returned in run_in_threads(*[lambda: compiled(x)] * NUM_THREADS):
            torch.testing.assert_close(returned, (x + 1) * 2)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_side_effects_before_a_graph_break_happen_once_for_each_call(guard: Any, compiler: Any) -> None:
    calls: list[int] = []
    lock = threading.Lock()

    @torch._dynamo.disable
    def note() -> None:
        with lock:
            calls.append(1)

    def noting(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        note()
        return x.sin()

    compiled = compiler(noting, backend=Leader(NUM_THREADS - 1))
    run_in_threads(*[lambda: compiled(x)] * NUM_THREADS)
    assert len(calls) == NUM_THREADS


@pytest.mark.parametrize("compiler", COMPILERS)
def test_pre_hooks_run_once_for_each_call(guard: Any, compiler: Any) -> None:
    seen: list[int] = []
    layer = Layer()
    layer.register_forward_pre_hook(torch._dynamo.disable(lambda *_: seen.append(1)))
    compiled = compiler(layer, backend="eager")
    run_in_threads(*[lambda: compiled(x)] * NUM_THREADS)
    assert len(seen) == NUM_THREADS


def test_threads_with_different_shapes_each_get_their_version(guard: Any) -> None:
    compiled = compile_guard.compile(step, backend="eager", dynamic=False)
    inputs = [torch.ones(size) for size in range(2, 8)]
    returned = run_in_threads(*[lambda each=each: compiled(each) for each in inputs])
    for each, result in zip(inputs, returned, strict=True):
        torch.testing.assert_close(result, step(each))
    assert compiled.cache_info()[torch.device("cpu")].num_entries == 6


@pytest.mark.parametrize("compiler", COMPILERS)
def test_dynamic_of_one_thread_is_not_that_of_another_and_does_not_stay(guard: Any, compiler: Any) -> None:
    from torch._dynamo import config

    before = config.assume_static_by_default, config.automatic_dynamic_shapes
    inside = threading.Barrier(3)

    @torch._dynamo.disable
    def meet() -> None:
        inside.wait(30)

    def meeting(x: torch.Tensor) -> torch.Tensor:
        meet()
        return x + 1

    static, dynamic, automatic = (compiler(meeting, backend="eager", dynamic=each) for each in (False, True, None))
    for size in (2, 3):
        run_in_threads(*[lambda each=each, size=size: each(torch.ones(size)) for each in (static, dynamic, automatic)])
    assert (config.assume_static_by_default, config.automatic_dynamic_shapes) == before


def test_two_backends_on_one_function_do_not_take_each_others_code(guard: Any) -> None:
    one, other = Leader(1), Leader(0)
    first, second = torch.compile(step, backend=one), torch.compile(step, backend=other)
    run_in_threads(lambda: first(x), lambda: second(x))
    assert (one.num_compiles, other.num_compiles) == (1, 1)


def test_a_warm_function_that_recompiles_in_all_threads_compiles_once(guard: Any) -> None:
    compiled = compile_guard.compile(step, backend="eager", dynamic=False)
    compiled(x)
    other = x.double()
    run_in_threads(*[lambda: compiled(other)] * NUM_THREADS)
    assert compiled.cache_info()[torch.device("cpu")].num_entries == 2


def test_nested_compiled_calls_compile_once_each(guard: Any) -> None:
    inner = compile_guard.compile(step, backend="eager")

    @torch._dynamo.disable
    def call_inner(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    outer = compile_guard.compile(lambda x: call_inner(x + 1) * 2, backend="eager")
    for returned in run_in_threads(*[lambda: outer(x)] * NUM_THREADS):
        torch.testing.assert_close(returned, step(x + 1) * 2)
    cpu = torch.device("cpu")
    assert inner.cache_info()[cpu].num_entries == 1
    assert outer.cache_info()[cpu].num_entries == 1


def test_first_backward_in_six_threads_compiles_once(guard: Any) -> None:
    num_backwards = 0

    def backward_compiler(graph: Any, inputs: Any) -> Any:
        nonlocal num_backwards
        num_backwards += 1
        from functorch.compile import make_boxed_func

        return make_boxed_func(graph.forward)

    from torch._dynamo.backends.common import aot_autograd

    backend = aot_autograd(
        fw_compiler=lambda graph, _: torch._dynamo.backends.debugging.boxed_nop(graph, _), bw_compiler=backward_compiler
    )
    compiled = torch.compile(step, backend=backend)
    together = threading.Barrier(NUM_THREADS)

    def train() -> torch.Tensor:
        leaf = x.clone().requires_grad_()
        loss = compiled(leaf).sum()
        together.wait(30)
        loss.backward()
        assert leaf.grad is not None
        return leaf.grad

    for gradient in run_in_threads(*[train] * NUM_THREADS):
        torch.testing.assert_close(gradient, x.cos())
    assert num_backwards == 1


def test_a_thread_that_holds_the_lock_compiles_inside_it(guard: Any) -> None:
    compiled = compile_guard.compile(step, backend="eager")
    with compile_guard.exclusive():
        torch.testing.assert_close(compiled(x), step(x))
    done = threading.Event()
    run_in_threads(lambda: (compiled(x), done.set()))
    wait(done)


def test_code_with_a_dict_among_its_constants_compiles(guard: Any) -> None:
    """Dynamo puts an inner function's default into the constants of what it compiles: such code cannot be hashed."""

    def outer(y: torch.Tensor) -> torch.Tensor:
        def inner(z: torch.Tensor, *, factors: dict[str, int] = {"a": 2}) -> torch.Tensor:  # noqa: B006
            return z * factors["a"]

        torch._dynamo.graph_break()
        return inner(y) + 1

    ones = torch.ones(2)
    assert torch.equal(torch.compile(outer, backend="eager")(ones), ones * 3)
    assert torch.equal(compile_guard.compile(outer, backend="eager")(ones), ones * 3)
