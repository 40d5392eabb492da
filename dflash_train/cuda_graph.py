"""A function of tensors as a CUDA graph: one launch in place of one for each of its kernels.

Each operation run from Python gives up the interpreter lock and takes it again; among other threads that is what a forward of
several hundred small kernels waits for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class NotCapturable(Exception):
    """The function cannot be a CUDA graph: it asks the host on the way, or its kernels depend on values."""


def check_capturable(run: Callable[..., Any], *inputs: Tensor) -> None:
    """Run a function once, as it is, and see whether all that it does could be replayed.

    Asked beforehand, since a capture that breaks off leaves torch's allocator in capture for good (`CUDAGraph::capture_end`
    raises before it ends the pool's allocation).

    Raises:
        NotCapturable: it reads values on the host, has shapes that depend on values, or copies from or to the host.
    """
    with _Watch():
        run(*inputs)


class _Watch(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Stops at the first operation of the calling thread that a graph cannot hold."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise NotCapturable(f"it waits for a value on the host ({func})")
        if torch.Tag.dynamic_output_shape in func.tags and not _indexed_by_numbers(func, args):
            raise NotCapturable(f"the shape of a tensor depends on values ({func})")
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MOVES and isinstance(result, Tensor):
            # A constant made of Python numbers (`lift_fresh`) came from the host as well.
            places = {t.device.type for t in (result, *args) if isinstance(t, Tensor)}
            if len(places) > 1 or (func.overloadpacket is torch.ops.aten.lift_fresh and places != {"cpu"}):
                raise NotCapturable(f"it copies between the host and the device ({func})")
        return result


_MOVES = {torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.lift_fresh}
_INDEXING = {torch.ops.aten.index, torch.ops.aten.index_put, torch.ops.aten.index_put_}


def _indexed_by_numbers(func: Any, args: Sequence[Any]) -> bool:
    """Of indexing, the result's shape depends on values only where an index is a mask."""
    masks = (torch.bool, torch.uint8)
    return func.overloadpacket in _INDEXING and all(index is None or index.dtype not in masks for index in args[1])


class Graphed:
    """A function captured once, for inputs of these shapes, types and device. May be called from several threads.

    Capture is of the calling thread alone (`thread_local`), with memory of its own that is kept as long as this is. Nothing
    may be random in it, and what it reads besides its inputs must stay where it is.

    Args:
        run: takes and returns tensors; has passed `check_capturable`.
        inputs: on one CUDA device; only their shapes and types are kept.
    """

    def __init__(self, run: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> None:
        self._inputs = [torch.zeros_like(given) for given in inputs]
        self._graph = torch.cuda.CUDAGraph()
        self._lock = threading.Lock()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._device = inputs[0].device
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                run(*self._inputs)  # what libraries set up at first use is no part of a graph
            with torch.cuda.graph(self._graph, stream=side, capture_error_mode="thread_local"):  # waits for the device first
                self._outputs = run(*self._inputs)

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """What the function returns for these inputs, in new tensors, on the calling thread's current stream."""
        stream = torch.cuda.current_stream(self._device)
        with self._lock:
            stream.wait_event(self._done)  # another thread's stream may still read or write what is used again here
            torch._foreach_copy_(self._inputs, list(inputs))
            self._graph.replay()
            outputs = [output.clone() for output in self._outputs]
            self._done.record(stream)
        return outputs
