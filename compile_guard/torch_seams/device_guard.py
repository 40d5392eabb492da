"""The CUDA device guard of a CUDA build that sees no GPU: torch 2.11 gives it to the thread that needs it first."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable

from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam, skip_code

_ENSURE = "_ensureCUDADeviceGuardSet"


def device_guard_may_end() -> bool:
    """Whether this torch puts a device guard of its own in place where its build has CUDA and the machine has none.

    Whether a thread owns it (2.11) or the process (2.14) cannot be told from outside.
    """
    import torch

    return bool(torch.backends.cuda.is_built()) and hasattr(torch._C, _ENSURE)  # type: ignore[no-untyped-call]


def _in_a_thread_that_stays(call: Callable[[], object]) -> None:
    """Run `call` in a thread that ends with the process."""
    done, never = threading.Event(), _thread.allocate_lock()
    never.acquire()

    def stay() -> None:
        call()
        done.set()
        never.acquire()

    # No `threading.Thread`: nobody joins it, counts it or is to see it.
    _thread.start_new_thread(stay, ())
    done.wait()


def _device_guard(patches: Patches) -> None:
    """Have the main thread, or one that stays, put the guard in place.

    A FakeTensorMode does it as it is entered, so the first compile of all. The guard is destroyed with its thread, and the
    registry goes on pointing to it: the next compile, of whichever thread, calls into freed memory.
    """
    import torch

    ensure: Callable[[], None] = getattr(torch._C, _ENSURE)
    is_ensured = False

    def ensure_for_good() -> None:
        nonlocal is_ensured
        if is_ensured:
            return
        if threading.current_thread() is threading.main_thread():
            ensure()
        else:
            _in_a_thread_that_stays(ensure)
        is_ensured = True

    skip_code(ensure_for_good.__code__)
    patches.set_attribute(torch._C, _ENSURE, ensure_for_good)


SEAMS = (
    Seam(
        "device_guard",
        "the device guard of a CUDA build that sees no GPU outlives its thread",
        _device_guard,
        device_guard_may_end,
    ),
)
