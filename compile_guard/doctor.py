"""`compile-guard doctor`: which hazards the installed torch has, and what the guard does about each; it runs them to know."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from compile_guard.hazards import Hazard, catalogue
from compile_guard.hazards._runner import Iteration, Verdict, run_pairs, show_progress
from compile_guard.install import failed_seams, install, seam_names, uninstall

SWITCHES = {
    "COMPILE_GUARD=off": "the guard: `install()` does nothing",
    "TORCH_COMPILE_DISABLE=1": "torch.compile: nothing is compiled",
    'torch.compile(backend="eager")': "AOTAutograd and Inductor: Dynamo traces, and runs what it traced",
    'torch.compile(backend="aot_eager")': "Inductor",
    "torch.compile(dynamic=False)": "dynamic shapes: each shape is compiled for itself",
    "TORCHINDUCTOR_COMPILE_THREADS=1": "Inductor's worker processes: it compiles in the thread that calls",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1": "the caches on disk, which a killed or a newer process may have left odd",
    "torch.autograd.set_multithreading_enabled(False)": "autograd's device threads: backward runs in the thread that calls",
    "OMP_NUM_THREADS=1": "threads within an op",
}
"""What to turn off to find out which part is at fault."""
_LOOKS = {
    "COMPILE_GUARD=raise": "the first finding that happens raises, where it happens",
    "COMPILE_GUARD_TRACE=DIR": "logs events, for `compile-guard report DIR`",
    "TORCH_LOGS=recompiles": "torch says which guard failed at each recompile",
    "py-spy dump --pid PID": "stacks of every thread of a process that hangs",
}
CHILD_S = 60.0
"""Seconds that a hazard may take; one that hangs takes all of them."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One hazard on this torch and machine."""

    id: str
    name: str
    title: str
    affected: bool
    """Whether this torch on this machine has it."""
    because: str
    """How it was told whether this torch is affected."""
    unguarded: str
    """What the trigger did: `safe`, `occurs`, `crash`, `hang`; `not run`."""
    guarded: str
    verdict: Verdict
    finding: str
    """Code of the finding that tells of it."""
    fix: str
    script: str
    links: tuple[str, ...]


def diagnose(hazards: Sequence[Hazard], *, quick: bool = False) -> list[Diagnosis]:
    """Find out about each hazard.

    Args:
        quick: ask the feature tests and see which seams fit, instead of running anything.

    Raises:
        ChildProcessError: children could not be run.
    """
    if quick:
        return _from_feature_tests(hazards)
    pairs = run_pairs(hazards, jobs=min(4, os.cpu_count() or 1), timeout_s=CHILD_S, progress=show_progress)
    return [
        _diagnosis(
            pair.hazard,
            pair.bare.because + (f"; with the guard: {_fault(pair.guarded)}" if pair.verdict == "open" else ""),
            pair.bare.cell(pair.hazard),
            pair.guarded.cell(pair.hazard),
            pair.verdict,
        )
        for pair in pairs
    ]


def _fault(result: Iteration) -> str:
    """What went wrong in a run with the guard, and the last that it said."""
    said = result.stacks.strip().splitlines()[-1:]
    return "; ".join([*filter(None, [result.occurred]), *result.unhealthy, *said])


def _from_feature_tests(hazards: Sequence[Hazard]) -> list[Diagnosis]:
    """Puts the guard in and out again once, to learn which seams fit."""
    install(mode="record")
    failed = failed_seams()
    uninstall()
    diagnoses = []
    for hazard in hazards:
        affected = hazard.affected()
        missing = [name for name in hazard.seams if name in failed or name not in seam_names()]
        because = affected.because + (f"; seams that do not fit: {', '.join(missing)}" if missing else "")
        verdict: Verdict = "prevented" if hazard.outcome == "prevented" else "detected"
        if not (affected.yes and affected.runnable):
            verdict = "unaffected"
        elif missing:
            verdict = "open"
        diagnoses.append(_diagnosis(hazard, because, "not run", "not run", verdict))
    return diagnoses


def _diagnosis(hazard: Hazard, because: str, unguarded: str, guarded: str, verdict: Verdict) -> Diagnosis:
    return Diagnosis(
        hazard.id,
        hazard.name,
        hazard.title,
        verdict != "unaffected",
        because,
        unguarded,
        guarded,
        verdict,
        hazard.finding,
        hazard.fix,
        f"repro/{hazard.name}.py",
        hazard.links,
    )


