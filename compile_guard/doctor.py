"""`compile-guard doctor`: which hazards the installed torch has, and whether the guard covers each."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from compile_guard.hazards import Hazard, catalogue
from compile_guard.install import failed_seams, install, seam_names, uninstall

Cover = Literal["not needed", "prevented", "explained", "detected", "NOT COVERED"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One hazard on this torch."""

    id: str
    name: str
    title: str
    affected: bool
    because: str
    cover: Cover
    fix: str
    script: str


def diagnose() -> list[Diagnosis]:
    """Ask every entry of the catalogue. Puts the guard in and out again once, to learn which seams fit."""
    install(mode="record")
    failed = failed_seams()
    uninstall()
    return [_diagnose(hazard, failed) for hazard in catalogue().values()]


def _diagnose(hazard: Hazard, failed: dict[str, str]) -> Diagnosis:
    affected = hazard.affected()
    missing = [name for name in hazard.seams if name in failed or name not in seam_names()]
    cover: Cover
    if not affected.yes:
        cover = "not needed"
    elif missing:
        cover = "NOT COVERED"
    else:
        cover = hazard.outcome
    because = affected.because if not missing else f"{affected.because}; seams that do not fit: {', '.join(missing)}"
    return Diagnosis(
        hazard.id, hazard.name, hazard.title, affected.yes, because, cover, hazard.fix, f"python repro/{hazard.name}.py"
    )


def as_text(diagnoses: list[Diagnosis], environment: dict[str, str]) -> str:
    """A table for people, and what turns each part off."""
    lines = [f"torch {environment['torch']}, Python {environment['python']}, {environment['devices']}", ""]
    width = max(len(diagnosis.title) for diagnosis in diagnoses)
    lines.append(f"{'id':<4}{'hazard':<{width + 2}}{'this torch':<12}guard")
    for diagnosis in diagnoses:
        has = "affected" if diagnosis.affected else "safe"
        lines.append(f"{diagnosis.id:<4}{diagnosis.title:<{width + 2}}{has:<12}{diagnosis.cover}")
        lines.append(f"      {diagnosis.because}  [{diagnosis.script}]")
    lines += [
        "",
        "To find out what is at fault:",
        "  COMPILE_GUARD=off             the guard does nothing",
        "  COMPILE_GUARD=raise           the first finding that happens raises, where it happens",
        "  TORCH_LOGS=recompiles         torch says which guard failed at each recompile",
        "  TORCHDYNAMO_DISABLE=1         nothing is compiled",
        "  py-spy dump --pid PID         stacks of every thread of a process that hangs",
    ]
    return "\n".join(lines) + "\n"


def as_dicts(diagnoses: list[Diagnosis]) -> list[dict[str, object]]:
    """The same as plain data."""
    return [asdict(diagnosis) for diagnosis in diagnoses]
