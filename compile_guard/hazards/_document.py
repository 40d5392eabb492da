"""`docs/hazards.md`, made from the catalogue and from what its entries did on each torch."""

from __future__ import annotations

import json
import platform
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compile_guard.hazards._hazard import catalogue

_HEAD = """# Hazards

Made by commands, from `compile_guard/hazards/`; do not edit. On each machine and torch:

    python -m compile_guard.hazards --table --json > FILE

and of those files:

    python -m compile_guard.hazards --document FILE… > docs/hazards.md

Each cell is one run without the guard / one run with it, each in a process of its own. *occurs*, *crash*, *hang*: the hazard
happened. *explained*: it still fails, as it must, and the guard's finding says why. *detected*: it still happens, and the
guard's finding says so. *safe*: it did not happen. A dash: the torch or the machine does not have it.
"""


def machine() -> str:
    """What a run was made on, without asking torch: the parent of the children needs none."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
        devices = ", ".join(sorted(set(done.stdout.split("\n")) - {""})) if done.returncode == 0 else ""
    except (OSError, subprocess.TimeoutExpired):
        devices = ""
    return f"Python {platform.python_version()}, {devices or 'CPU'}"


def document(files: Sequence[Path]) -> str:
    """The page: a table with a column for each file, then what each hazard is.

    Raises:
        ValueError: a file is not what `--table --json` prints.
    """
    runs = [_read(file) for file in files]
    heads = [f"torch {run['torch'].split('+')[0]}, {run['machine']}" for run in runs]
    lines = [_HEAD, f"| id | hazard | script | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(runs)]
    for hazard in catalogue().values():
        cells = [_cell(run["entries"].get(hazard.name)) for run in runs]
        lines.append(f"| {hazard.id} | {hazard.title} | `repro/{hazard.name}.py` | {' | '.join(cells)} |")
    for hazard in catalogue().values():
        seams = ", ".join(f"`{seam}`" for seam in hazard.seams)
        cure = {
            "prevented": f"Prevented by the seams {seams}.",
            "explained": "Cannot be prevented; it is explained.",
            "detected": "Not prevented; it is detected.",
        }[hazard.outcome]
        finding = f"Finding: `{hazard.finding}`. " if hazard.finding else ""
        lines += [
            "",
            f"## {hazard.id}: {hazard.title}",
            "",
            f"**Symptom.** {_paragraph(hazard.symptom)}",
            "",
            f"**Mechanism.** {_paragraph(hazard.mechanism)}",
            "",
            f"**Guard.** {cure} {finding}{_paragraph(hazard.fix)}",
            "",
            f"**Upstream.** {', '.join(hazard.links) or 'not reported, as far as is known'}.",
        ]
    return "\n".join(lines) + "\n"


def _read(file: Path) -> dict[str, Any]:
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        return {**run, "entries": {entry["name"]: entry for entry in run["entries"]}}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not what `--table --json` prints ({type(error).__name__}: {error})") from error


def _cell(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return "not run"
    if entry["affected"] is False or entry["bare"].startswith("not run"):
        return "–"  # noqa: RUF001 - a dash in a table
    return f"{entry['bare']} / {entry['guarded']}"


def _paragraph(text: str) -> str:
    return " ".join(textwrap.dedent(text).split())
