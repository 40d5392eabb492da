"""E6: a thread looks into Inductor's table of device code generators while another one fills it."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Sequence
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait


def affected() -> Affected:
    from compile_guard.torch_seams.inductor import device_table_is_filled_in_steps

    if device_table_is_filled_in_steps():
        return Affected(True, "`get_device_op_overrides` takes a table with one row for a full one, and has no lock")
    return Affected(False, "`get_device_op_overrides` fills the table to the end before it looks a device up")


class PauseBeforeImport(importlib.abc.MetaPathFinder):
    """Stops the thread that imports a module, before it does, until it is told to go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached, self.go_on = threading.Event(), threading.Event()

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> None:
        if name == self.name and not self.reached.is_set():
            self.reached.set()
            wait(self.go_on)


def look_up(device: str, *, at_once: bool) -> str | None:
    """Two threads ask for the code generator of a device that is registered second; what does the second thread get?"""
    from torch._inductor.codegen.common import get_device_op_overrides

    # Fills the table row by row, by importing one module after the other.
    pause = PauseBeforeImport("torch._inductor.codegen.cuda.device_op_overrides")
    filled = threading.Event()

    def first() -> str:
        try:
            return type(get_device_op_overrides(device)).__name__
        finally:
            pause.reached.set()  # the module was imported before: nobody pauses
            filled.set()

    def second() -> str:
        wait(pause.reached if at_once else filled, 30.0)
        try:
            return type(get_device_op_overrides(device)).__name__
        except KeyError as error:
            return f"KeyError: {error}"
        finally:
            pause.go_on.set()

    if not at_once:
        pause.go_on.set()
    sys.meta_path.insert(0, pause)
    try:
        found = run_threads(first=first, second=second)
    finally:
        sys.meta_path.remove(pause)
    if found["first"] == found["second"]:
        return None
    return f"the code generator for {device} was {found['first']} where the table is filled, {found['second']} beside it"


def trigger() -> str | None:
    return look_up("cuda", at_once=True)


def mirror() -> None:
    said = look_up("cuda", at_once=False)
    if said is not None:
        raise AssertionError(said)


HAZARD = Hazard(
    id="E6",
    name="registry_race",
    title="Inductor's table of devices is read while another thread fills it",
    symptom="`KeyError: 'cuda'`, or code generated with the CPU's device guards, in the first compile of a second thread.",
    mechanism=(
        "`get_device_op_overrides` fills a module-level dictionary by importing one module for each device, and takes a "
        "dictionary that is not empty for a full one. `torch.compile` comes here under its lock; `torch._inductor.compile`, "
        "AOTInductor and user code do not."
    ),
    links=("pytorch#168042",),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("device_table",),
    finding="",
    fix="Install the guard, which fills the table; or compile one small function for each device before starting threads.",
)
