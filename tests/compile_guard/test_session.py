"""What a program does around its compiled code: exclude tracers, warm up, seal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from compile_guard import FindingError
from tests.threads import Puppet, run_in_threads, until

x = torch.ones(3)


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def test_exclusive_keeps_other_tracers_out(guard: Any, puppet: Callable[[], Puppet]) -> None:
    tracer = puppet()
    with compile_guard.exclusive("my own tracer"):
        assert guard.trace_lock.doing == "my own tracer"
        task = tracer.start(torch.fx.symbolic_trace, step)
        until(lambda: tracer.ident in guard.waits.waiting(), "the tracer to wait")
    task.result()
    assert guard.trace_lock.owner is None


def test_exclusive_is_a_decorator_that_may_be_called_again(guard: Any) -> None:
    @compile_guard.exclusive("decorated")
    def trace(depth: int) -> str | None:
        return trace(depth - 1) if depth else guard.trace_lock.doing

    assert trace(0) == trace(2) == "decorated"
    assert run_in_threads(lambda: trace(1), lambda: trace(1)) == ["decorated"] * 2
    assert guard.trace_lock.owner is None


def test_exclusive_lets_go_when_its_block_raises(guard: Any) -> None:
    with pytest.raises(KeyError), compile_guard.exclusive():
        raise KeyError
    assert guard.trace_lock.owner is None


def test_backward_runs_on_the_holders_thread(guard: Any) -> None:
    with compile_guard.exclusive():
        assert not torch._C._is_multithreading_enabled()
        leaf = x.clone().requires_grad_()
        step(leaf).sum().backward()
    assert torch._C._is_multithreading_enabled()


def test_multithreading_that_was_off_before_stays_off(guard: Any) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        with compile_guard.exclusive():
            pass
        assert not torch._C._is_multithreading_enabled()


def test_warmup_compiles_forward_and_backward(guard: Any) -> None:
    compiled: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd

        def compiler(kind: str) -> Any:
            def compile_(graph: Any, inputs: Any) -> Any:
                compiled.append(kind)
                return torch._dynamo.backends.debugging.boxed_nop(graph, inputs)

            return compile_

        return aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))(graph, inputs)

    function = torch.compile(step, backend=backend)
    compile_guard.warmup(function, [x.clone().requires_grad_()])
    assert compiled == ["forward", "backward"]
    with compile_guard.sealed():
        leaf = x.clone().requires_grad_()
        function(leaf).sum().backward()
    assert compiled == ["forward", "backward"]
    assert guard.findings() == []


def test_warmup_leaves_gradients_inputs_and_generators_as_they_were(guard: Any) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    given = x.clone().requires_grad_()
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    compile_guard.warmup(compile_guard.compile(module, backend="aot_eager"), [given])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert given.grad is None
    assert all(parameter.grad is None for parameter in module.parameters())


def test_warmup_keeps_gradients_that_are_there(guard: Any) -> None:
    module = nn.Linear(3, 3)
    module(x).sum().backward()
    before = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    compile_guard.warmup(compile_guard.compile(module, backend="aot_eager"), [x])
    after = [parameter.grad for parameter in module.parameters()]
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one, other)


def test_warmup_goes_through_the_devices_in_turn(guard: Any) -> None:
    compiled = compile_guard.compile(lambda batch: batch["hidden"] * batch["scale"], backend="eager")
    batch = {"hidden": x, "scale": 2}
    compile_guard.warmup(compiled, [batch], devices=["cpu", "meta"])
    assert {str(device): info.num_entries for device, info in compiled.cache_info().items()} == {"cpu": 1, "meta": 1}


def test_warmup_of_a_function_without_gradients_or_tensors(guard: Any) -> None:
    compile_guard.warmup(torch.compile(step, backend="eager"), [x])
    compile_guard.warmup(lambda: None, [])
    compile_guard.warmup(lambda: x.clone().requires_grad_(), [])


def test_sealed_reports_a_later_compile_with_its_place(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    compiled(x)
    with compile_guard.sealed():
        compiled(x)
        assert guard.findings() == []
        compiled(torch.ones(4))
    found = guard.findings()
    assert [(each.code, each.subject, each.prevented) for each in found] == [("sealed", "step", False)]
    assert "test_session.py" in found[0].title
    compiled(torch.ones(5))
    assert guard.findings()[0].count == 1, "the seal ended with the block"


def test_two_open_seals_report_a_compile_once_and_the_last_to_end_allows_it(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    with compile_guard.sealed():
        with compile_guard.sealed():
            compiled(x)
        assert [each.count for each in guard.findings()] == [1]
        compiled(torch.ones(4))
        assert [each.count for each in guard.findings()] == [2]
    compiled(torch.ones(5))
    assert [each.count for each in guard.findings()] == [2]


def test_sealed_reports_a_lazy_backward_compile(guard: Any) -> None:
    compiled = torch.compile(step, backend="aot_eager")
    leaf = x.clone().requires_grad_()
    loss = compiled(leaf).sum()
    seal = compile_guard.sealed()
    loss.backward()
    seal.end()
    seal.end()
    assert [(each.code, each.subject, each.count) for each in guard.findings()] == [("sealed", "a backward", 1)]


def test_sealed_raises_in_mode_raise_and_the_process_stays_healthy(guard: Any) -> None:
    guard.findings.mode = "raise"
    compiled = torch.compile(step, backend="eager")
    with compile_guard.sealed(), pytest.raises(FindingError, match="is compiled after the program was sealed"):
        compiled(x)
    assert guard.trace_lock.owner is None
    assert torch.equal(run_in_threads(lambda: compiled(x))[0], step(x))


def test_sealed_hears_compiles_of_every_thread(guard: Any) -> None:
    first, second = torch.compile(step, backend="eager"), torch.compile(lambda x: x * 2, backend="eager")
    with compile_guard.sealed():
        run_in_threads(lambda: first(x), lambda: second(x))
    assert {each.subject for each in guard.findings()} == {"step", "<lambda>"}
    assert all(each.now.thread.startswith("body-") for each in guard.findings())
    assert threading.active_count() >= 1
