"""A thread that dies while it compiles or traces leaves the lock free and the process healthy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compile_guard
from tests.threads import Puppet, run_in_threads

ERRORS = [RuntimeError, KeyboardInterrupt, SystemExit]
x = torch.ones(4)


class BackendFailed(RuntimeError):
    pass


def assert_healthy(call: object) -> None:
    """Everything works, in this thread and in another one, and nothing is left behind."""
    assert compile_guard.trace_lock.owner is None
    assert compile_guard.trace_lock.depth == 0
    assert compile_guard.waits.waiting() == {}
    assert torch._C._is_multithreading_enabled()
    assert nn.Module.__call__ is call
    assert not torch.compiler.is_compiling()
    assert not torch.fx._symbolic_trace.is_fx_symbolic_tracing()
    assert torch._C._len_torch_dispatch_stack() == 0

    def use() -> None:
        torch.testing.assert_close(torch.compile(lambda x: x.sin() + 2, backend="eager")(x), x.sin() + 2)
        torch.testing.assert_close(torch.fx.symbolic_trace(lambda x: x.cos())(x), x.cos())
        leaf = x.clone().requires_grad_()
        torch.compile(lambda x: x.sin(), backend="aot_eager")(leaf).sum().backward()
        assert nn.Linear(4, 4)(x).shape == (4,)
        torch._dynamo.reset()

    use()
    run_in_threads(use)


def die_in_backend(error: type[BaseException]) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise error("in the backend")

    torch.compile(lambda x: x * 2, backend=backend)(x)


def die_in_backward_compile(error: type[BaseException]) -> None:
    from torch._dynamo.backends.common import aot_autograd

    def fail(graph: Any, inputs: Any) -> Any:
        raise error("in the backward's backend")

    backend = aot_autograd(fw_compiler=torch._dynamo.backends.debugging.boxed_nop, bw_compiler=fail)
    leaf = x.clone().requires_grad_()
    torch.compile(lambda x: x.sin() * x, backend=backend)(leaf).sum().backward()


def die_in_symbolic_trace(error: type[BaseException]) -> None:
    def traced(x: Any) -> Any:
        x = x + 1
        raise error("while traced")

    torch.fx.symbolic_trace(traced)


def die_in_module_trace(error: type[BaseException]) -> None:
    class Dies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            self.linear(x)
            raise error("while traced")

    torch.fx.symbolic_trace(Dies())


def die_in_make_fx(error: type[BaseException]) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def traced(x: torch.Tensor) -> torch.Tensor:
        raise error("while traced")

    make_fx(traced)(x)


def die_in_export(error: type[BaseException]) -> None:
    class Dies(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise error("while exported")

    torch.export.export(Dies(), (x,), strict=False)


def die_in_exclusive(error: type[BaseException]) -> None:
    with compile_guard.exclusive(), compile_guard.exclusive("inner"):
        raise error("inside")


def die_in_a_compiled_call(error: type[BaseException]) -> None:
    @torch._dynamo.disable
    def die() -> None:
        raise error("in the function")

    def dies(x: torch.Tensor) -> torch.Tensor:
        die()
        return x

    compile_guard.compile(dies, backend="eager")(x)


WAYS = [
    die_in_backend,
    die_in_backward_compile,
    die_in_symbolic_trace,
    die_in_module_trace,
    die_in_make_fx,
    die_in_export,
    die_in_exclusive,
    die_in_a_compiled_call,
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["main thread", "another thread"])
def test_process_is_healthy_after(guard: Any, way: Any, error: type[BaseException], where: str) -> None:
    call = nn.Module.__call__

    def die() -> None:
        # Dynamo wraps what a backend raises in an exception of its own; interrupts go through as they are.
        with pytest.raises((error, Exception) if error is RuntimeError else error):
            way(error)

    if where == "main thread":
        die()
    else:
        run_in_threads(die)
    assert_healthy(call)
    assert [found for found in guard.findings() if not found.prevented] == []


def test_thread_that_ends_with_the_lock_held_is_named_to_who_waits(
    guard: Any, puppet: Callable[[], Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can free it: who waits is told which thread took it, and for what."""
    holder, waiter = puppet(), puppet()
    holder.do(guard.trace_lock.acquire, "and never gave it back")
    holder.end()
    try:
        monkeypatch.setattr(guard.waits, "STALL_S", 0.02)
        assert waiter.do(guard.trace_lock.acquire, "in vain", timeout=0.1) is False
        (found,) = [each for each in guard.findings() if each.code == "stall"]
        assert found.other is not None
        assert found.other.thread == f"ident {holder.ident}"
        assert "and never gave it back" in repr(guard.trace_lock)
    finally:
        guard.trace_lock.core._at_fork_reinit()
        guard.trace_lock._reset()


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs signals")
def test_ctrl_c_at_any_moment_of_a_trace_leaves_the_process_healthy() -> None:
    """Real signals at ever later moments. A trace, not a compile: torch itself aborts on a signal in its C++ guards."""
    program = """
import signal, sys, threading
import torch, compile_guard
from torch import nn
from tests.compile_guard.test_die_while_compiling import assert_healthy
compile_guard.install(mode="record")
signal.signal(signal.SIGALRM, signal.default_int_handler)
x = torch.ones(4)
call = nn.Module.__call__
num_interrupted = 0
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
torch.fx.symbolic_trace(model)
for number in range(600):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.00005 + number * 0.00001)
        try:
            torch.fx.symbolic_trace(model)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (KeyboardInterrupt, AssertionError) as error:
        # Inside FX's `_new_patcher` torch itself answers an interrupt with an AssertionError.
        if isinstance(error, AssertionError) and not isinstance(error.__context__, KeyboardInterrupt):
            raise
        num_interrupted += 1
    if compile_guard.trace_lock.owner is not None:  # interrupted on the first instruction of the exit: others go on
        tracer = threading.Thread(target=torch.fx.symbolic_trace, args=(model,), daemon=True)
        tracer.start()
        tracer.join(60)
        assert not tracer.is_alive(), (number, compile_guard.trace_lock)
    assert compile_guard.trace_lock.owner is None, (number, compile_guard.trace_lock)
    assert compile_guard.trace_lock.core.acquire(blocking=False)
    compile_guard.trace_lock.core.release()
# An interrupt in the last moment, while the lock is let go, leaves to the next trace what that moment would have mended.
torch.fx.symbolic_trace(model)
assert_healthy(call)
print(num_interrupted > 20)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "True"
