"""What a trigger needs to put threads in order: named threads, bounded waits, the first exception raised again.

Plain Python that knows nothing of torch or of a guard: this text stands at the top of every `--standalone` program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 4.0
"""How long one side waits for the other. Where both are serialised it runs out, and the trigger goes on."""


def wait(event: threading.Event, patience_s: float = PATIENCE_S) -> bool:
    """Wait until `event` is set, for a bounded time; False says that the other side did not come."""
    return event.wait(patience_s)


def meet(barrier: threading.Barrier, patience_s: float = PATIENCE_S) -> bool:
    """Wait at `barrier` for a bounded time; False says that somebody did not come. It stays open from then on."""
    try:
        barrier.wait(patience_s)
    except threading.BrokenBarrierError:
        return False
    return True


def run_threads(timeout_s: float = 60.0, /, **bodies: Callable[[], Any]) -> dict[str, Any]:
    """Run each function in a thread named after its keyword, and return what each returned.

    Raises:
        TimeoutError: a thread was still running after `timeout_s` (it is a daemon, and is left behind).
        BaseException: the exception that ended a thread first.
    """
    results: dict[str, Any] = {}
    errors: list[BaseException] = []

    def run(name: str, body: Callable[[], Any]) -> None:
        try:
            results[name] = body()
        except BaseException as error:  # handed to the caller below, never lost
            errors.append(error)

    threads = [threading.Thread(target=run, args=item, name=item[0], daemon=True) for item in bodies.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if errors:
        raise errors[0]
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        raise TimeoutError(f"still running after {timeout_s:g} s: {', '.join(stuck)}")
    return results
