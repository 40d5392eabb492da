"""Faults in one thread while others compile and call: each ends in an error of that thread alone, and the rest go on.

Deaths inside compiles and traces are in `test_die_while_compiling`, forks in `test_fork`, a full log in `test_events`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard import waits
from compile_guard.events import LOG, EventLog
from compile_guard.stress.invariants import state
from tests.threads import Puppet, run_in_threads, until, wait

x = torch.ones(4)
MakePuppet = Callable[[], Puppet]


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def out_of_memory() -> BaseException:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


def allocation_of_too_much() -> BaseException:
    """The device's own error: raised here, not returned."""
    torch.empty(2**44, dtype=torch.uint8, device="cuda")
    return AssertionError("16 TiB were there")


def compile_that_raises(make_error: Callable[[], BaseException], x: torch.Tensor) -> Callable[[], Any]:
    def backend(graph: Any, inputs: Any) -> Any:
        raise make_error()

    return lambda: torch.compile(lambda x: x * 2, backend=backend)(x)


def guard_hook_that_raises(make_error: Callable[[], BaseException], x: torch.Tensor) -> Callable[[], Any]:
    def hook(guards: Any) -> Any:
        raise make_error()

    return lambda: torch.compile(lambda x: x * 2, backend="eager", options={"guard_filter_fn": hook})(x)


def recompute_that_raises(make_error: Callable[[], BaseException], x: torch.Tensor) -> Callable[[], Any]:
    def run() -> None:
        runs = []

        def block(x: torch.Tensor) -> torch.Tensor:
            runs.append(None)
            if len(runs) == 2:
                raise make_error()
            return torch.nn.functional.dropout(x.sin())

        leaf = x.clone().requires_grad_()
        torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=False).sum().backward()

    return run


def lazy_backward_that_raises(make_error: Callable[[], BaseException], x: torch.Tensor) -> Callable[[], Any]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def fail(graph: Any, inputs: Any) -> Any:
        raise make_error()

    def run() -> None:
        leaf = x.clone().requires_grad_()
        backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=fail)
        torch.compile(lambda x: x.sin() * x, backend=backend, dynamic=True)(leaf).sum().backward()

    return run


FAULTS = {
    "backend": compile_that_raises,
    "guard hook": guard_hook_that_raises,
    "recompute": recompute_that_raises,
    "lazy backward": lazy_backward_that_raises,
}


@pytest.mark.parametrize(
    ("error", "device"),
    [
        pytest.param(lambda: ValueError("its own"), "cpu", id="error"),
        pytest.param(out_of_memory, "cpu", id="out of memory"),
        pytest.param(allocation_of_too_much, "cuda", marks=pytest.mark.cuda, id="out of CUDA memory"),
    ],
)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_is_that_threads_alone_and_the_others_go_on(
    guard: Any, fault: str, error: Callable[[], BaseException], device: str
) -> None:
    x = torch.ones(4, device=device)
    warm = compile_guard.compile(step, backend="eager")
    warm(x)
    before = state()
    failing = FAULTS[fault](error, x)
    start = threading.Barrier(3)

    def fail() -> None:
        start.wait(60)
        for _ in range(3):
            with pytest.raises(Exception, match=r"its own|out of memory") as caught:
                failing()
            assert isinstance(caught.value, (ValueError, torch.OutOfMemoryError, torch._dynamo.exc.TorchDynamoException))

    def compile_and_trace() -> None:
        start.wait(60)
        for _ in range(3):
            torch.testing.assert_close(torch.compile(lambda x: x.cos(), backend="eager")(x), x.cos())
            torch.fx.symbolic_trace(torch.nn.Linear(4, 4))

    def call() -> None:
        start.wait(60)
        for _ in range(50):
            torch.testing.assert_close(warm(x), step(x))

    run_in_threads(fail, compile_and_trace, call)
    after = state()
    assert {name: value for name, value in after.items() if value != before[name]} == {}


def test_a_backend_that_hangs_is_told_with_both_stacks_while_warm_calls_go_on(
    guard: Any, puppet: MakePuppet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "STALL_S", 0.2)
    hangs, go_on = threading.Event(), threading.Event()
    warm = compile_guard.compile(step, backend="eager")
    warm(x)

    def hanging_backend(graph: Any, inputs: Any) -> Any:
        hangs.set()
        wait(go_on)
        return graph.forward

    hanging, waiting, calling = puppet(), puppet(), puppet()
    stuck = hanging.start(lambda: torch.compile(lambda x: x * 2, backend=hanging_backend)(x))
    wait(hangs)
    late = waiting.start(lambda: torch.compile(lambda x: x * 3, backend="eager")(x))
    stall = until(lambda: [each for each in guard.findings() if each.code == "stall"], "the stall to be told")[0]
    assert any("test_faults" in row for row in stall.now.stack)
    assert any("hanging_backend" in row for row in stall.other.stack)
    assert calling.do(lambda: warm(x)).tolist() == step(x).tolist()
    assert guard.trace_lock.owner == hanging.ident
    assert not late.done
    go_on.set()
    torch.testing.assert_close(stuck.result(), x * 2)
    torch.testing.assert_close(late.result(), x * 3)
    assert guard.trace_lock.owner is None


