"""Inductor's pools and tables, CUDA graph trees and checkpoint frames: what the CPU can show of their seams."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from compile_guard.torch_seams import cudagraphs, inductor
from compile_guard.tracing import TRACE_LOCK
from tests.threads import Puppet, run_in_threads, wait


def test_a_pool_is_made_once_and_its_cache_can_be_cleared(guard: Any) -> None:
    made: list[object] = []
    begun = threading.Event()

    @functools.lru_cache(1)
    def make() -> object:
        begun.wait(0.2)  # whoever comes meanwhile finds nothing in the cache
        made.append(object())
        return made[-1]

    once = inductor._made_once(make, "pool")
    first, second = run_in_threads(once, once)
    assert first is second
    assert len(made) == 1
    once.cache_clear()  # type: ignore[attr-defined]
    assert once() is not first
    assert TRACE_LOCK.owner is None


def test_the_seam_stands_where_torch_looks(guard: Any) -> None:
    from torch._inductor.async_compile import AsyncCompile

    assert AsyncCompile.process_pool.__code__.co_filename == inductor.__file__
    assert AsyncCompile.process_pool.cache_info().maxsize == 1
    guard.uninstall()
    assert not hasattr(AsyncCompile.process_pool, "__code__")


def test_the_table_of_devices_is_full_after_install(guard: Any) -> None:
    from torch._inductor.codegen.common import device_op_overrides_dict

    if not inductor.device_table_is_filled_in_steps():
        pytest.skip("this torch fills its table to the end")
    assert {"cpu", "cuda", "mps", "xpu"} <= device_op_overrides_dict.keys()


def test_a_step_mark_is_that_of_its_thread(guard: Any, puppet: Callable[[], Puppet]) -> None:
    from torch._inductor import cudagraph_trees

    manager = cudagraph_trees.CUDAGraphTreeManager
    marker, other = puppet(), puppet()
    marker.do(torch.compiler.cudagraph_mark_step_begin)
    marker.do(torch.compiler.cudagraph_mark_step_begin)
    assert marker.do(manager.get_curr_generation) == -2
    assert not other.do(manager.user_invoked_mark_step)
    assert other.do(manager.get_curr_generation) >= 0
    assert {each.code for each in guard.findings()} == {"cudagraph-threads"}


def test_a_step_mark_reaches_the_autograd_threads_of_its_thread(guard: Any, puppet: Callable[[], Puppet]) -> None:
    """They have the thread-local objects of the thread that called backward, which are set here by hand."""
    from torch._inductor import cudagraph_trees

    launcher, device = puppet(), puppet()
    launcher.do(torch.compiler.cudagraph_mark_step_begin)
    graphs = launcher.do(torch._C._get_obj_in_tls, cudagraphs._STASHED)
    device.do(torch._C._stash_obj_in_tls, cudagraphs._STASHED, graphs)
    assert device.do(cudagraph_trees.CUDAGraphTreeManager.get_curr_generation) == -1


def test_each_thread_has_its_own_graph_trees(guard: Any, puppet: Callable[[], Puppet]) -> None:
    from torch._inductor import cudagraph_trees

    def containers() -> Any:
        return cudagraph_trees.get_obj(cudagraph_trees.local, "tree_manager_containers")

    first, second = puppet(), puppet()
    assert first.do(containers) is first.do(containers)
    assert first.do(containers) is not second.do(containers)


def test_a_function_with_graphs_records_them_in_each_thread(
    guard: Any, puppet: Callable[[], Puppet], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cudagraphs.trees_are_of_the_importing_thread():
        pytest.skip("this torch records graphs in each thread by itself")
    from torch._inductor import compile_fx, cudagraph_trees

    recorded: list[int] = []

    def record(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        recorded.append(threading.get_ident())
        return model

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", record)
    run = compile_fx.cudagraphify(
        lambda inputs: sum(inputs), (), device_index=0, stack_traces=[], is_backward=False, is_inference=True
    )
    first, second = puppet(), puppet()
    assert [each.do(run, [1, 2]) for each in (first, second, first, second)] == [3] * 4
    assert recorded == [first.ident, second.ident]


def test_two_threads_of_one_backward_recompute_a_block_once(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's autograd has one thread; here two of ours unpack, as the two devices' would, in one and the same backward."""
    runs: list[int] = []
    recomputing, asked = threading.Event(), threading.Event()

    def block(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        runs.append(threading.get_ident())
        if len(runs) == 2:
            recomputing.set()
            asked.wait(1.0)
        return a.sin(), b.cos()

    leaves = [torch.full((3,), value, requires_grad=True) for value in (0.5, 2.0)]
    outputs = checkpoint(block, *leaves, use_reentrant=False)
    nodes: list[Any] = [each.grad_fn for each in outputs]
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 7)

    def second() -> torch.Tensor:
        wait(recomputing)
        asked.set()
        saved: torch.Tensor = nodes[1]._saved_self
        return saved

    found = run_in_threads(lambda: nodes[0]._saved_self, second)
    assert [torch.equal(*pair) for pair in zip(found, leaves, strict=True)] == [True, True]
    assert len(runs) == 2
    assert torch._C._is_multithreading_enabled()
