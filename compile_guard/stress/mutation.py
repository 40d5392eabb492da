"""What each seam is there for, shown: with it left out a hazard occurs, a schedule breaks an invariant, or a test fails.

    python -m compile_guard.stress.mutation [--only SEAM] [--schedules N] [--tests FILE...]     prints a Markdown table

Tried in this order, until one misses the seam: the hazards that name it, explored schedules, the test files.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from compile_guard import cli, ecosystem_seams, torch_seams
from compile_guard.hazards import _runner
from compile_guard.hazards._hazard import Hazard, catalogue
from compile_guard.hazards._nursery import Nursery, serve

TIMEOUT_S = 900
"""For the schedules, and for the tests, of one seam."""

_OWN = "compile_guard.stress.mutation"
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def leave_out(name: str) -> None:
    """Have a later `install()` of this process put every seam in but this one."""
    torch_seams.SEAMS = tuple(
        replace(seam, put_in=_nothing) if seam.name == name else seam for seam in torch_seams.SEAMS
    )
    ecosystem_seams.ECOSYSTEM_SEAMS = tuple(
        replace(seam, put_in=_nothing) if seam.name == name else seam for seam in ecosystem_seams.ECOSYSTEM_SEAMS
    )


def _nothing(*_: object) -> None: ...


def missed_by(name: str, num_schedules: int, tests: Sequence[str]) -> str:
    """What fails without the seam; empty where nothing does."""
    for hazard in catalogue().values():
        if name in hazard.seams and _occurs(hazard, without=name):
            return f"hazard {hazard.id} `{hazard.name}`"
    ended, said = _without(name, ["stress", "--schedules", str(num_schedules), "--json"])
    failures = json.loads(said)["failures"] if said.startswith("{") else [f"ended with {ended}"]
    if failures:
        return f"schedules: {failures[0]}"
    if tests:
        ended, said = _without(name, ["--pytest", "-x", "-q", *tests])
        if ended != 0:
            failed = _FAILED.search(said)
            return f"test `{failed[1]}`" if failed else f"tests: ended with {ended}"
    return ""


def _occurs(hazard: Hazard, *, without: str) -> bool:
    environment = _runner.child_environment() | hazard.environment
    with Nursery(environment, (_OWN, "--without", without, "--nursery")) as nursery:
        result = _runner.run_once(replace(hazard, environment={}), guard=True, timeout_s=60.0, nursery=nursery)
    return result.exit_code(hazard) == _runner.OCCURRED


def _without(name: str, arguments: list[str]) -> tuple[object, str]:
    """Exit status and stdout of the command line `arguments` in a process without the seam."""
    line = [sys.executable, "-W", "ignore", "-m", _OWN, "--without", name, *arguments]
    try:
        done = subprocess.run(
            line, env=_runner.child_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {TIMEOUT_S} s", ""
    return done.returncode, done.stdout


def _inside(name: str, arguments: list[str]) -> int:
    """What a process without the seam does."""
    leave_out(name)
    if arguments == ["--nursery"]:
        serve(_runner.main)
        return 0
    if arguments[0] == "--pytest":
        import pytest

        return int(pytest.main(arguments[1:]))
    return cli.main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 where nothing misses a seam that this torch needs."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["--without"]:
        return _inside(given[1], given[2:])
    parser = argparse.ArgumentParser(prog=f"python -m {_OWN}", description="What misses each seam of the guard.")
    parser.add_argument("--only", action="append", default=[], metavar="SEAM", help="this seam; may be repeated")
    parser.add_argument("--schedules", type=int, default=200, metavar="N", help="schedules where no hazard misses it (200)")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="tests to run where no schedule does")
    options = parser.parse_args(given)
    needed = [seam.name for seam in torch_seams.iterate_needed()]
    unknown = set(options.only) - set(needed)
    if unknown:
        parser.error(f"this torch needs no seam {', '.join(sorted(unknown))}; it needs {', '.join(needed)}")
    print("| seam | without it fails |\n|---|---|", flush=True)
    num_missed_by_none = 0
    for name in options.only or needed:
        what = missed_by(name, options.schedules, options.tests)
        print(f"| `{name}` | {what or '-'} |", flush=True)
        num_missed_by_none += not what
    return 1 if num_missed_by_none else 0


if __name__ == "__main__":
    raise SystemExit(main())
