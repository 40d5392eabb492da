"""Checkpointed blocks in threads: a recompute draws what its forward drew, in its forward's configuration."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import compile_guard
from compile_guard import ReplayError
from tests.threads import PATIENCE_S, run_in_threads

NUM_THREADS = 3
both_modes = pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])


def dropout(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.5)


def rand(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape)


def bernoulli_(x: torch.Tensor) -> torch.Tensor:
    return x * torch.empty(x.shape).bernoulli_(0.5)


def several(x: torch.Tensor) -> torch.Tensor:
    return rand(bernoulli_(dropout(x + torch.randn_like(x)))) * torch.randint(1, 9, x.shape)


DRAWS = [dropout, rand, bernoulli_, several]


def in_threads(
    draw: Callable[[torch.Tensor], torch.Tensor], *, use_reentrant: bool, **kwargs: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Train a checkpointed block that draws in three threads at once: what forward and recompute drew in each."""
    drawn, one_backward = threading.Barrier(NUM_THREADS), threading.Lock()

    def train() -> tuple[torch.Tensor, torch.Tensor]:
        seen: list[torch.Tensor] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            if not seen:
                drawn.wait(PATIENCE_S)  # stock checkpoint has saved the generators' state by now, the same in all threads
            y = draw(x)
            seen.append(y.detach().clone())
            return y.sin()

        x = torch.ones(200, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=use_reentrant, **kwargs)
        drawn.wait(PATIENCE_S)
        with one_backward:
            y.sum().backward()
        forward, recompute = seen
        return forward, recompute

    return run_in_threads(*[train] * NUM_THREADS)


@both_modes
@pytest.mark.parametrize("draw", DRAWS)
def test_recompute_draws_what_its_forward_drew(guard: Any, draw: Any, use_reentrant: bool) -> None:
    pairs = in_threads(draw, use_reentrant=use_reentrant)
    for forward, recompute in pairs:
        assert torch.equal(forward, recompute)
    assert not torch.equal(pairs[0][0], pairs[1][0]), "threads draw different numbers"


@both_modes
def test_bare_torch_draws_others(clean: None, use_reentrant: bool) -> None:
    """The mirror: without the guard they differ, so that the test above can fail."""
    assert any(not torch.equal(*pair) for pair in in_threads(dropout, use_reentrant=use_reentrant))


@both_modes
def test_drawing_in_several_threads_is_one_prevented_finding(guard: Any, use_reentrant: bool) -> None:
    in_threads(dropout, use_reentrant=use_reentrant)
    assert {(found.code, found.prevented) for found in guard.findings()} <= {("checkpoint-rng", True)}


@both_modes
def test_generator_moves_on_as_by_the_draws_of_the_forwards_alone(guard: Any, use_reentrant: bool) -> None:
    def train() -> None:
        x = torch.ones(5, requires_grad=True)
        checkpoint(rand, x, use_reentrant=use_reentrant).sum().backward()

    torch.manual_seed(0)
    run_in_threads(train)
    after = torch.rand(3)
    torch.manual_seed(0)
    torch.rand(5)
    assert torch.equal(after, torch.rand(3))


@both_modes
def test_without_preserve_rng_state_the_recompute_draws_anew(guard: Any, use_reentrant: bool) -> None:
    for forward, recompute in in_threads(rand, use_reentrant=use_reentrant, preserve_rng_state=False):
        assert not torch.equal(forward, recompute)


