"""E9: two threads that find no pool of compile workers each make one; one of them is lost with its processes."""

from __future__ import annotations

import os
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import meet, run_threads


def affected() -> Affected:
    from torch._inductor.async_compile import AsyncCompile

    if hasattr(AsyncCompile.process_pool, "cache_info"):
        fork = hasattr(os, "fork")
        return Affected(True, "`AsyncCompile.process_pool` is an `lru_cache`, which two first calls at once both fill", fork)
    return Affected(False, "`AsyncCompile.process_pool` is not an `lru_cache`")


def count_pools(*, at_once: bool) -> int:
    """Warm Inductor's pool up from two threads; how many pools of processes are made?"""
    from torch._inductor import async_compile, config

    both = threading.Barrier(2)
    made: list[Any] = []
    make_pool = async_compile.SubprocPool

    def make_when_both_are_here(*args: Any, **kwargs: Any) -> Any:
        if at_once:
            meet(both)
        made.append(make_pool(*args, **kwargs))
        return made[-1]

    def warm_up() -> None:
        config.compile_threads = 2  # in the thread: from torch 2.12 on, each has its own configuration
        config.worker_start_method = "subprocess"
        async_compile.AsyncCompile.warm_pool()

    async_compile.AsyncCompile.process_pool.cache_clear()
    async_compile.SubprocPool = make_when_both_are_here
    try:
        if at_once:
            run_threads(first=warm_up, second=warm_up)
        else:
            run_threads(first=warm_up)
            run_threads(second=warm_up)
    finally:
        async_compile.SubprocPool = make_pool
        for pool in made:
            pool.shutdown()
        async_compile.after_fork()  # forgets the pools, which are shut down
    return len(made)


def trigger() -> str | None:
    num_pools = count_pools(at_once=True)
    return None if num_pools == 1 else f"two threads asked for Inductor's pool of compile workers: {num_pools} pools were made"


def mirror() -> None:
    num_pools = count_pools(at_once=False)
    if num_pools != 1:
        raise AssertionError(f"two threads, one after the other, made {num_pools} pools")


HAZARD = Hazard(
    id="E9",
    name="pool_twice",
    title="Two threads each make Inductor's pool of compile workers",
    symptom="No error: twice the worker processes and their memory; half of them idle until the program ends.",
    mechanism=(
        "`AsyncCompile.process_pool` is a factory under `functools.lru_cache`, which keeps results but does not keep two "
        "first calls apart. A compile comes here under torch's lock; `warm_pool()`, `torch._inductor.compile` and "
        "autotuning do not."
    ),
    links=("pytorch#121197", "pytorch#142001"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("worker_pools",),
    finding="second-pool",
    fix="Install the guard; or compile something, or call `AsyncCompile.warm_pool()`, before the threads start.",
)
