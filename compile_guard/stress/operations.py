"""What threads of a program do: each operation checks what it got, and returns what must not depend on the schedule."""

from __future__ import annotations

import io
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import compile_guard
from compile_guard.device_cache import clone_function
from compile_guard.stress import instrument
from compile_guard.stress.points import point
from compile_guard.torch_seams.yield_points import lazy_backend

CHILD_WAIT_S = 30
"""A forked child that cannot compile within so many seconds is killed by its alarm."""


class _Ran(threading.local):
    """Compiled graphs that this thread has run."""

    num = 0


_ran = _Ran()


def watched(graph: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled graph whose runs are counted."""

    def run(*args: Any) -> Any:
        _ran.num += 1
        return graph(*args)

    return run


class Broken(AssertionError):
    """An operation got what it would not have got alone."""


class BackendError(Exception):
    """What the failing backend raises."""


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise Broken(what)


def step(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def other(x: torch.Tensor) -> torch.Tensor:
    return x.cos() * 3


def curve(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x


def in_two(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.linear(x).relu()
        return made


class Kit:
    """What all programs of a process use again: functions compiled once, which only a `reset` makes cold."""

    def __init__(self) -> None:
        self.num_compiles = 0
        self.guarded = compile_guard.is_installed()
        self.x = torch.linspace(0.0, 1.0, 8).reshape(2, 4)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = Layer()
        self.warm = self.compiled(step)
        self.module = self.compiled(self.layer)
        saved = io.BytesIO()
        torch.export.save(torch.export.export(Layer(), (self.x,), strict=False), saved)
        self.exported = saved.getvalue()
        self.rewarm()

    def backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        """Counts compiles, and the runs of what it compiled."""
        self.num_compiles += 1
        point("backend")
        return watched(graph.forward)

    def compiled(self, target: Any) -> Any:
        compiler: Any = compile_guard.compile if self.guarded else torch.compile
        return compiler(target, backend=self.backend)

    def rewarm(self) -> None:
        """Have everything compiled, whatever was reset."""
        self.warm(self.x)
        self.module(self.x)


_numbers = itertools.count(1)


class World:
    """What the threads of one run of a program share."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.x = kit.x
        self.cold = kit.compiled(fresh(other))
        self.whole = torch.compile(fresh(other), backend=kit.backend, fullgraph=True)
        self.in_two = torch.compile(fresh(in_two), backend=kit.backend)
        # A backend of its own: up to torch 2.9 each compile puts one more wrapper around the backend's backward compiler.
        self.trained = torch.compile(fresh(curve), backend=lazy_backend(point, watched), dynamic=True)
        self.blocks = torch.compile(fresh(curve), backend=kit.backend)
        self.draws: list[float] = []
        """Of the process-wide generators, in no order: none may come twice."""
        self._called: dict[Any, Callable[[], Any]] = {}

    def call_again(self) -> None:
        """Once more each compiled function that threads have called: whatever they did meanwhile, it is compiled still.

        Raises:
            Broken: it ran eager.
        """
        for again in self._called.values():
            again()

    def _compiled_call(self, function: Any, expected: torch.Tensor, num_graphs: int = 1) -> list[Any]:
        self._called[function] = lambda: self._compiled_call(function, expected, num_graphs)
        before = _ran.num
        made = function(self.x)
        num = _ran.num - before
        _check(num == num_graphs, f"a compiled function ran {num} graphs, not {num_graphs}: eager, or twice")
        _check(torch.equal(made, expected), "a compiled function returned other numbers than eager")
        listed: list[Any] = made.tolist()
        return listed

    def _backward(self, function: Any, call: Callable[[torch.Tensor], torch.Tensor], num_graphs: int) -> list[Any]:
        self._called[function] = lambda: self._backward(function, call, num_graphs)
        leaf = self.x.clone().requires_grad_()
        before = _ran.num
        loss = call(leaf).sum()
        point("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        num = _ran.num - before
        _check(num == num_graphs, f"a step of training ran {num} graphs, not {num_graphs}: eager, or twice")
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, self.x.sin() + self.x * self.x.cos())
        listed: list[Any] = leaf.grad.tolist()
        return listed

    def call(self) -> Any:
        point("call")
        return self._compiled_call(self.kit.warm, step(self.x))

    def module(self) -> Any:
        point("call")
        return self._compiled_call(self.kit.module, self.kit.layer(self.x).detach())

    def cold_call(self) -> Any:
        point("call")
        return self._compiled_call(self.cold, other(self.x))

    def compile(self) -> Any:
        point("compile")
        return self._compiled_call(torch.compile(fresh(other), backend=self.kit.backend), other(self.x))

    def fullgraph(self) -> Any:
        point("call")
        return self._compiled_call(self.whole, other(self.x))

    def graph_break(self) -> Any:
        point("call")
        return self._compiled_call(self.in_two, self.x.sin().cos(), num_graphs=2)

    def failing(self) -> str:
        def backend(graph: Any, inputs: Any) -> Any:
            point("backend")
            raise BackendError("its own")

        point("compile")
        try:
            torch.compile(fresh(other), backend=backend)(self.x)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            return f"{error.inner_exception!r}"
        raise Broken("a backend raised, and its compile did not")

    def trace(self) -> Any:
        graph = torch.fx.symbolic_trace(self.kit.layer)
        return [f"{node.op} {node.target}" for node in graph.graph.nodes]

    def make_fx(self) -> Any:
        point("make_fx")
        graph = make_fx(step)(self.x)
        _check(torch.equal(graph(self.x), step(self.x)), "make_fx recorded another function")
        return [f"{node.op} {node.target}" for node in graph.graph.nodes]

    def export(self) -> Any:
        point("export")
        # A module of its own: export puts fake tensors in place of the parameters of the one that it is given.
        exported = torch.export.export(Layer(), (self.x,), strict=False)
        return [f"{node.op} {node.target}" for node in exported.graph.nodes]

    def load(self) -> Any:
        point("load")
        loaded = torch.export.load(io.BytesIO(self.kit.exported))
        return [f"{node.op} {node.target}" for node in loaded.graph.nodes]

    def train(self) -> Any:
        return self._backward(self.trained, self.trained, num_graphs=2)

    def compiled_block(self) -> Any:
        def block(x: torch.Tensor) -> Any:
            point("recompute")
            return self.blocks(x)

        return self._backward(
            self.blocks, lambda leaf: torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=False), num_graphs=2
        )

    def checkpoint(self) -> None:
        def block(x: torch.Tensor) -> torch.Tensor:
            point("recompute")
            dropped = nn.functional.dropout(x)
            point("recompute")
            return dropped * 2

        leaf = torch.ones(16, requires_grad=True)
        made = torch.utils.checkpoint.checkpoint(block, leaf, use_reentrant=False)
        point("backward")
        made.sum().backward()
        same = leaf.grad is not None and torch.equal(leaf.grad, made.detach())
        _check(same, "a recompute drew another mask than its forward")

    def reset(self) -> None:
        point("reset")
        torch._dynamo.reset()

    def stance(self) -> Any:
        point("stance")
        before = _ran.num
        with torch.compiler.set_stance("force_eager"):
            point("stance")
            made = self.kit.warm(self.x)
        _check(_ran.num == before, "a function ran compiled under the stance force_eager")
        return made.tolist()

    def config(self) -> Any:
        """Looks inside its blocks only: up to torch 2.11 a thread outside them sees what another has patched, guard or no."""
        from torch._dynamo import config

        own = 1000 * next(_numbers)
        seen = []
        point("config")
        with config.patch(recompile_limit=own + 11):
            point("config")
            seen.append(config.recompile_limit - own)
            with config.patch(recompile_limit=own + 23):
                point("config")
                seen.append(config.recompile_limit - own)
            point("config")
            seen.append(config.recompile_limit - own)
        return seen

    def construct(self) -> Any:
        point("construct")
        with torch.device("meta"):
            made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), Layer())
            point("construct")
            made.append(nn.LayerNorm(4))
        return [f"{name} {tuple(each.shape)} {each.device} {each.dtype}" for name, each in made.named_parameters()]

    def draw(self) -> None:
        point("draw")
        self.draws += [torch.rand(()).item(), random.random()]

    def eager(self) -> Any:
        point("eager")
        _check(not torch.compiler.is_compiling(), "eager code was told that it compiles")
        made = self.kit.layer(self.x)
        _check(not isinstance(made, torch.fx.Proxy), "eager code got another thread's proxy")
        return made.tolist()

    def fork(self) -> Any:
        point("fork")
        child = os.fork()
        if not child:
            self._in_child()
        _, status = os.waitpid(child, 0)
        _check(status == 0, f"a forked child could not compile (status {status})")
        point("fork")

    def _in_child(self) -> None:
        import signal

        status = 1
        try:
            instrument.leave()
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(CHILD_WAIT_S)
            compiled = torch.compile(fresh(other), backend="eager")
            status = not torch.equal(compiled(self.x), other(self.x))
        finally:
            os._exit(status)  # the parent's threads and exit handlers are none of the child's


