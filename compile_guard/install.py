"""Putting the seams in, and taking them out."""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
from collections.abc import Callable

from compile_guard import ecosystem_seams, events, fork, torch_seams
from compile_guard.entry import gate
from compile_guard.findings import (
    GuardError,
    Mode,
    check_mode,
    findings,
    mode_from_environment,
    suppressions_from_environment,
)
from compile_guard.patching import Patches
from compile_guard.tracing import TRACE_LOCK

logger = logging.getLogger("compile_guard")

_install_lock = threading.RLock()
_patches: Patches | None = None
_failed: dict[str, str] = {}


def install(mode: Mode | None = None) -> None:
    """Make this process safe to call `torch.compile`, `torch.fx`, `make_fx` and `torch.export` from several threads.

    Call it once, before the threads start; calling it again only changes the mode. Functions that are compiled already are
    covered as well, but for single-flight: see `guarded`.

    Args:
        mode: what becomes of findings: `record`, `warn` (the default) or `raise`; `off` installs nothing.
            `COMPILE_GUARD` in the environment beats it.

    Raises:
        ValueError: the mode, or `COMPILE_GUARD`, is none of these, or `COMPILE_GUARD_SUPPRESSIONS` cannot be read.
        GuardError: this Python runs without the GIL, on which the guard's own state relies.
    """
    global _patches
    with _install_lock:
        wanted = mode_from_environment(check_mode(mode, "install(mode=)") if mode is not None else findings.mode)
        findings.suppress(suppressions_from_environment())
        if wanted == "off":
            findings.mode = "off"
            return
        findings.mode = wanted
        if _patches is not None:
            return
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise GuardError(
                "compile_guard relies on the GIL, which this Python runs without. Start it with PYTHON_GIL=1 (or -X gil=1)."
            )
        torch_seams.prepare()
        patches = Patches()
        _failed.clear()
        lock_seam, *others = torch_seams.iterate_needed()
        _put_in(lock_seam.name, functools.partial(lock_seam.put_in, patches))
        # A trace in progress ends first: its thread is not known as the owner of what it has written.
        with TRACE_LOCK.hold("compile_guard.install"):
            for seam in others:
                _put_in(seam.name, functools.partial(seam.put_in, patches))
            ecosystem_seams.watch(patches, _put_in)
        fork.register()
        fork.active = True
        _patches = patches
        folder = os.environ.get(events.VARIABLE)
        if folder:
            events.LOG.open(folder, _has_a_lock)


def _has_a_lock() -> bool:
    """Whether the calling thread holds a lock of ours that others may want: it must not write files meanwhile."""
    return TRACE_LOCK.owned() or gate.is_closed_by_me() or _install_lock._is_owned()  # type: ignore[attr-defined]


def _put_in(name: str, seam: Callable[[], None]) -> None:
    try:
        seam()
    except (AttributeError, ImportError, ValueError) as error:
        # A newer library without the name: the other seams still protect, and doctor shows what is missing.
        _failed[name] = f"{type(error).__name__}: {error}"
        logger.warning("seam %s does not fit what is installed (%s); the hazard it prevents is not covered", name, error)


def seam_names() -> set[str]:
    """Every seam by name, whether the installed torch needs it or not. `fork` is no seam: handlers of `os.register_at_fork`."""
    others = {seam.name for seam in ecosystem_seams.ECOSYSTEM_SEAMS} | {"fork"}
    return others.union(seam.name for seam in torch_seams.SEAMS)


def uninstall() -> None:
    """Take every seam out: each patched object of torch is what it was before `install()`. Does nothing when not installed.

    Functions compiled meanwhile keep working.
    """
    global _patches
    with _install_lock:
        if _patches is None:
            return
        with TRACE_LOCK.hold("compile_guard.uninstall"):
            fork.active = False
            left = _patches.undo()
            _patches = None
        for name in left:
            logger.warning("%s was patched again by somebody else after install(); it is left as it is", name)
    events.LOG.close()


def is_installed() -> bool:
    """Whether the seams are in."""
    return _patches is not None


def failed_seams() -> dict[str, str]:
    """Seams that did not fit this torch, and why."""
    return dict(_failed)
