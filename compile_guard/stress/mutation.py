"""What each seam is there for, shown: with it left out, its hazard occurs, or a schedule breaks an invariant.

    python -m compile_guard.stress.mutation [--only SEAM] [--schedules N]      prints a Markdown table

Each seam is left out in processes of its own: those of the hazards that name it, and one that explores schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from compile_guard import ecosystem_seams, torch_seams
from compile_guard.hazards._hazard import Hazard, catalogue
from compile_guard.hazards._runner import CANNOT_RUN, SAFE, child_environment, run_once

VARIABLE = "COMPILE_GUARD_STRESS_WITHOUT"
"""Name of the seam that `leave_out` leaves out."""

TIMEOUT_S = 300


def leave_out(name: str) -> None:
    """Have a later `install()` put every seam in but this one."""
    torch_seams.SEAMS = tuple(_emptied(seam, name) for seam in torch_seams.SEAMS)
    ecosystem_seams.ECOSYSTEM_SEAMS = tuple(
        replace(seam, put_in=_nothing) if seam.name == name else seam for seam in ecosystem_seams.ECOSYSTEM_SEAMS
    )


def _nothing(*_: object) -> None: ...


def _emptied(seam: torch_seams.Seam, name: str) -> torch_seams.Seam:
    return replace(seam, put_in=_nothing) if seam.name == name else seam


def caught_by(name: str, num_schedules: int) -> list[str]:
    """What fails without the seam: hazards by id and script name, then the exploration's first failure."""
    caught = []
    os.environ[VARIABLE] = name
    try:
        for hazard in (each for each in catalogue().values() if name in each.seams):
            if _occurs(hazard):
                caught.append(f"{hazard.id} `{hazard.name}`")
        if not caught:
            caught += _explored(num_schedules)
    finally:
        del os.environ[VARIABLE]
    return caught


def _occurs(hazard: Hazard) -> bool:
    result = run_once(hazard, guard=True, timeout_s=90.0)
    return result.exit_code(hazard) not in (SAFE, CANNOT_RUN)


def _explored(num_schedules: int) -> list[str]:
    line = [sys.executable, "-W", "ignore", "-m", "compile_guard", "stress", "--schedules", str(num_schedules), "--json"]
    try:
        done = subprocess.run(
            line, env=child_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        failures: list[str] = json.loads(done.stdout)["failures"]
    except subprocess.TimeoutExpired:
        return ["schedules: hang"]
    except json.JSONDecodeError:
        return [f"schedules: the process ended with status {done.returncode}"]
    return [f"schedules: {failures[0]}"] if failures else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where a seam that this torch needs is missed by nothing."""
    parser = argparse.ArgumentParser(prog="python -m compile_guard.stress.mutation", description="What misses each seam.")
    parser.add_argument("--only", action="append", default=[], metavar="SEAM", help="this seam; may be repeated")
    parser.add_argument("--schedules", type=int, default=300, metavar="N", help="schedules where no hazard misses it (300)")
    options = parser.parse_args(arguments)
    needed = [seam.name for seam in torch_seams.iterate_needed()]
    unknown = set(options.only) - set(needed)
    if unknown:
        parser.error(f"this torch needs no seam {', '.join(sorted(unknown))}; it needs {', '.join(needed)}")
    print("| seam | missed by |\n|---|---|", flush=True)
    missed = []
    for name in options.only or needed:
        caught = caught_by(name, options.schedules)
        print(f"| `{name}` | {', '.join(caught) or '-'} |", flush=True)
        if not caught:
            missed.append(name)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