def chosen(only: Sequence[str]) -> list[Hazard]:
    """The hazards with these ids or names; all of the catalogue when `only` is empty.

    Raises:
        ValueError: there is no such hazard.
    """
    entries = catalogue()
    by_id = {hazard.id.lower(): hazard for hazard in entries.values()}
    hazards = []
    for asked in only:
        hazard = by_id.get(asked.lower(), entries.get(asked))
        if hazard is None:
            there = ", ".join(f"{hazard.id} {hazard.name}" for hazard in entries.values())
            raise ValueError(f"--only {asked}: there is no such hazard; there are {there}")
        hazards.append(hazard)
    return hazards or list(entries.values())


def closing_line(diagnoses: Sequence[Diagnosis]) -> str:
    """The counts, and what to do."""
    count = Counter(diagnosis.verdict for diagnosis in diagnoses)
    num_affected = len(diagnoses) - count["unaffected"]
    line = f"{num_affected} affected, {count['prevented']} prevented, {count['detected']} only detected, {count['open']} open."
    if count["open"]:
        broken = ", ".join(diagnosis.id for diagnosis in diagnoses if diagnosis.verdict == "open")
        return f"{line} Not covered: {broken}. Keep to one thread there, or turn off what the table below names."
    if num_affected:
        return f"{line} Call compile_guard.install() before the threads start; docs/diagnosing.md says more of each."
    return f"{line} Nothing to do."


def as_dict(diagnoses: Sequence[Diagnosis], environment: dict[str, str]) -> dict[str, Any]:
    """The whole as plain data."""
    shown = (
        "id",
        "name",
        "title",
        "affected",
        "because",
        "unguarded",
        "guarded",
        "verdict",
        "finding",
        "fix",
        "script",
        "links",
    )
    return {
        "environment": environment,
        "hazards": [{name: getattr(diagnosis, name) for name in shown} for diagnosis in diagnoses],
    }


def show(diagnoses: Sequence[Diagnosis], environment: dict[str, str]) -> None:
    """Print it for people: in colour where stdout is a terminal and rich is installed."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            _show_in_colour(Console(highlight=False), diagnoses, environment)
            return
    print("\n".join(_lines(diagnoses, environment)))


def _lines(diagnoses: Sequence[Diagnosis], environment: dict[str, str]) -> Iterator[str]:
    yield from _block(environment)
    yield ""
    width = max(len(diagnosis.title) for diagnosis in diagnoses)
    yield f"{'id':<4}{'hazard':<{width + 2}}{'without the guard':<20}{'with it':<20}verdict"
    for diagnosis in diagnoses:
        unguarded, guarded = _shown(diagnosis)
        yield f"{diagnosis.id:<4}{diagnosis.title:<{width + 2}}{unguarded:<20}{guarded:<20}{diagnosis.verdict}"
        yield f"      {diagnosis.because} [{', '.join([f'python {diagnosis.script}', *diagnosis.links])}]"
    yield ""
    yield closing_line(diagnoses)
    for heading, table in (("Turn off, to find out what is at fault:", SWITCHES), ("Look closer:", _LOOKS)):
        yield ""
        yield heading
        yield from (f"  {switch:<50}{what}" for switch, what in table.items())


def _block(environment: dict[str, str]) -> Iterator[str]:
    width = max(map(len, environment))
    return (f"{name:<{width + 2}}{value}" for name, value in environment.items())


def _shown(diagnosis: Diagnosis) -> tuple[str, str]:
    if diagnosis.unguarded.startswith("not run"):
        return "not run", "not run"
    return diagnosis.unguarded, diagnosis.guarded


def _show_in_colour(console: Any, diagnoses: Sequence[Diagnosis], environment: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    colours = {"unaffected": "dim", "prevented": "green", "detected": "yellow", "open": "bold red"}
    for line in _block(environment):
        console.print(Text(line))
    table = Table("id", "hazard", "without the guard", "with it", "verdict", "upstream")
    for diagnosis in diagnoses:
        unguarded, guarded = _shown(diagnosis)
        verdict = Text(diagnosis.verdict, colours[diagnosis.verdict])
        title = Text.assemble(diagnosis.title, "\n", (diagnosis.because, "dim"))
        table.add_row(diagnosis.id, title, unguarded, guarded, verdict, Text("\n".join(diagnosis.links)))
    console.print(table)
    console.print(Text(closing_line(diagnoses), "bold"))
    for heading, switches in (("switch", SWITCHES), ("look closer", _LOOKS)):
        what = Table(heading, "what it turns off" if switches is SWITCHES else "what it shows")
        for switch, effect in switches.items():
            what.add_row(Text(switch), Text(effect))
        console.print(what)
