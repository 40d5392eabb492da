"""Threads that begin as the thread that made them: device, configuration, thread count, autocast, random numbers, name."""

from __future__ import annotations

import atexit
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from compile_guard import torch_seams, waits

if TYPE_CHECKING:
    import torch


def initializer(device: torch.device | str | int | None = None, *, seed: int | None = None) -> Callable[[], None]:
    """What a thread needs to be set up as the calling one: for `ThreadPoolExecutor(initializer=compile_guard.initializer())`.

    Taken over: torch's configuration (kept for each thread since 2.12), the intra-op thread count (a guard of every
    compiled function), autocast, grad mode.

    Args:
        device: made the current device of the thread, when it is an accelerator. None leaves the default, device 0.
        seed: seeds that device's generator. The CPU's generator belongs to the process and is left alone.
    """
    import torch

    config = torch_seams.capture_config()
    num_threads = torch.get_num_threads()
    grad = torch.is_grad_enabled()
    target = torch.device(device) if device is not None else None
    kinds = {"cpu"} | ({target.type} if target is not None else set())
    autocast = torch_seams.capture_autocast(kinds)

    def set_up() -> None:
        config()
        torch.set_num_threads(num_threads)
        torch.set_grad_enabled(grad)
        if autocast is not None:
            autocast()
        if target is not None and target.type != "cpu":
            module = torch.get_device_module(target)
            module.set_device(target)
            if seed is not None:
                module.manual_seed(seed)

    return set_up


_unraised: set[Worker] = set()
"""Workers that died of something that `join()` has not raised yet."""


@atexit.register
def _tell_of_unraised() -> None:
    for worker in _unraised:
        error = worker.error
        print(f"compile_guard: thread {worker.name} died, and nobody joined it:", file=sys.stderr)
        if error is not None:
            traceback.print_exception(type(error), error, error.__traceback__)


class Worker(threading.Thread):
    """A thread for one device, whose failure is not lost: `join()` raises what it died of.

    Args:
        target: what to run.
        device: the thread's current device.
        args, kwargs: for `target`.
        name: of the thread; the device's by default.
        seed: for `generator`, and for the device's own generator.
    """

    def __init__(
        self,
        target: Callable[..., Any],
        *,
        device: torch.device | str | int | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        seed: int | None = None,
        daemon: bool | None = None,
    ) -> None:
        import torch

        super().__init__(name=name or (f"worker-{device}" if device is not None else None), daemon=daemon)
        self.device = torch.device(device) if device is not None else torch.device("cpu")
        self.generator = torch.Generator(self.device)
        """Random numbers of this thread alone: the CPU's default generator is shared by the process."""
        if seed is not None:
            self.generator.manual_seed(seed)
        self.result: Any = None
        """What `target` returned."""
        self._call = (target, tuple(args), dict(kwargs or {}))
        self._set_up = initializer(device, seed=seed)
        self._error: BaseException | None = None

    @property
    def error(self) -> BaseException | None:
        """What the thread died of, until `join()` has raised it."""
        return self._error

    def run(self) -> None:
        """Set the thread up and run the target."""
        target, args, kwargs = self._call
        try:
            self._set_up()
            self.result = target(*args, **kwargs)
        except BaseException as error:
            self._error = error
            _unraised.add(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end, and raise what it died of, once.

        Raises:
            DeadlockError: the worker waits, directly or through others, for the calling thread.
        """
        if self.ident is None:
            raise RuntimeError(f"{self.name} has not been started; call start() before join()")
        ident = self.ident

        def ended(span: float) -> bool:
            threading.Thread.join(self, span)
            return not self.is_alive()

        if not waits.wait_for(ended, f"thread {self.name} to end", lambda: frozenset((ident,)), timeout=timeout):
            return
        error, self._error = self._error, None
        _unraised.discard(self)
        if error is not None:
            raise error