@both_modes
def test_gradients_are_those_of_the_uncheckpointed_block(guard: Any, use_reentrant: bool) -> None:
    weight = torch.randn(4, 4)

    def block(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return (x @ weight).relu() * scale

    def train() -> tuple[torch.Tensor | None, torch.Tensor | None]:
        a, b = (torch.ones(2, 4, requires_grad=True) for _ in range(2))
        checkpoint(block, a, 2.0, use_reentrant=use_reentrant).sum().backward()
        block(b, 2.0).sum().backward()
        return a.grad, b.grad

    for ours, plain in run_in_threads(*[train] * NUM_THREADS):
        torch.testing.assert_close(ours, plain)


def test_keyword_arguments_reach_the_block(guard: Any) -> None:
    def block(x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return dropout(x) * scale

    def train() -> torch.Tensor:
        x = torch.ones(50, requires_grad=True)
        y = checkpoint(block, x, use_reentrant=False, scale=3.0)
        y.sum().backward()
        assert x.grad is not None
        return torch.equal(x.grad, y.detach())

    assert run_in_threads(train) == [True]


@both_modes
def test_nested_checkpoints_replay_both(guard: Any, use_reentrant: bool) -> None:
    def train() -> list[torch.Tensor]:
        inner_seen: list[torch.Tensor] = []

        def inner(x: torch.Tensor) -> torch.Tensor:
            y = dropout(x)
            inner_seen.append(y.detach().clone())
            return y.sin()

        def outer(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(inner, rand(x) + 1, use_reentrant=use_reentrant) * 2

        x = torch.ones(100, requires_grad=True)
        checkpoint(outer, x, use_reentrant=use_reentrant).sum().backward()
        return inner_seen

    for masks in run_in_threads(*[train] * NUM_THREADS):
        assert len(masks) >= 2
        for mask in masks[1:]:
            assert torch.equal(mask, masks[0])


def test_backward_twice_with_retain_graph_replays_twice(guard: Any) -> None:
    def train() -> None:
        seen: list[torch.Tensor] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            y = rand(x)
            seen.append(y.detach().clone())
            return y.sin()

        x = torch.ones(20, requires_grad=True)
        loss = checkpoint(block, x, use_reentrant=False).sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        assert torch.equal(first, second)
        assert all(torch.equal(each, seen[0]) for each in seen)

    run_in_threads(*[train] * NUM_THREADS)


def test_second_derivative_goes_through(guard: Any) -> None:
    def train() -> tuple[torch.Tensor, torch.Tensor]:
        def second(function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            x = torch.full((3,), 0.5, requires_grad=True)
            (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
            (result,) = torch.autograd.grad(first.sum(), x)
            return result

        return second(lambda x: checkpoint(torch.sin, x, use_reentrant=False)), second(torch.sin)

    ours, plain = run_in_threads(train)[0]
    torch.testing.assert_close(ours, plain)


@both_modes
def test_exception_in_the_block_comes_out_and_leaves_no_mode_behind(guard: Any, use_reentrant: bool) -> None:
    def fail(x: torch.Tensor) -> torch.Tensor:
        rand(x)
        raise LookupError("of the block")

    def train() -> int:
        with pytest.raises(LookupError, match="of the block"):
            checkpoint(fail, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
        x = torch.ones(3, requires_grad=True)
        checkpoint(rand, x, use_reentrant=use_reentrant).sum().backward()
        return torch._C._len_torch_dispatch_stack()

    assert run_in_threads(*[train] * NUM_THREADS) == [0] * NUM_THREADS


@both_modes
def test_exception_in_the_recompute_comes_out_and_leaves_no_mode_behind(guard: Any, use_reentrant: bool) -> None:
    def train() -> int:
        calls: list[int] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) > 1:
                raise LookupError("of the recompute")
            return rand(x).sin()

        x = torch.ones(3, requires_grad=True)
        loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
        with pytest.raises(LookupError, match="of the recompute"):
            loss.backward()
        return torch._C._len_torch_dispatch_stack()

    assert run_in_threads(train) == [0]


@pytest.mark.parametrize("again", ["another op", "one op more"])
@both_modes
def test_a_block_that_draws_otherwise_in_its_recompute_raises_and_says_where(
    guard: Any, use_reentrant: bool, again: str
) -> None:
    def train() -> None:
        calls: list[int] = []

        def block(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            if len(calls) == 1:
                return dropout(x).sin()
            y = rand(x) if again == "another op" else rand(dropout(x))
            return y.sin()

        x = torch.ones(3, requires_grad=True)
        loss = checkpoint(block, x, use_reentrant=use_reentrant).sum()
        with pytest.raises(ReplayError, match=r"draws aten\.rand.* as random op [12] of its recompute, where its forward had"):
            loss.backward()

    run_in_threads(train)


def test_early_stop_of_the_recompute_is_no_error(guard: Any) -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        y = dropout(x).sin()
        return dropout(y)  # the backward needs nothing that comes after the mask

    def train() -> None:
        x = torch.ones(30, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum().backward()

    run_in_threads(*[train] * NUM_THREADS)


def test_block_made_alone_and_recomputed_beside_other_threads(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward ran with one thread; its recompute meets another one's draws."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    x = torch.ones(300, requires_grad=True)
    y = checkpoint(dropout, x, use_reentrant=False)
    run_in_threads(lambda: torch.rand(1000))
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


@both_modes
@pytest.mark.parametrize("compiler", [torch.compile, compile_guard.compile])
def test_compiled_function_inside_a_block_stays_compiled_with_one_entry(guard: Any, compiler: Any, use_reentrant: bool) -> None:
    num_compiles = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_compiles
        num_compiles += 1
        return graph.forward

    num_eager = 0

    def layer(x: torch.Tensor) -> torch.Tensor:
        nonlocal num_eager
        if not torch.compiler.is_dynamo_compiling():
            num_eager += 1
        return x.sin() * 2

    compiled = compiler(layer, backend=backend)

    def block(x: torch.Tensor) -> torch.Tensor:
        return compiled(dropout(x)) + 1

    def train() -> None:
        for _ in range(3):
            x = torch.ones(8, requires_grad=True)
            checkpoint(block, x, use_reentrant=use_reentrant).sum().backward()

    train()
    compiles_alone = num_compiles
    assert compiles_alone == (2 if use_reentrant else 1)  # reentrant: once without gradients, once with
    run_in_threads(*[train] * NUM_THREADS)
    assert num_compiles == compiles_alone
    assert num_eager == 0


@both_modes
def test_compiled_function_that_draws_replays_or_is_a_finding(guard: Any, use_reentrant: bool) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5).sin()

    compiled = torch.compile(layer, backend="aot_eager")

    def train() -> bool:
        x = torch.ones(400, requires_grad=True)
        y = checkpoint(compiled, x, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad is not None
        # sin(2) or sin(0), whose derivatives are 2 cos(2) and 0
        return torch.equal(x.grad != 0, y.detach() != 0)

    same = run_in_threads(*[train] * NUM_THREADS)
    happened = [found for found in guard.findings() if found.code == "checkpoint-rng" and not found.prevented]
    assert all(same) or happened


def test_recompute_on_another_thread_has_the_forwards_configuration(guard: Any) -> None:
    from torch._dynamo import config

    seen: list[int] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        seen.append(config.recompile_limit)
        return x.sin()

    def forward() -> torch.Tensor:
        with config.patch(recompile_limit=33):
            return checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False)

    y = run_in_threads(forward)[0]
    run_in_threads(lambda: y.sum().backward())
    if torch_keeps_config_per_thread():
        assert seen == [33, 33]
        assert [found.code for found in guard.findings()] == ["config-lost"]
    else:
        assert seen[0] == 33


def torch_keeps_config_per_thread() -> bool:
    from compile_guard.torch_seams import config_is_per_thread

    return config_is_per_thread()


def test_our_own_checkpoint_is_non_reentrant_and_installs_the_guard(clean: None) -> None:
    x = torch.ones(40, requires_grad=True)
    y = compile_guard.checkpoint(dropout, x)
    assert compile_guard.is_installed()
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())
    assert torch.equal(compile_guard.checkpoint(lambda x, *, by: x * by, x, by=2.0), x * 2)


def test_inside_a_compiled_function_torchs_own_way_is_taken(guard: Any) -> None:
    backend_graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        backend_graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x, use_reentrant=False) * 2

    x = torch.ones(3, requires_grad=True)
    run_in_threads(lambda: train_step(x).sum().backward())
    torch.testing.assert_close(x.grad, x.detach().cos() * 2)
    assert len(backend_graphs) == 1


def test_selective_checkpointing_works(guard: Any) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def train() -> None:
        x = torch.ones(3, 3, requires_grad=True)
        checkpoint(
            lambda x: (x @ x).sin(),
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        ).sum().backward()
        expected = torch.ones(3, 3, requires_grad=True)
        (expected @ expected).sin().sum().backward()
        torch.testing.assert_close(x.grad, expected.grad)

    run_in_threads(*[train] * NUM_THREADS)


def test_checkpoint_sequential_replays(guard: Any) -> None:
    from torch.utils.checkpoint import checkpoint_sequential

    def train() -> None:
        seen: list[torch.Tensor] = []

        class Draw(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = dropout(x)
                seen.append(y.detach().clone())
                return y.sin()

        model = torch.nn.Sequential(Draw(), torch.nn.Identity())
        x = torch.ones(100, requires_grad=True)
        checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        assert len(seen) <= 2
        assert all(torch.equal(each, seen[0]) for each in seen)

    run_in_threads(*[train] * NUM_THREADS)


def test_autocast_of_the_forward_holds_in_the_recompute(guard: Any) -> None:
    dtypes: list[torch.dtype] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        y = x @ x
        dtypes.append(y.dtype)
        return y.sin()

    def train() -> None:
        x = torch.ones(3, 3, requires_grad=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = checkpoint(block, x, use_reentrant=False)
        y.sum().backward()

    run_in_threads(train)
    assert dtypes == [torch.bfloat16] * 2
