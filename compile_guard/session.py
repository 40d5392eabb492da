"""What a program does around its compiled code: exclude tracers, warm up, seal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any

from compile_guard import torch_seams
from compile_guard.findings import Finding, findings, this_thread
from compile_guard.install import install
from compile_guard.tracing import TRACE_LOCK

if TYPE_CHECKING:
    import torch


class exclusive(ContextDecorator):
    """Hold the trace lock: no other thread compiles or traces meanwhile. Around a tracer of one's own, or as its decorator.

    While it is held, a `backward()` of this thread runs on this thread.

    Args:
        what: what the lock is held for, as others see it in findings.
    """

    def __init__(self, what: str = "compile_guard.exclusive") -> None:
        install()
        self._what = what

    def _recreate_cm(self) -> exclusive:
        return exclusive(self._what)

    def __enter__(self) -> None:
        TRACE_LOCK.acquire(self._what, frame=sys._getframe(1))

    def __exit__(self, *exc: object) -> None:
        TRACE_LOCK.release()


def guarded(compiled: Any) -> Any:
    """Single-flight for something that was compiled before `install()`; a decorator.

    What is compiled afterwards needs it not, and is returned as it is.

    Raises:
        TypeError: it is not compiled.
    """
    install()
    if isinstance(compiled, torch_seams.optimized_module_class()):
        forward = getattr(compiled, "forward", None)
        if forward is not None and torch_seams.is_compiled_call(getattr(forward, "__code__", guarded.__code__)):
            compiled.forward = torch_seams.with_entry(forward)
        return compiled
    if hasattr(compiled, "_compile_guard_inner") or hasattr(compiled, "_compile_guard_cache"):
        return compiled
    code = getattr(compiled, "__code__", None)
    if code is None or not torch_seams.is_compiled_call(code):
        raise TypeError(f"guarded() takes what torch.compile returned, got {compiled!r:.80}; use compile_guard.compile()")
    return torch_seams.with_entry(compiled)


def warmup(fn: Callable[..., Any], inputs: Sequence[Any], devices: Iterable[torch.device | str | int] | None = None) -> None:
    """Compile `fn`, forward and backward, on each device in turn, before the threads start.

    Random generators and the gradients of parameters are left as they were.

    Args:
        fn: called as `fn(*inputs)`.
        inputs: tensors, or nested containers of them, are moved to the device; floating ones keep `requires_grad`.
        devices: those of the inputs alone when None.
    """
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    install()
    for device in list(devices) if devices is not None else [None]:

        def moved(tensor: torch.Tensor, device: Any = device) -> torch.Tensor:
            here = tensor.detach() if device is None else tensor.detach().to(device)
            return here.requires_grad_(tensor.requires_grad)

        here = tree_map_only(torch.Tensor, moved, list(inputs))
        touched = {leaf.device for leaf in tree_leaves(here) if isinstance(leaf, torch.Tensor)}
        accelerators = [each for each in touched if each.type != "cpu"]
        kind = accelerators[0].type if accelerators else "cuda"
        with torch.random.fork_rng(devices=[each.index for each in accelerators], device_type=kind):
            returned = fn(*here)
            outputs = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            if outputs:
                leaves = _leaves_of(outputs)
                torch.autograd.grad(outputs, leaves, [torch.ones_like(each) for each in outputs], allow_unused=True)


def _leaves_of(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaf tensors that a backward from `outputs` would reach: asked for by name, so that no `.grad` is touched."""
    pending: list[Any] = [each.grad_fn for each in outputs if each.grad_fn is not None]
    seen: set[Any] = set()
    leaves: list[torch.Tensor] = [each for each in outputs if each.grad_fn is None]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.append(variable)
        pending.extend(parent for parent, _ in node.next_functions)
    return leaves


class sealed:
    """From now on a compile is a finding: call it when the warm-up is over. As a context manager it ends with the block.

    Of several that are open, the last to end allows compiles again. It holds through `uninstall()` and `install()`.
    """

    def __init__(self) -> None:
        install()
        _open_seals.add(self)

    def end(self) -> None:
        """Allow compiles again."""
        _open_seals.discard(self)

    def __enter__(self) -> sealed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()


_open_seals: set[sealed] = set()


def _report_compile(what: str) -> None:
    if not _open_seals:
        return
    findings.report(
        Finding(
            code="sealed",
            subject=what.split(" (")[0],
            title=f"{what} is compiled after the program was sealed",
            now=this_thread(f"compiles {what}"),
            shared="the compile lock: every other thread that must compile waits, and all share the GIL with it",
            consequence="a pause in the middle of the run, one more cache entry, and eager runs once the limit is reached",
            fix="warm up with the shapes that occur, or mark the size dynamic; TORCH_LOGS=recompiles says which guard failed",
            prevented=False,
        )
    )


torch_seams.compile_listeners.append(_report_compile)
