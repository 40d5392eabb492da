"""CUDA graph trees belong to the thread that runs them, and so does the mark of a step."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from compile_guard.findings import Finding, findings, other_thread, this_thread
from compile_guard.patching import Patches
from compile_guard.torch_seams._seam import Seam

_STASHED = "compile_guard_cudagraphs"
_CONTAINERS, _LOCKS = "tree_manager_containers", "tree_manager_locks"


class _Graphs:
    """What one Python thread, with the autograd threads that it launches, has of CUDA graphs."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.mark_step_counter = 0
        """Counts down, as torch's does; 0 as long as no step is marked."""
        self.recorded: weakref.WeakKeyDictionary[Callable[..., Any], Callable[..., Any]] = weakref.WeakKeyDictionary()
        """By torch's function that runs a graph: the one with the graph that this thread has recorded."""


_local = threading.local()


def _graphs() -> _Graphs:
    """Those of the calling thread; on an autograd thread, of the thread whose backward it runs."""
    import torch

    graphs: _Graphs | None = getattr(_local, "graphs", None)
    if graphs is None:
        if torch._C._is_key_in_tls(_STASHED):
            return torch._C._get_obj_in_tls(_STASHED)  # type: ignore[no-any-return]
        graphs = _local.graphs = _Graphs()
        torch._C._stash_obj_in_tls(_STASHED, graphs)
    return graphs


class _MarkStepBox:
    """Stands for torch's class of that name, whose one counter all threads count down."""

    def __init__(self) -> None:
        self._last_to_mark: int | None = None

    @property
    def mark_step_counter(self) -> int:
        graphs = _graphs()
        if not graphs.mark_step_counter and self._last_to_mark is not None:
            _report_foreign_mark(graphs.owner, self._last_to_mark)
        return graphs.mark_step_counter

    @mark_step_counter.setter
    def mark_step_counter(self, value: int) -> None:
        graphs = _graphs()
        graphs.mark_step_counter = value
        self._last_to_mark = graphs.owner if value else None


def _report_foreign_mark(reader: int, marker: int) -> None:
    if reader == marker:
        return
    findings.report(
        Finding(
            code="cudagraph-threads",
            subject="cudagraph_mark_step_begin",
            title="CUDA graphs run in one thread while another one marks its steps",
            now=this_thread("runs a CUDA graph"),
            other=other_thread(marker, "has marked a step"),
            shared="the counter of steps, one for all threads",
            consequence="a new generation begins here although a backward is pending: its activations are overwritten",
            fix="keep compile_guard.install(), or use CUDA graphs in one thread alone",
            prevented=True,
        )
    )


def _cudagraph_mark_step(patches: Patches) -> None:
    from torch._inductor import cudagraph_trees

    patches.set_attribute(cudagraph_trees, "MarkStepBox", _MarkStepBox())


def trees_are_of_the_importing_thread() -> bool:
    """Whether graph trees exist only in the thread that imported them and the autograd threads it launches (before 2.13)."""
    from torch._inductor import cudagraph_trees

    return not hasattr(cudagraph_trees, "_initialize_tls")


def _cudagraph_threads(patches: Patches) -> None:
    """Graph trees for each thread; and each thread records its own graphs of a function (pytorch#184357, in 2.13)."""
    import torch
    from torch._inductor import compile_fx, cudagraph_trees

    get_obj = cudagraph_trees.get_obj
    cudagraphify = compile_fx.cudagraphify

    def get_obj_of_thread(local: Any, name: str) -> Any:
        if not hasattr(local, name) and not torch._C._is_key_in_tls(name):
            _report_new_trees()
            setattr(local, _CONTAINERS, {})
            setattr(local, _LOCKS, defaultdict(threading.Lock))
            for each in (_CONTAINERS, _LOCKS):
                torch._C._stash_obj_in_tls(each, getattr(local, each))
        return get_obj(local, name)

    def cudagraphify_for_each_thread(*args: Any, **kwargs: Any) -> Callable[[Sequence[Any]], Any]:
        def run(new_inputs: Sequence[Any]) -> Any:
            recorded = _graphs().recorded
            runs = recorded.get(run)
            if runs is None:
                runs = recorded[run] = cudagraphify(*args, **kwargs)
            return runs(new_inputs)

        return run

    manager = cudagraph_trees.CUDAGraphTreeManager
    alone = threading.RLock()

    def capturing(original: Callable[..., Any]) -> Callable[..., Any]:
        # A warm-up switches allocator pools, and a capture must not meet another's synchronize: one at a time.
        def locked(*args: Any, **kwargs: Any) -> Any:
            with alone:
                return original(*args, **kwargs)

        return locked

    for name in ("__init__", "run_eager", "record_function"):
        patches.set_attribute(manager, name, capturing(getattr(manager, name)))
    patches.set_attribute(cudagraph_trees, "get_obj", get_obj_of_thread)
    patches.set_attribute(compile_fx, "cudagraphify", cudagraphify_for_each_thread)


def _report_new_trees() -> None:
    findings.report(
        Finding(
            code="cudagraph-threads",
            subject="cudagraph_trees",
            title="CUDA graphs are used in a thread that has no graph trees",
            now=this_thread("runs a function compiled with CUDA graphs"),
            shared="the graph trees, which this torch makes for the importing thread alone",
            consequence="an AssertionError out of `cudagraph_trees.get_obj`",
            fix="keep compile_guard.install(), or use torch 2.13 or newer; each thread then records graphs of its own",
            prevented=True,
        )
    )


SEAMS = (
    Seam("cudagraph_mark_step", "a step mark of CUDA graphs speaks of the calling thread", _cudagraph_mark_step),
    Seam(
        "cudagraph_threads",
        "each thread has its CUDA graph trees",
        _cudagraph_threads,
        trees_are_of_the_importing_thread,
    ),
)
