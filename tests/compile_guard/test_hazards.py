"""Every entry of the catalogue: must be found without the guard, must be safe with it, its mirror must stay silent.

Each run is a process of its own, through the runner that the scripts in `repro/` are.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import compile_guard
from compile_guard.hazards import Hazard, catalogue
from compile_guard.hazards._runner import CANNOT_RUN, OCCURRED, SAFE, Iteration, run_once
from compile_guard.install import seam_names

ENTRIES = catalogue()
each_entry = pytest.mark.parametrize("name", ENTRIES)
RACY = frozenset({"reset_crash", "thundering_herd"})
"""What memory a use after free meets is not forced by any order: a few attempts are allowed."""


def run(name: str, **how: Any) -> Iteration:
    return run_once(ENTRIES[name], timeout_s=90.0, **how)


def skip_unless_it_can_run(result: Iteration) -> None:
    if result.ended == "cannot run":
        pytest.skip(f"cannot run here: {result.because}")


@each_entry
def test_must_find_without_the_guard(name: str) -> None:
    hazard = ENTRIES[name]
    result = run(name)
    skip_unless_it_can_run(result)
    for _ in range(2 if name in RACY else 0):
        if result.affected is False or result.exit_code(hazard) == OCCURRED:
            break
        result = run(name)
    if result.affected is False:
        assert result.exit_code(hazard) == SAFE, f"said to be not affected ({result.because}), but: {result.occurred}"
    else:
        assert result.exit_code(hazard) == OCCURRED, f"affected ({result.because}), but nothing occurred"


@each_entry
def test_must_be_safe_with_the_guard(name: str) -> None:
    hazard = ENTRIES[name]
    result = run(name, guard=True)
    skip_unless_it_can_run(result)
    said = f"{result.ended}; {result.occurred}; {result.unhealthy}\n{result.stacks}"
    assert result.exit_code(hazard) == SAFE, said
    codes = {found["code"] for found in result.findings}
    if result.affected and hazard.finding:
        assert hazard.finding in codes, f"the guard did not tell of it; it found {codes or 'nothing'}"


@each_entry
def test_must_stay_silent_on_the_mirror(name: str) -> None:
    result = run(name, guard=True, mirror=True)
    skip_unless_it_can_run(result)
    assert (result.ended, result.occurred, result.unhealthy) == ("finished", None, []), result.stacks
    assert result.findings == [], result.findings[0]["text"]


@each_entry
def test_entry_says_what_is_needed_of_it(name: str) -> None:
    hazard: Hazard = ENTRIES[name]
    assert hazard.name == name
    assert set(hazard.seams) <= seam_names()
    assert hazard.outcome != "prevented" or hazard.seams, "what prevents it?"
    assert all(hasattr(hazard, field) and getattr(hazard, field) for field in ("title", "symptom", "mechanism", "fix"))
    assert (Path(__file__).parents[2] / "repro" / f"{name}.py").is_file()


@functools.cache
def _standalone(name: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, str(root / "repro" / f"{name}.py"), "--standalone"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@each_entry
def test_standalone_is_a_program_that_knows_nothing_of_the_guard(name: str) -> None:
    program = _standalone(name)
    compile(program, f"{name}.py", "exec")
    assert "import compile_guard" not in program
    assert "from compile_guard" not in program


def test_feature_tests_leave_the_process_as_it_was(clean: None) -> None:
    from tests.compile_guard.test_install import changes, snapshot

    compile_guard.install()  # parts of torch register themselves with others as they are imported, once
    compile_guard.uninstall()
    before = snapshot()
    for hazard in ENTRIES.values():
        assert isinstance(hazard.affected().yes, bool)
    assert changes(before, snapshot()) == set()


@pytest.mark.parametrize("outcome", ["explained", "detected"])
def test_what_cannot_be_prevented_is_safe_only_where_its_finding_tells(outcome: Any) -> None:
    hazard = replace(ENTRIES["recompile_limit"], outcome=outcome)
    silent = Iteration(ended="finished", affected=True, occurred="it did")
    assert silent.exit_code(hazard) == OCCURRED
    told = replace(silent, findings=[{"code": hazard.finding, "text": ""}])
    assert told.exit_code(hazard) == SAFE
    assert replace(told, unhealthy=["the compile lock is not free"]).exit_code(hazard) == OCCURRED
    assert told.exit_code(replace(hazard, outcome="prevented")) == OCCURRED


def test_exit_codes_are_three_different_numbers() -> None:
    assert (SAFE, OCCURRED, CANNOT_RUN) == (0, 1, 2)
