"""The only place that touches private names of torch: one module for each part of torch that the guard takes hold of.

Each seam says what it is for, tells by a feature test whether the installed torch needs it, and puts itself in through
`Patches`, which take it out again. Read with torch 2.9.1, 2.11.0, 2.13.0 and 2.14.1; a torch in which a name is gone makes
that one seam fail by name, and the others still work.

torch is imported inside the functions: `TORCH_LOGS=+compile_guard` makes torch import this package half-way through its own
import, and `import compile_guard` must cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from compile_guard.torch_seams import (
    autocast,
    checkpoint,
    compiled_autograd,
    compiled_calls,
    config_patches,
    configuration,
    cudagraphs,
    device_guard,
    devices,
    eager_calls,
    fake_mode,
    finding_logs,
    fullgraph,
    global_state,
    inductor,
    isolated_regions,
    lazy_backward,
    modules,
    numeric_switches,
    random_state,
    reset,
    stance,
    thread_stack,
    trace_lock,
    tracers,
)
from compile_guard.torch_seams._seam import Seam, compile_listeners, is_compiled_call, skip_code
from compile_guard.torch_seams.autocast import capture_autocast
from compile_guard.torch_seams.checkpoint import RandomOps
from compile_guard.torch_seams.compiled_calls import with_entry
from compile_guard.torch_seams.configuration import capture_config, config_is_per_thread
from compile_guard.torch_seams.eager_calls import entries, recompile_limit, recompile_limits
from compile_guard.torch_seams.modules import allow_inlining, has_hooks, is_skipped_by_dynamo, optimized_module_class
from compile_guard.torch_seams.own_frames import prepare

__all__ = [
    "SEAMS",
    "RandomOps",
    "Seam",
    "allow_inlining",
    "capture_autocast",
    "capture_config",
    "compile_listeners",
    "config_is_per_thread",
    "entries",
    "has_hooks",
    "is_compiled_call",
    "is_skipped_by_dynamo",
    "iterate_needed",
    "optimized_module_class",
    "prepare",
    "recompile_limit",
    "recompile_limits",
    "skip_code",
    "with_entry",
]

SEAMS: tuple[Seam, ...] = (
    *trace_lock.SEAMS,  # first: the others are put in while it is held
    *tracers.SEAMS,
    *device_guard.SEAMS,
    *fake_mode.SEAMS,
    *lazy_backward.SEAMS,
    *eager_calls.SEAMS,  # before the next, which takes what then is Dynamo's callback for it
    *compiled_calls.SEAMS,
    *isolated_regions.SEAMS,
    *modules.SEAMS,
    *reset.SEAMS,
    *compiled_autograd.SEAMS,
    *checkpoint.SEAMS,
    *configuration.SEAMS,
    *config_patches.SEAMS,
    *cudagraphs.SEAMS,
    *devices.SEAMS,
    *autocast.SEAMS,
    *fullgraph.SEAMS,
    *global_state.SEAMS,
    *inductor.SEAMS,
    *numeric_switches.SEAMS,
    *random_state.SEAMS,
    *stance.SEAMS,
    *thread_stack.SEAMS,
    *finding_logs.SEAMS,
)


def iterate_needed() -> Iterator[Seam]:
    """The seams that the installed torch needs."""
    return (seam for seam in SEAMS if seam.needed())