def fresh(function: Callable[[torch.Tensor], torch.Tensor]) -> FunctionType:
    """A copy with a code object of its own, so that nothing is compiled for it."""
    assert isinstance(function, FunctionType)
    return clone_function(function, f"stress_{next(_numbers)}")


OPERATIONS: dict[str, tuple[Callable[[World], Any], int]] = {
    "call": (World.call, 1),
    "module": (World.module, 1),
    "cold": (World.cold_call, 10),
    "compile": (World.compile, 10),
    "fullgraph": (World.fullgraph, 10),
    "graph_break": (World.graph_break, 10),
    "failing": (World.failing, 5),
    "trace": (World.trace, 1),
    "make_fx": (World.make_fx, 3),
    "export": (World.export, 7),
    "load": (World.load, 7),
    "train": (World.train, 15),
    "compiled_block": (World.compiled_block, 15),
    "checkpoint": (World.checkpoint, 1),
    "reset": (World.reset, 20),
    "stance": (World.stance, 1),
    "config": (World.config, 1),
    "construct": (World.construct, 1),
    "draw": (World.draw, 1),
    "eager": (World.eager, 1),
    "fork": (World.fork, 20),
}
"""By the name that programs use; and the time that each takes, in about 4 ms."""

MAY_COMPILE = {
    "call": 1, "module": 1, "cold": 1, "compile": 1, "fullgraph": 1, "graph_break": 2, "compiled_block": 2
}  # fmt: skip
"""Graphs that an operation compiles by the counting backend, at most: those that resets beside it have made cold."""


def rounds_between(threads: Iterable[Iterable[str]]) -> int:
    """In every how manieth round of exploration a program shall run: the dear ones seldom."""
    return 1 + sum(OPERATIONS[name][1] for thread in threads for name in thread) // 6
