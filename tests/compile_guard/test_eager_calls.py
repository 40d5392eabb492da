"""Calls of compiled functions that ran eager are told: which, why, since when, where, and at what cost."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compile_guard
from compile_guard.eager_calls import EAGER
from compile_guard.findings import Finding, FindingError, findings
from tests.threads import run_in_threads


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def fill_the_cache(compiled: Any, sizes: range = range(2, 11)) -> None:
    """Nine sizes, of which eight are compiled."""
    for size in sizes:
        compiled(torch.ones(size))


def eager_calls(guard: Any) -> list[Finding]:
    return [found for found in guard.findings() if found.code == "eager-call"]


class Passing(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def test_each_call_past_the_limit_is_told_with_thread_device_and_time(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    fill_the_cache(compiled)
    (first,) = eager_calls(guard)
    assert first.count == 1
    compiled(torch.ones(2))  # an entry fits
    assert eager_calls(guard)[0].count == 1
    run_in_threads(lambda: compiled(torch.ones(30)))
    (found,) = eager_calls(guard)
    assert (found.subject, found.count, found.prevented) == ("step", 2, False)
    assert "8 entries, recompile_limit 8" in found.shared
    assert found.shared.count(" on cpu") == 2  # two threads so far
    assert "first in thread MainThread" in found.shared
    assert "ms for one that runs compiled" in found.consequence
    assert "flex_attention" not in found.consequence


def test_function_that_was_past_its_limit_before_is_told_on_later_calls(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    fill_the_cache(compiled)
    findings.clear()
    compiled(torch.ones(40))
    (found,) = guard.findings()
    assert (found.code, found.count) == ("eager-call", 1)


@pytest.mark.parametrize("through", ["the same wrapper", "a wrapper made under the guard"])
def test_limit_hit_before_install_is_told(clean: None, through: str) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    fill_the_cache(compiled)
    compile_guard.install("record")
    if through == "a wrapper made under the guard":
        compiled = torch.compile(step, backend="eager", dynamic=False)
    compiled(torch.ones(2))
    assert compile_guard.findings() == []
    compiled(torch.ones(50))
    (found,) = compile_guard.findings()
    assert found.code == "eager-call"
    assert "since before compile_guard.install()" in found.shared


def test_warm_calls_are_not_looked_at_until_a_function_falls_back(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager")
    for size in (2, 3, 4):
        compiled(torch.ones(size))
    assert not EAGER.on


def test_reset_forgets_what_fell_back(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    fill_the_cache(compiled)
    assert EAGER.on
    torch._dynamo.reset()
    assert not EAGER.on
    findings.clear()
    compiled(torch.ones(60))
    assert guard.findings() == []


def test_skipped_function_is_told_each_call_with_the_reason(guard: Any) -> None:
    @torch.compile(backend="eager")
    def breaks_in_try(x: torch.Tensor) -> torch.Tensor:
        try:
            y = x + 1
            torch._dynamo.graph_break()
        finally:
            y = x * 2
        return y

    for _ in range(3):
        breaks_in_try(torch.ones(2))
    (found,) = eager_calls(guard)
    assert (found.subject, found.count) == ("breaks_in_try", 3)
    assert "graph_break" in found.shared
    assert "every call" in found.shared


def test_suppressed_error_is_the_reason(guard: Any) -> None:
    def failing(graph: Any, inputs: Any) -> Any:
        raise ValueError("no such device")

    with torch._dynamo.config.patch(suppress_errors=True):
        torch.compile(step, backend=failing)(torch.ones(2))
    (found,) = eager_calls(guard)
    assert "no such device" in found.shared
    assert "suppress_errors is on" in found.shared


def test_call_under_a_dispatch_mode_is_told_and_leaves_the_function_compiled(guard: Any) -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return run

    compiled = torch.compile(step, backend=backend)
    compiled(torch.ones(2))
    ran.clear()
    with Passing():
        compiled(torch.ones(2))
    (found,) = eager_calls(guard)
    assert "TorchDispatchMode" in found.shared
    assert not ran
    compiled(torch.ones(2))
    assert ran
    assert eager_calls(guard)[0].count == 1


def test_functions_with_nothing_to_compile_are_not_told(guard: Any) -> None:
    nothing = torch.compile(lambda x=None: x, backend="eager")
    nothing()
    nothing(torch.ones(2))
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module.register_forward_hook(lambda *args: None)
    torch.compile(module, backend="eager")(torch.ones(2, 2))
    torch.compile(torch.fx.symbolic_trace(module), backend="eager")(torch.ones(2, 2))
    assert guard.findings() == []


def test_compiled_graph_module_is_not_told(guard: Any) -> None:
    """Dynamo skips the `__call__` that FX writes for it, and compiles its `forward`."""
    ran: list[bool] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        def compiled(*args: Any) -> Any:
            ran.append(True)
            return graph.forward(*args)

        return compiled

    module = torch.compile(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)), backend=backend)
    for _ in range(2):
        module(torch.ones(2, 2))
    assert (len(ran), guard.findings()) == (2, [])


def test_raise_mode_raises_the_limit_first_and_then_each_call(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    for size in range(2, 10):
        compiled(torch.ones(size))
    with guard.watch("raise"):
        with pytest.raises(FindingError) as limit:
            compiled(torch.ones(20))
        assert limit.value.finding.code == "recompile-limit"
    compiled(torch.ones(20))
    with guard.watch("raise"), pytest.raises(FindingError) as call:
        compiled(torch.ones(20))
    assert call.value.finding.code == "eager-call"


def test_peak_memory_of_an_eager_flex_attention_is_told(guard: Any) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    def attend(query: torch.Tensor) -> torch.Tensor:
        flex_attention(query, query, query)
        return query

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda query: (query,)  # stands for the fused kernel, which has no scores in memory

    compiled = torch.compile(attend, backend=backend, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        compiled(torch.randn(1, 4, 128, 16))
        with pytest.warns(UserWarning, match="full scores matrix"):
            compiled(torch.randn(1, 4, 2048, 16))
        compiled(torch.randn(1, 4, 128, 16))
    limit, call = guard.findings()
    assert "flex_attention then computes all its scores into memory" in limit.consequence
    assert call.consequence.startswith("flex_attention computes all its scores into memory")
    assert "peak memory of the process rose" in call.consequence


def test_nonrecursively_disabled_function_stays_eager_under_the_guard(guard: Any) -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @torch.compiler.disable(recursive=False)
    def helper(x: torch.Tensor) -> torch.Tensor:
        return inner(x) * 2

    torch.compile(lambda x: helper(x + 1), backend=backend)(torch.ones(2))
    assert [len(ops) for ops in ran] == [1, 1]  # `+ 1`, and `sin` by itself


def test_uninstall_ends_the_watch(guard: Any) -> None:
    compiled = torch.compile(step, backend="eager", dynamic=False)
    fill_the_cache(compiled)
    compile_guard.uninstall()
    assert not EAGER.on
    thread = threading.Thread(target=lambda: compiled(torch.ones(70)))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
