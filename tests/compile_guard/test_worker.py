"""Workers: threads that begin as the one that made them, and whose failure is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import compile_guard
from compile_guard import DeadlockError, Worker
from tests.threads import Puppet, run_in_threads, until, wait


def run(target: Callable[..., Any], **kwargs: Any) -> Any:
    worker = Worker(target, **kwargs)
    worker.start()
    worker.join(60)
    assert not worker.is_alive()
    return worker.result


def state() -> dict[str, Any]:
    """What a thread has of its own in torch."""
    from torch._dynamo import config

    return {
        "recompile_limit": config.recompile_limit,
        "num_threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "default_dtype": torch.get_default_dtype(),
    }


def test_worker_inherits_config_thread_count_grad_mode_and_autocast(guard: Any) -> None:
    from torch._dynamo import config

    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        with config.patch(recompile_limit=33), torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
            assert run(state) == state()
            assert state()["recompile_limit"] == 33
            assert state()["autocast"] == (True, torch.float16)
    finally:
        torch.set_num_threads(num_threads)


def test_pool_initializer_inherits_the_same(guard: Any) -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=34), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = state()
        with ThreadPoolExecutor(2, initializer=compile_guard.initializer()) as pool:
            assert pool.submit(state).result(60) == expected


def test_plain_thread_inherits_the_configuration(guard: Any) -> None:
    from torch._dynamo import config

    with config.patch(recompile_limit=35):
        limits = run_in_threads(*[lambda: config.recompile_limit] * 2)
    assert limits == [35, 35]
    assert run_in_threads(lambda: config.recompile_limit) == [config.recompile_limit]


def test_configuration_changed_in_a_worker_stays_in_it(guard: Any) -> None:
    from torch._dynamo import config

    from compile_guard.torch_seams import config_is_per_thread

    if not config_is_per_thread():
        pytest.skip("this torch keeps one configuration for the process")
    before = config.recompile_limit

    def change() -> None:
        config.recompile_limit = 77

    run(change)
    assert config.recompile_limit == before


def test_context_variables_of_others_begin_anew(guard: Any) -> None:
    import contextvars

    request = contextvars.ContextVar("request", default="none")
    request.set("of the main thread")
    assert run_in_threads(request.get) == ["none"]


def test_result_and_arguments() -> None:
    assert run(lambda a, *, b: (a, b), args=[1], kwargs={"b": 2}) == (1, 2)


def test_worker_is_named_after_its_device_or_as_told() -> None:
    assert Worker(print, device="cpu").name == "worker-cpu"
    assert Worker(print, device="cpu", name="drafter").name == "drafter"
    assert Worker(print, device="cpu").device == torch.device("cpu")


def test_generator_is_the_workers_own_and_seeded() -> None:
    before = torch.random.get_rng_state()
    one, other = (Worker(print, device="cpu", seed=7) for _ in range(2))
    assert torch.equal(torch.rand(3, generator=one.generator), torch.rand(3, generator=other.generator))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("error", [LookupError("lost"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_join_raises_what_the_worker_died_of_once(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def die() -> None:
        raise error

    worker = Worker(die)
    worker.start()
    with pytest.raises(type(error)) as caught:
        worker.join()
    assert caught.value is error
    worker.join()


def test_join_with_a_timeout_returns_while_the_worker_runs() -> None:
    go_on = threading.Event()
    worker = Worker(lambda: wait(go_on))
    worker.start()
    worker.join(0.01)
    assert worker.is_alive()
    go_on.set()
    worker.join()
    assert not worker.is_alive()


def test_join_before_start_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"has not been started; call start\(\) before join\(\)"):
        Worker(print, name="early").join()


def test_two_workers_that_join_each_other_are_refused(puppet: Callable[[], Puppet]) -> None:
    workers: list[Worker] = []
    both = threading.Barrier(2)

    def join_the_other(other: int) -> None:
        both.wait(30)
        workers[other].join()

    workers += [Worker(join_the_other, args=[1 - number], name=f"w{number}") for number in range(2)]
    for worker in workers:
        worker.start()
    errors = []
    for worker in workers:
        try:
            worker.join(60)
        except DeadlockError as error:
            errors.append(str(error))
    assert errors
    assert "for ever" in errors[0]
    assert not any(worker.is_alive() for worker in workers)


def test_a_worker_that_joins_itself_is_told_that_it_cannot() -> None:
    worker: list[Worker] = []
    worker.append(Worker(lambda: worker[0].join(), name="narcissus"))
    worker[0].start()
    with pytest.raises(DeadlockError, match=r"thread narcissus to end for ever: it cannot end while it waits"):
        worker[0].join(60)


def test_join_while_holding_the_lock_that_the_worker_needs_is_refused(guard: Any) -> None:
    def trace() -> None:
        torch.fx.symbolic_trace(lambda x: x + 1)

    worker = Worker(trace)
    with compile_guard.exclusive():
        worker.start()
        until(lambda: worker.ident in compile_guard.waits.waiting(), "the worker to wait for the lock")
        with pytest.raises(DeadlockError, match=r"thread Thread-.* to end for ever"):
            worker.join()
    worker.join()


def test_worker_that_starts_waiting_for_the_lock_of_its_joiner_is_refused(guard: Any) -> None:
    """The other order: the join is there first."""
    joined = threading.Event()
    main = threading.get_ident()

    def trace() -> None:
        until(lambda: main in compile_guard.waits.waiting(), "the join")
        joined.set()
        torch.fx.symbolic_trace(lambda x: x + 1)

    worker = Worker(trace)
    with compile_guard.exclusive():
        worker.start()
        with pytest.raises(DeadlockError, match="would wait for the trace lock for ever"):
            worker.join()
    assert joined.is_set()
    torch.fx.symbolic_trace(lambda x: x + 1)


def test_worker_cannot_be_started_twice_and_may_be_a_daemon() -> None:
    worker = Worker(int, daemon=True)
    assert worker.daemon
    worker.start()
    worker.join()
    with pytest.raises(RuntimeError):
        worker.start()


def test_a_failure_that_nobody_joins_is_told_at_exit() -> None:
    program = (
        "import compile_guard as cg\ndef fails(): raise KeyError('lost')\nw = cg.Worker(fails, name='forgotten')\nw.start()\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": root},
        timeout=120,
        check=True,
    )
    assert "thread forgotten died, and nobody joined it" in done.stderr
    assert "KeyError: 'lost'" in done.stderr