PROGRAM = """
import os, signal, sys, threading, types
import torch, compile_guard
compile_guard.install(mode="record")
compiling, stop = threading.Event(), threading.Event()
def backend(graph, inputs):
    compiling.set()
    return graph.forward
def add_one(x):
    return x + 1
def compile_some(number=10**6):
    x = torch.ones(4)
    for _ in range(number):
        if stop.is_set():
            break
        fresh = types.FunctionType(add_one.__code__.replace(), globals())
        assert torch.compile(fresh, backend=backend)(x).tolist() == [2.0] * 4
threads = [threading.Thread(target=compile_some, args=[5]) for _ in range(3)]
for thread in threads:
    thread.start()
assert compiling.wait(60)
"""


def ends(program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", PROGRAM + program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_main_thread_ends_while_others_compile_and_python_waits_for_them(tmp_path: Path) -> None:
    # (Daemon threads are killed inside torch's C++, which aborts: with the guard as without it.)
    done = ends("print('out', sum(thread.is_alive() for thread in threads) > 0)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "out True\n"), done.stderr[-3000:]


def test_sigterm_ends_a_process_whose_threads_compile(tmp_path: Path) -> None:
    done = ends("os.kill(os.getpid(), signal.SIGTERM); threads[0].join()", tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr[-3000:]


SIGNALLED = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
x = torch.ones(4)
def send(*_):
    os.kill(os.getpid(), signal.{sent})
    for _ in range(1000):  # its handler runs between two of these steps
        pass
    print("goes on")
def backend_that_gets_it(graph, inputs):
    send()
    return graph.forward
def backward_that_gets_it():
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    aot = aot_autograd(fw_compiler=boxed_nop, bw_compiler=send)
    torch.compile(lambda x: x.sin() * x, backend=aot, dynamic=True)(x.clone().requires_grad_()).sum().backward()
def traced(x):
    send()
    return x + 1
places = dict(
    backend=lambda: torch.compile(lambda x: x * 2, backend=backend_that_gets_it)(x),
    guard_hook=lambda: torch.compile(lambda x: x * 2, backend="eager", options=dict(guard_filter_fn=send))(x),
    trace=lambda: torch.fx.symbolic_trace(traced),
    backward=backward_that_gets_it,
)
try:
    places[{place!r}]()
except KeyboardInterrupt:
    sys.exit(7)
"""


@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("place", ["backend", "guard_hook", "trace", "backward"])
def test_a_signal_in_main_while_it_compiles_among_others_ends_the_program(tmp_path: Path, place: str, sent: str) -> None:
    """Where Python code runs. One that comes while torch's C++ evaluates a guard is lost, with this guard as without: torch
    takes whatever a guard in Python raises for a guard that does not hold."""
    done = ends(SIGNALLED.format(place=place, sent=sent), tmp_path)
    assert (done.returncode, done.stdout) == (7, ""), done.stderr[-3000:]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_event_log_stops_no_compile(
    guard: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(EventLog, "_new_file", lambda self: os.open("/dev/full", os.O_WRONLY))
    LOG.open(str(tmp_path), lambda: False)
    try:
        run_in_threads(*[lambda: torch.compile(lambda x: x.sin() + 1, backend="eager")(x)] * 3)
    finally:
        LOG.close()
    said = [record.getMessage() for record in caplog.records if record.name == "compile_guard"]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert guard.trace_lock.owner is None


def test_an_inductor_cache_that_cannot_be_written_fails_its_compile_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = f"""
for thread in threads:  # each torch.compile asks for the folder
    thread.join()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = {str(tmp_path / "file" / "cache")!r}
try:
    torch.compile(lambda x: x.sin() * 3)(torch.ones(4))
except Exception as error:
    print("failed:", error)
del os.environ["TORCHINDUCTOR_CACHE_DIR"]
compile_some(1)
print("goes on")
"""
    done = ends(program, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Not a directory" in done.stdout
    assert done.stdout.splitlines()[-1] == "goes on"
