"""What an entry of the catalogue says about its hazard, and how entries are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Affected:
    """Whether the installed torch on this machine has a hazard, and how that was told."""

    yes: bool
    because: str
    """One sentence: the feature that was found or missed, never a bare version comparison."""
    runnable: bool = True
    """False when only hardware is missing (no CUDA, no fork): the hazard may exist, but cannot be shown here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hazard:
    """One hazard: what it looks like, why it happens, how to make it happen, what ends it."""

    id: str
    """The letter and number that `docs/hazards.md` uses, `"A1"`."""
    name: str
    """Name of the script in `repro/`, without `.py`."""
    title: str
    symptom: str
    """What a user sees, with the exact message where there is one."""
    mechanism: str
    """Why it happens: which state is shared, who writes it, who reads it."""
    links: tuple[str, ...]
    """Upstream issues and pull requests, `"pytorch#126024"`."""
    affected: Callable[[], Affected]
    """Feature test of the installed torch; cheap, and leaves the process as it was."""
    trigger: Callable[[], str | None]
    """Plain torch, knows nothing of the guard. Returns a sentence that says what occurred, or None when nothing did.
    Its order is forced by events and barriers. May crash or hang the process: the runner gives it one of its own."""
    mirror: Callable[[], None]
    """A correct program of the same shape: raises nothing, and the guard must stay silent on it."""
    seams: tuple[str, ...]
    """Names of the seams (`torch_seams.SEAMS`) that prevent it; empty for a hazard that can only be detected."""
    finding: str
    """Code of the finding that tells of it; empty where `install()` ends it before it can occur."""
    outcome: Literal["prevented", "explained", "detected"] = "prevented"
    """`prevented`: under the guard the trigger returns None. `explained`: it still fails as it must, and the finding
    says why. `detected`: a silent effect that stays, and the finding tells of it."""
    fix: str
    """What a user changes, one sentence."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that its process must be started with."""


def catalogue() -> dict[str, Hazard]:
    """Every entry by script name, in the order of the ids.

    Raises:
        ValueError: two entries share an id or a name.
    """
    import compile_guard.hazards as package

    found: dict[str, Hazard] = {}
    ids: dict[str, str] = {}
    for info in pkgutil.iter_modules(package.__path__):
        if info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        hazard: Hazard = module.HAZARD
        if hazard.name in found or hazard.id in ids:
            other = ids.get(hazard.id, hazard.name)
            raise ValueError(f"hazard {hazard.id} `{hazard.name}` in {info.name}.py repeats the id or name of `{other}`")
        found[hazard.name] = hazard
        ids[hazard.id] = hazard.name

    def order(entry: tuple[str, Hazard]) -> tuple[str, int]:
        letter, number = entry[1].id[:1], entry[1].id[1:]
        return letter, int(number)

    return dict(sorted(found.items(), key=order))
