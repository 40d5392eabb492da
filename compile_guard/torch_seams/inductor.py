"""What Inductor makes at first use, without a lock of its own: its tables of devices, its pools of workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam
from compile_guard.tracing import TRACE_LOCK


def device_table_is_filled_in_steps() -> bool:
    """Whether a table of device code generators with its first row counts as full (up to 2.12)."""
    from torch._inductor.codegen import common

    return not hasattr(common, "_initialize_device_op_overrides")


def _device_table(patches: Patches) -> None:
    """Fill the table now, under the trace lock: who asks while another thread fills it gets the wrong row, or none."""
    from torch._inductor.codegen.common import get_device_op_overrides

    get_device_op_overrides("cpu")


def _worker_pools(patches: Patches) -> None:
    """One thread makes a pool: `lru_cache` remembers what was made, but two that ask at once both make one."""
    from torch._inductor.async_compile import AsyncCompile

    for name in ("pool", "process_pool"):
        patches.set_attribute(AsyncCompile, name, staticmethod(_made_once(getattr(AsyncCompile, name), name)))


def _made_once(make: Any, name: str) -> Callable[[], Any]:
    @functools.wraps(make)
    def locked() -> Any:
        if not make.cache_info().currsize and TRACE_LOCK.owner is not None and not TRACE_LOCK.owned():
            _report_second_pool(name)
        # The trace lock: a fork gives the child a new one, and a compile, which makes most pools, holds it already.
        with TRACE_LOCK.hold("Inductor's pool of compile workers"):
            return make()

    for attribute in ("cache_info", "cache_clear", "cache_parameters"):
        setattr(locked, attribute, getattr(make, attribute))
    return locked


def _report_second_pool(name: str) -> None:
    findings.report(
        Finding(
            code="second-pool",
            subject=f"AsyncCompile.{name}",
            title="Inductor's pool of compile workers is asked for while another thread compiles, or makes it",
            now=this_thread("asks for the pool"),
            other=other_thread(TRACE_LOCK.owner, f"is inside {TRACE_LOCK.doing}", TRACE_LOCK.held_s),
            shared="the cached pool, which each thread that finds none makes",
            consequence="two pools of processes; one is lost, and its processes live as long as the program",
            fix="keep compile_guard.install(), or compile something before the threads start",
            prevented=True,
        )
    )


SEAMS = (
    Seam(
        "device_table",
        "Inductor's table of device code generators is filled before threads look into it",
        _device_table,
        device_table_is_filled_in_steps,
    ),
    Seam("worker_pools", "Inductor's pools of compile workers are made once", _worker_pools),
)
