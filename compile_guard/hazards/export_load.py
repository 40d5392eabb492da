"""A7: two threads load exported programs at once; the second is refused."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.tracers import exported_programs_load_one_at_a_time

    if exported_programs_load_one_at_a_time():
        return Affected(True, "a load writes itself into the global `serialize._CURRENT_DESERIALIZER`, which must be empty")
    return Affected(False, "there is no global `serialize._CURRENT_DESERIALIZER`")


def exported() -> bytes:
    """A small module, exported and saved."""
    import torch

    file = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)), file)
    return file.getvalue()


@contextmanager
def inside_a_load(reached: threading.Event, go_on: threading.Event) -> Iterator[None]:
    """Hold the thread `first` where its load says in torch's log that it has begun."""

    class Hold(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if threading.current_thread().name == "first" and "[deserialize]" in record.getMessage():
                reached.set()
                wait(go_on)

    log = logging.getLogger("torch._export.serde.serialize")
    level, propagate, handlers = log.level, log.propagate, log.handlers[:]
    log.handlers[:] = [Hold()]
    log.setLevel(logging.DEBUG)
    log.propagate = False
    try:
        yield
    finally:
        log.handlers[:] = handlers
        log.setLevel(level)
        log.propagate = propagate


def trigger() -> str | None:
    import torch

    saved = exported()
    loading, tried = threading.Event(), threading.Event()

    def first() -> None:
        torch.export.load(io.BytesIO(saved))

    def second() -> str | None:
        wait(loading)
        try:
            torch.export.load(io.BytesIO(saved))
        except AssertionError as error:
            return f"torch.export.load, while another thread loads, raised AssertionError: {str(error) or 'no message'}"
        finally:
            tried.set()
        return None

    with inside_a_load(loading, tried):
        said: str | None = run_threads(first=first, second=second)["second"]
    return said


def mirror() -> None:
    import torch

    saved = exported()
    loaded = threading.Event()

    def first() -> None:
        torch.export.load(io.BytesIO(saved))
        loaded.set()

    def second() -> None:
        wait(loaded)
        torch.export.load(io.BytesIO(saved))

    run_threads(first=first, second=second)


HAZARD = Hazard(
    id="A7",
    name="export_load",
    title="Two threads load exported programs at once",
    symptom="`AssertionError: _CURRENT_DESERIALIZER is already set` (2.9: without a message) out of `torch.export.load`.",
    mechanism=(
        "While it builds the graph, a load stands in a global that must be empty when it begins. `torch.export.export` has "
        "globals of its own (entry A4): neither takes a lock."
    ),
    links=("pytorch#195099", "pytorch#195100", "pytorch#112775"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("trace_lock", "export", "export_load"),
    finding="export-load",
    fix="Install the guard, under which one program is exported or loaded at a time; or load before the threads start.",
)
