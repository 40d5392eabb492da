"""The way into compiled calls: warm ones take no lock, `reset` waits for those that run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from compile_guard import entry
from compile_guard.findings import GuardError
from tests.threads import Puppet, run_in_threads, until, wait

x = torch.ones(4)
MakePuppet = Callable[[], Puppet]


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def with_a_graph_break(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    torch._dynamo.graph_break()
    return x.cos()


class Break(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return self.linear(y)


def hooked() -> nn.Module:
    module = Break()
    module.register_forward_hook(lambda *_: None)
    return module


CALLABLES: dict[str, Callable[[], Any]] = {
    "function": lambda: step,
    "function with a graph break": lambda: with_a_graph_break,
    "torch's module": lambda: nn.Linear(4, 4),
    "module with a graph break": Break,
    "module with hooks": hooked,
    "checkpointed": lambda: lambda x: torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False),
}


@pytest.mark.parametrize("name", CALLABLES)
@pytest.mark.parametrize("compiler", ["torch", "compile_guard"])
@pytest.mark.parametrize("busy", ["symbolic_trace", "the lock"])
def test_warm_call_does_not_wait_while_another_thread(guard: Any, name: str, compiler: str, busy: str) -> None:
    made = CALLABLES[name]()
    compiled = (torch.compile if compiler == "torch" else compile_guard.compile)(made, backend="eager")
    expected = [compiled(x) for _ in range(2)][-1]
    stands, done = threading.Event(), threading.Event()

    def traced(x: torch.Tensor) -> torch.Tensor:
        stands.set()
        wait(done)
        return x + 1

    def be_busy() -> None:
        if busy == "symbolic_trace":
            torch.fx.symbolic_trace(traced)
        else:
            with compile_guard.exclusive():
                traced(x)

    def call() -> torch.Tensor:
        wait(stands)
        try:
            before = compile_guard.trace_lock.statistics()
            returned = run_in_threads(lambda: compiled(x), timeout=20)[0]
            after = compile_guard.trace_lock.statistics()
            assert (after.num_acquired, after.num_contended) == (before.num_acquired, before.num_contended)
            return returned
        finally:
            done.set()

    assert torch.equal(run_in_threads(be_busy, call)[1], expected)


def test_warm_call_with_a_module_made_before_install_does_not_wait(clean: None) -> None:
    compile_guard.install()
    compile_guard.uninstall()
    compiled = torch.compile(Break(), backend="eager")
    compiled(x)
    compile_guard.install(mode="record")
    with compile_guard.exclusive():
        run_in_threads(lambda: compiled(x), timeout=20)


def test_a_cold_call_does_wait(guard: Any, puppet: MakePuppet) -> None:
    """The mirror: the tests above would see a wait."""
    caller = puppet()
    compiled = torch.compile(step, backend="eager")
    with compile_guard.exclusive():
        task = caller.start(compiled, x)
        until(lambda: compile_guard.trace_lock.statistics().num_waiting == 1)
    assert torch.equal(task.result(), step(x))


def test_reset_waits_until_a_running_call_ends_and_lets_nobody_in(guard: Any, puppet: MakePuppet) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def long_step(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        stand()
        return x.sin()

    compiled, short = torch.compile(long_step, backend="eager"), compile_guard.compile(step, backend="eager")
    short(x)
    go_on.set()
    compiled(x)
    inside.clear()
    go_on.clear()
    runner, resetter, late = puppet(), puppet(), puppet()
    running = runner.start(compiled, x)
    wait(inside)
    resetting = resetter.start(torch._dynamo.reset)
    until(lambda: resetter.ident in compile_guard.waits.waiting(), "the reset to wait")
    kept_out = late.start(short, x)
    until(lambda: late.ident in compile_guard.waits.waiting(), "the late call to wait")
    assert not resetting.done
    go_on.set()
    torch.testing.assert_close(running.result(), (x + 1).sin())
    resetting.result()
    torch.testing.assert_close(kept_out.result(), step(x))
    assert {found.code for found in compile_guard.findings()} == {"reset-under-load"}
    assert all(found.prevented for found in compile_guard.findings())


def test_calls_nested_in_a_running_one_pass_the_closed_gate(guard: Any, puppet: MakePuppet) -> None:
    inside, go_on = threading.Event(), threading.Event()
    plain, ours = torch.compile(step, backend="eager"), compile_guard.compile(step, backend="eager")

    @torch._dynamo.disable
    def nested(x: torch.Tensor) -> torch.Tensor:
        inside.set()
        wait(go_on)
        return plain(x) + ours(x)  # cold: has to compile while the reset waits

    outer = torch.compile(lambda x: nested(x) * 2, backend="eager")
    runner, resetter = puppet(), puppet()
    running = runner.start(outer, x)
    wait(inside)
    resetting = resetter.start(torch._dynamo.reset)
    until(lambda: resetter.ident in compile_guard.waits.waiting(), "the reset to wait")
    go_on.set()
    torch.testing.assert_close(running.result(), step(x) * 4)
    resetting.result()


def test_a_call_made_inside_a_trace_passes_the_closed_gate(guard: Any, puppet: MakePuppet) -> None:
    """The reset waits for the trace lock: a holder that waited for the reset would wait for ever."""
    for compiler in (torch.compile, compile_guard.compile):
        compiled = compiler(step, backend="eager")
        compiled(x)
        tracing, go_on = threading.Event(), threading.Event()

        def trace(compiled: Any = compiled, tracing: Any = tracing, go_on: Any = go_on) -> torch.Tensor:
            with compile_guard.exclusive():
                tracing.set()
                wait(go_on)
                return compiled(x)

        tracer, resetter = puppet(), puppet()
        task = tracer.start(trace)
        wait(tracing)
        resetting = resetter.start(torch._dynamo.reset)
        until(lambda resetter=resetter: resetter.ident in compile_guard.waits.waiting(), "the reset to wait for the lock")
        go_on.set()
        assert torch.equal(task.result(), step(x))
        resetting.result()


def test_a_reset_does_not_take_another_that_waits_for_it_for_a_call_it_waits_for(guard: Any, puppet: MakePuppet) -> None:
    """Between its look at a running call and its wait, that call ends and its thread resets as well: no circle."""
    inside, go_on, reported = threading.Event(), threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stay() -> None:
        inside.set()
        wait(go_on)

    @torch.compile(backend="eager")
    def call(x: torch.Tensor) -> torch.Tensor:
        stay()
        return x + 1

    runner, resetter = puppet(), puppet()

    def call_then_reset() -> None:
        call(x)
        torch._dynamo.reset()

    def while_it_reports(found: Any) -> None:
        if found.code == "reset-under-load" and threading.get_ident() == resetter.ident:
            go_on.set()
            until(lambda: runner.ident in compile_guard.waits.waiting(), "the second reset to wait for the first")
            reported.set()

    running = runner.start(call_then_reset)
    wait(inside)
    end = compile_guard.findings.listen(while_it_reports)
    try:
        resetter.do(torch._dynamo.reset)
        running.result()
    finally:
        end()
    assert reported.is_set()


def test_a_reset_by_the_holder_of_the_lock_says_so_while_calls_run(guard: Any, puppet: MakePuppet) -> None:
    """The running call may need the lock before it can end: waiting for it with the lock held would be for ever."""
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def stands(y: torch.Tensor) -> torch.Tensor:
        stand()
        return y + 1

    running = puppet().start(torch.compile(stands, backend="eager"), x)
    wait(inside)
    with compile_guard.exclusive(), pytest.raises(GuardError, match="by the holder of the trace lock"):
        torch._dynamo.reset()
    go_on.set()
    torch.testing.assert_close(running.result(), x + 1)
    with compile_guard.exclusive():
        torch._dynamo.reset()


def test_a_disabled_function_and_a_backward_pass_the_closed_gate(guard: Any, puppet: MakePuppet) -> None:
    """They walk no cache, and somebody inside a compiled call may wait for them."""
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def long_step(x: torch.Tensor) -> torch.Tensor:
        stand()
        return x.sin()

    runner, resetter, other = puppet(), puppet(), puppet()
    leaf = x.clone().requires_grad_()
    trained = torch.compile(lambda x: x.sin() * x, backend="aot_eager")
    trained(leaf).sum().backward()  # its backward is compiled now
    loss = trained(leaf).sum()
    running = runner.start(torch.compile(long_step, backend="eager"), x)
    wait(inside)
    resetting = resetter.start(torch._dynamo.reset)
    until(lambda: resetter.ident in compile_guard.waits.waiting(), "the reset to wait")
    assert other.start(torch._dynamo.disable(lambda: 7)).result(20) == 7
    other.start(loss.backward).result(20)
    go_on.set()
    running.result()
    resetting.result()


def test_two_resets_at_once_both_end(guard: Any, puppet: MakePuppet) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def long_step(x: torch.Tensor) -> torch.Tensor:
        stand()
        return x.sin()

    compiled = torch.compile(long_step, backend="eager")
    runner = puppet()
    running = runner.start(compiled, x)
    wait(inside)
    resets = [puppet() for _ in range(2)]
    tasks = [each.start(torch._dynamo.reset) for each in resets]
    until(lambda: all(each.ident in compile_guard.waits.waiting() for each in resets), "both resets to wait")
    go_on.set()
    running.result()
    for task in tasks:
        task.result()


@pytest.mark.parametrize("compiler", [torch.compile, compile_guard.compile])
def test_reset_from_inside_a_compiled_call_raises(guard: Any, compiler: Any) -> None:
    @torch._dynamo.disable
    def reset_here() -> None:
        torch._dynamo.reset()

    def resets(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        reset_here()
        return x

    compiled = compiler(resets, backend="eager")
    for _ in range(2):
        with pytest.raises(GuardError, match="reset was called from inside a compiled call"):
            compiled(x)
    torch._dynamo.reset()
    assert torch.equal(compile_guard.compile(step, backend="eager")(x), step(x))


def test_reset_that_waits_too_long_gives_up_and_opens_the_gate(
    guard: Any, puppet: MakePuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def long_step(x: torch.Tensor) -> torch.Tensor:
        stand()
        return x.sin()

    runner = puppet()
    running = runner.start(torch.compile(long_step, backend="eager"), x)
    wait(inside)
    with (
        pytest.raises(GuardError, match=r"reset gave up after 0 s: .*puppet-0.*Nothing was reset"),
        entry.gate.shut(lambda code: code.co_name == "compile_wrapper", timeout=0.05),
    ):
        pytest.fail("the gate was shut over a running call")
    assert torch.equal(compile_guard.compile(step, backend="eager")(x), step(x))
    go_on.set()
    running.result()
    torch._dynamo.reset()


def test_reset_without_calls_reports_nothing(guard: Any) -> None:
    torch.compile(step, backend="eager")(x)
    torch._dynamo.reset()
    compile_guard.reset()
    assert compile_guard.findings() == []


def test_reset_waits_for_calls_of_wrappers_made_before_install(clean: None, puppet: MakePuppet) -> None:
    compile_guard.install()
    compile_guard.uninstall()
    inside, go_on = threading.Event(), threading.Event()

    @torch._dynamo.disable
    def stand() -> None:
        inside.set()
        wait(go_on)

    def long_step(x: torch.Tensor) -> torch.Tensor:
        stand()
        return x.sin()

    compiled, short = torch.compile(long_step, backend="eager"), torch.compile(step, backend="eager")
    go_on.set()
    compiled(x)
    short(x)
    inside.clear()
    go_on.clear()
    compile_guard.install(mode="record")
    runner, resetter, late = puppet(), puppet(), puppet()
    running = runner.start(compiled, x)
    wait(inside)
    resetting = resetter.start(torch._dynamo.reset)
    until(lambda: resetter.ident in compile_guard.waits.waiting(), "the reset to wait")
    kept_out = late.start(short, x)
    until(lambda: late.ident in compile_guard.waits.waiting(), "the late call to wait")
    go_on.set()
    running.result()
    resetting.result()
    torch.testing.assert_close(kept_out.result(), step(x))


@pytest.mark.parametrize("compiler", [torch.compile, compile_guard.compile])
def test_resets_under_load_crash_nothing(guard: Any, compiler: Any) -> None:
    compiled = compiler(step, backend="eager")
    module = compiler(Break(), backend="eager")
    stop = threading.Event()
    expected, expected_module = step(x), module(x)

    def call() -> int:
        calls = 0
        while not stop.is_set():
            torch.testing.assert_close(compiled(x), expected)
            torch.testing.assert_close(module(x), expected_module)
            calls += 1
        return calls

    def reset() -> None:
        try:
            for number in range(100):
                if number % 10:
                    torch._dynamo.reset()
                else:
                    compile_guard.reset()
        finally:
            stop.set()

    assert min(run_in_threads(call, call, reset)[:2]) > 0


def test_reset_does_not_wait_for_a_call_that_raised(guard: Any, puppet: MakePuppet) -> None:
    @torch._dynamo.disable
    def fail() -> None:
        raise LookupError

    def raises(x: torch.Tensor) -> torch.Tensor:
        fail()
        return x

    for compiler in (torch.compile, compile_guard.compile):
        compiled = compiler(raises, backend="eager")
        for thread in (puppet(), puppet()):
            with pytest.raises(LookupError):
                thread.do(compiled, x)
    run_in_threads(torch._dynamo.reset, timeout=20)
    assert compile_guard.findings() == []


def test_retry_leaves_a_call_on_no_exception_path_of_the_user(guard: Any) -> None:
    assert not issubclass(entry.RetryCompiledCall, Exception)


def test_guarded_puts_an_entry_around_what_was_compiled_before_install(clean: None, puppet: MakePuppet) -> None:
    compile_guard.install()
    compile_guard.uninstall()
    early, early_module = torch.compile(step, backend="eager"), torch.compile(Break(), backend="eager")
    expected = early_module(x)
    entered, entered_module = compile_guard.guarded(early), compile_guard.guarded(early_module)
    assert torch.equal(entered(x), step(x))
    assert entered_module is early_module
    torch.testing.assert_close(entered_module(x), expected)
    assert compile_guard.guarded(entered) is entered
    late = torch.compile(step, backend="eager")
    assert compile_guard.guarded(late) is late
    ours = compile_guard.compile(step, backend="eager")
    assert compile_guard.guarded(ours) is ours
    with pytest.raises(TypeError, match=r"takes what torch\.compile returned"):
        compile_guard.guarded(step)
