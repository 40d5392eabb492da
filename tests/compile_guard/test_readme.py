"""The README is true: its program runs, and each row of its table of changes is a test."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import compile_guard

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    """First cell of each row of the table of changes."""
    table = README.split("## What to change in a program", 1)[1].split("## ", 1)[0]
    cells = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")]
    return cells[2:]


def step(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x.cos()).relu()


x = torch.linspace(-1, 1, 16).reshape(4, 4)


def in_thread(call: Callable[[], Any]) -> Any:
    worker = compile_guard.Worker(call, device="cpu")
    worker.start()
    worker.join(60)
    return worker.result


def install_alone(guard: Any) -> None:
    """A compiled call beside a trace of another thread."""
    compiled = torch.compile(step, backend="eager")
    compiled(x)
    inside, done = threading.Event(), threading.Event()

    def traced(y: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert done.wait(60)
        return y * 2

    tracer = compile_guard.Worker(lambda: torch.fx.symbolic_trace(traced))
    tracer.start()
    assert inside.wait(60)
    torch.testing.assert_close(compiled(x), step(x))
    done.set()
    tracer.join(60)


def cache_of_its_own(guard: Any) -> None:
    first, second = (compile_guard.compile(step, backend="eager", dynamic=False) for _ in range(2))
    for n in range(1, 6):
        first(torch.ones(n, n))
    second(x)
    assert [info.num_entries for info in (*first.cache_info().values(), *second.cache_info().values())] == [5, 1]


def shared_by_layers(guard: Any) -> None:
    first, second = (compile_guard.compile(step, backend="eager", shared="readme") for _ in range(2))
    first(x)
    assert [info.num_entries for info in second.cache_info().values()] == [1]


def guarded_afterwards(guard: Any) -> None:
    compile_guard.uninstall()
    early = torch.compile(step, backend="eager")
    torch.testing.assert_close(compile_guard.guarded(early)(x), step(x))
    with pytest.raises(TypeError, match=r"takes what torch\.compile returned"):
        compile_guard.guarded(step)


def checkpoint_replays(guard: Any) -> None:
    drawn: list[torch.Tensor] = []

    def block(y: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(4))
        return (y * drawn[-1]).sin()

    def train() -> None:
        y = x.clone().requires_grad_()
        out = torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
        torch.rand(7)  # somebody draws between forward and recompute
        out.sum().backward()

    in_thread(train)
    assert len(drawn) == 2
    assert torch.equal(*drawn)


def worker_inherits(guard: Any) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert in_thread(lambda: torch.is_autocast_enabled("cpu"))

    def fails() -> None:
        raise KeyError("lost")

    worker = compile_guard.Worker(fails, device="cpu")
    worker.start()
    with pytest.raises(KeyError, match="lost"):
        worker.join(60)


def pool_inherits(guard: Any) -> None:
    with torch.no_grad():
        initializer = compile_guard.initializer("cpu")
    with ThreadPoolExecutor(1, initializer=initializer) as pool:
        assert pool.submit(torch.is_grad_enabled).result(60) is False


def exclusive_tracer(guard: Any) -> None:
    with compile_guard.exclusive():
        assert guard.trace_lock.owned()
        # A wait with a bound is no deadlock, though the owner waits for the waiter meanwhile.
        assert in_thread(lambda: guard.trace_lock.acquire(timeout=0.01)) is False


def warm_up_then_sealed(guard: Any) -> None:
    compiled = compile_guard.compile(step, backend="aot_eager", dynamic=False)
    compile_guard.warmup(compiled, [x.clone().requires_grad_()])
    with compile_guard.sealed(), compile_guard.watch("record") as found:
        compiled(x.clone().requires_grad_()).sum().backward()
        assert not found
        compiled(torch.ones(3, 3))
    assert [finding.code for finding in found] == ["sealed"]


def reset_one_device(guard: Any) -> None:
    compiled = compile_guard.compile(step, backend="eager")
    compiled(x)
    compile_guard.reset("cpu")
    assert compiled.cache_info() == {}
    torch._dynamo.reset()
    torch.testing.assert_close(compiled(x), step(x))


CLAIMS: dict[str, Callable[[Any], None]] = {
    "threads and `torch.compile`, `torch.fx`, `make_fx`, `torch.export`": install_alone,
    "`torch.compile(f)`": cache_of_its_own,
    "one function compiled many times (layers)": shared_by_layers,
    "something compiled before `install()`": guarded_afterwards,
    "`torch.utils.checkpoint.checkpoint`": checkpoint_replays,
    "`threading.Thread`": worker_inherits,
    "`ThreadPoolExecutor(4)`": pool_inherits,
    "a tracer of your own": exclusive_tracer,
    "a warm-up loop": warm_up_then_sealed,
    "`torch._dynamo.reset()`": reset_one_device,
}


def test_each_row_of_the_table_has_a_claim_here() -> None:
    assert rows() == list(CLAIMS)


@pytest.mark.parametrize("row", CLAIMS)
def test_row_of_the_table_holds(guard: Any, row: str) -> None:
    CLAIMS[row](guard)


def test_the_program_of_the_readme_runs(guard: Any, capsys: pytest.CaptureFixture[str]) -> None:
    program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 9
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    assert "CacheInfo(num_entries=1" in capsys.readouterr().out
