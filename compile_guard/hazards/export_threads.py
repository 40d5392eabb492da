"""A7: an export, and the load of an exported program, keep what they are about in globals; two threads at once fail."""

from __future__ import annotations

import io
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from torch._export.serde import serialize

    if hasattr(serialize, "_CURRENT_DESERIALIZER"):
        return Affected(True, "`torch._export.serde.serialize._CURRENT_DESERIALIZER` is a module global")
    return Affected(False, "there is no `_CURRENT_DESERIALIZER` of the process")


def exported(on_load: Any) -> bytes:
    """A small exported program whose output is a class of the program's own; to load it calls `on_load()`."""
    import torch
    from torch.utils import _pytree

    class Pair:
        def __init__(self, first: Any, second: Any) -> None:
            self.first, self.second = first, second

    def from_dumpable_context(context: Any) -> Any:
        on_load()
        return context

    _pytree.register_pytree_node(
        Pair,
        lambda pair: ([pair.first, pair.second], None),
        lambda leaves, context: Pair(*leaves),
        serialized_type_name="compile_guard.Pair",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=from_dumpable_context,
        flatten_with_keys_fn=lambda pair: (
            [(_pytree.GetAttrKey("first"), pair.first), (_pytree.GetAttrKey("second"), pair.second)],
            None,
        ),
    )

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x.sin(), x.cos())

    file = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (torch.ones(2),)), file)
    return file.getvalue()


def exports_at_once() -> str | None:
    """Two threads export a model each; the first to begin ends first."""
    import torch

    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    class Model(torch.nn.Module):
        def __init__(self, inside: Any) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)
            self.inside = inside

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inside()
            out: torch.Tensor = self.linear(x).sin()
            return out

    def export(inside: Any) -> str | None:
        try:
            torch.export.export(Model(inside), (torch.ones(2, 2),), strict=False)
        except (AssertionError, RuntimeError) as error:  # which one depends on how the two are interleaved after this
            return f"{type(error).__name__}: {str(error) or 'no message'}"
        return None

    def first() -> str | None:
        def inside() -> None:
            first_in.set()
            wait(second_in)

        try:
            return export(inside)
        finally:
            first_out.set()

    def second() -> str | None:
        def inside() -> None:
            second_in.set()
            wait(first_out)

        wait(first_in)
        try:
            return export(inside)
        finally:
            second_in.set()

    failed = run_threads(first=first, second=second)
    said = [f"in the {name} {error}" for name, error in sorted(failed.items()) if error is not None]
    return f"of two threads that export a model each, torch.export raised {' and '.join(said)}" if said else None


def loads_at_once() -> str | None:
    """Two threads load one program; the second begins while the first is in the middle."""
    import torch

    loading, second_done = threading.Event(), threading.Event()

    def on_load() -> None:
        if threading.current_thread().name == "first" and not loading.is_set():
            loading.set()
            wait(second_done)

    program = exported(on_load)

    def second() -> str | None:
        wait(loading)
        try:
            torch.export.load(io.BytesIO(program))
        except AssertionError as error:
            return f"AssertionError: {str(error) or 'no message'}"
        finally:
            second_done.set()
        return None

    failed: str | None = run_threads(first=lambda: torch.export.load(io.BytesIO(program)), second=second)["second"]
    return None if failed is None else f"torch.export.load, while another thread loads a program of its own, raised {failed}"


def trigger() -> str | None:
    return "; ".join(filter(None, [loads_at_once(), exports_at_once()])) or None


def mirror() -> None:
    import torch

    program = exported(lambda: None)
    loaded = threading.Event()

    def first() -> Any:
        model = torch.export.load(io.BytesIO(program)).module()
        loaded.set()
        return model(torch.ones(2)).first

    def second() -> Any:
        wait(loaded)
        return torch.export.load(io.BytesIO(program)).module()(torch.ones(2)).first

    results = run_threads(first=first, second=second)
    if not torch.equal(results["first"], results["second"]):
        raise AssertionError("two loads of one program compute different things")


HAZARD = Hazard(
    id="A7",
    name="export_threads",
    title="Exports, or loads of exported programs, in two threads at once fail",
    symptom=(
        "`AssertionError: _CURRENT_DESERIALIZER is already set` (2.9: without a message) out of `torch.export.load`; out of "
        "`torch.export.export` `ProxyTorchDispatchMode slot already occupied by ...`, `Trying to pop empty mode stack`, "
        "`_EXPORT_MODULE_HIERARCHY must not be None`, `We found a fake tensor in the exported program constant's list`."
    ),
    mechanism=(
        "A program that is deserialized has its deserializer in one global of `torch._export.serde.serialize`, and a second "
        "one that begins meanwhile is refused. An export keeps its module hierarchy and its flags in globals of "
        "`torch.export._trace`, patches `nn.Module` and raises the flags of A4; each puts back what it found."
    ),
    links=("pytorch#195099", "pytorch#195100", "pytorch#112775"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "export", "export_load"),
    finding="export-threads",
    fix="Install the guard, which exports and loads one program at a time; or do it before the threads start.",
)
