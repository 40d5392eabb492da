"""What a thread, or a backward on an autograd thread, has of the thread that started it: configuration, device, stack."""

from __future__ import annotations

import _thread
import contextvars
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._dynamo import config

from compile_guard.torch_seams import configuration, thread_stack
from compile_guard.torch_seams.devices import capture_device
from tests.threads import PATIENCE_S, run_in_threads

per_thread = pytest.mark.skipif(
    not configuration.config_is_per_thread(), reason="this torch has one configuration for the process"
)


def in_foreign_thread(function: Callable[[], Any]) -> Any:
    """What `function` returns in a thread that Python's `threading` did not start, as autograd's are."""
    returned: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        try:
            returned.put(function())
        except BaseException as error:
            returned.put(error)

    _thread.start_new_thread(run, ())
    result = returned.get(timeout=PATIENCE_S)
    if isinstance(result, BaseException):
        raise result
    return result


def limit_while_compiling(seen: list[int]) -> Callable[[], None]:
    """A function that compiles something at each call, and notes the recompile limit that holds meanwhile."""

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.append(config.recompile_limit)
        return graph.forward

    compiled = torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)
    return lambda: compiled(torch.ones(2 + len(seen)))


@per_thread
@pytest.mark.parametrize("wrap", [lambda context: context, configuration._EnteredOften], ids=["context", "ours"])
def test_a_compile_during_a_backward_has_the_configuration_of_its_caller(guard: Any, wrap: Any) -> None:
    """The device's thread has torch's copy of the caller's context, and an empty one of its own."""
    with config.patch(recompile_limit=77):
        context = wrap(contextvars.copy_context())
    seen: list[int] = []
    compile_once = limit_while_compiling(seen)

    def backward() -> tuple[int, int]:
        torch._C._stash_obj_in_tls("context", context)
        try:
            before = config.recompile_limit
            compile_once()
            return before, config.recompile_limit
        finally:
            torch._C._remove_obj_from_tls("context")

    default = in_foreign_thread(lambda: config.recompile_limit)
    assert in_foreign_thread(backward) == (default, default)
    assert seen == [77]
    (found,) = [each for each in guard.findings() if each.code == "config-lost"]
    assert "recompile_limit" in found.subject
    assert found.prevented


@per_thread
def test_a_thread_tells_once_and_only_of_what_is_not_the_default(guard: Any) -> None:
    seen: list[int] = []
    compile_once = limit_while_compiling(seen)
    config.recompile_limit = int(config.recompile_limit)  # assigned, but to the default
    try:
        run_in_threads(compile_once)
        assert guard.findings() == []
        with config.patch(recompile_limit=33):
            run_in_threads(lambda: [compile_once() for _ in range(3)])
    finally:
        delattr(config, "recompile_limit")
        config._config["recompile_limit"].hide = False
    assert seen[1:] == [33, 33, 33]
    assert [(each.code, each.count) for each in guard.findings()] == [("config-lost", 1)]


def test_compiled_backwards_may_run_in_one_context_at_the_same_time() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")
    variable.set("the caller's")
    context = configuration._EnteredOften(contextvars.copy_context())

    def inner() -> str:
        variable.set("the inner one's")
        return variable.get()

    def outer() -> tuple[str, str, str]:
        first = variable.get()
        return first, context.run(inner), variable.get()

    assert context.run(outer) == ("the caller's", "the inner one's", "the caller's")
    assert variable.get() == "the caller's"


def test_a_thread_has_the_default_device_of_its_starter_and_no_more(guard: Any) -> None:
    def device() -> str:
        return torch.ones(1).device.type

    torch.set_default_device("meta")
    try:
        assert run_in_threads(device) == ["meta"]
        assert in_foreign_thread(device) == "cpu"  # torch's own behaviour
    finally:
        torch.set_default_device(None)
    with torch.device("meta"):  # a block is its thread's
        assert run_in_threads(device) == ["cpu"]
    assert [each.code for each in guard.findings()] == ["thread-device"]


def test_where_nothing_is_set_a_thread_is_given_nothing(guard: Any) -> None:
    assert capture_device() is None
    assert run_in_threads(lambda: torch.ones(1).device.type) == ["cpu"]
    assert guard.findings() == []


def test_a_thread_has_the_autocast_of_its_starter_and_sees_weights_as_they_are(guard: Any) -> None:
    """torch's cache of casts is dropped where an outermost block ends: inherited autocast has no such end."""
    weight = torch.ones(2, 2, requires_grad=True)
    seen: list[float] = []

    def train() -> torch.dtype:
        for value in (1.0, 2.0):
            with torch.no_grad():
                weight.fill_(value)
            product = torch.ones(2, 2) @ weight
            seen.append(product[0, 0].item())
        return product.dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert run_in_threads(train) == [torch.bfloat16]
    assert seen == [2.0, 4.0]
    assert run_in_threads(train) == [torch.float32]
    assert [each.code for each in guard.findings()] == ["thread-autocast"]


def test_a_thread_of_a_pool_does_not_keep_the_block_it_was_started_in(guard: Any) -> None:
    with ThreadPoolExecutor(1) as pool, torch.autocast("cpu", torch.bfloat16):
        assert pool.submit(torch.is_autocast_enabled, "cpu").result(PATIENCE_S) is False
    assert guard.findings() == []


def test_a_small_stack_is_made_large_for_the_start_alone(guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    size_at_start: list[int] = []
    start_new_thread = threading._start_new_thread  # type: ignore[attr-defined]

    def noting(*args: Any) -> Any:
        size_at_start.append(threading.stack_size(thread_stack.ENOUGH))
        return start_new_thread(*args)

    before = threading.stack_size(256 * 1024)
    try:
        if hasattr(threading, "_start_joinable_thread"):  # 3.13
            pytest.skip("threads are started by another function of C on this Python")
        monkeypatch.setattr(threading, "_start_new_thread", noting)
        run_in_threads(lambda: None)
    finally:
        after = threading.stack_size(before)
    assert (size_at_start, after) == ([thread_stack.ENOUGH], 256 * 1024)
    assert [each.code for each in guard.findings()] == ["thread-stack"]


def test_a_large_stack_and_the_default_are_left_alone(guard: Any) -> None:
    before = threading.stack_size(2 * thread_stack.ENOUGH)
    try:
        run_in_threads(lambda: None)
        assert threading.stack_size(0) == 2 * thread_stack.ENOUGH
        run_in_threads(lambda: None)
    finally:
        assert threading.stack_size(before) == 0
    assert guard.findings() == []
