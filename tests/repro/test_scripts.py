"""Every entry of the catalogue has its script, and each prints a trigger that needs nothing of this package."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compile_guard.hazards import catalogue

REPRO = Path(__file__).resolve().parents[2] / "repro"


def test_each_entry_has_a_script_and_no_script_lacks_an_entry() -> None:
    scripts = {path.stem for path in REPRO.glob("*.py")} - {"threaded_drafters", "demo"}
    assert scripts == set(catalogue())


@pytest.mark.parametrize("name", catalogue())
def test_standalone_file_compiles_and_knows_nothing_of_the_guard(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(REPRO / f"{name}.py"), "--standalone"], capture_output=True, text=True, timeout=120, check=True
    )
    compile(done.stdout, f"{name}.py", "exec")
    code = "\n".join(line for line in done.stdout.split('"""', 2)[2].splitlines() if not line.lstrip().startswith("#"))
    assert "import compile_guard" not in code
    assert "from compile_guard" not in code


def test_standalone_fx_race_runs_from_an_empty_folder(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, str(REPRO / "fx_race.py"), "--standalone"], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    script = tmp_path / "bug.py"
    script.write_text(printed, encoding="utf-8")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True)
    expected = "Detected that you are using FX" if catalogue()["fx_race"].affected().yes else "did not occur"
    assert expected in done.stdout


def test_an_unknown_number_of_iterations_is_a_usage_error() -> None:
    done = subprocess.run(
        [sys.executable, str(REPRO / "fx_race.py"), "--iterations", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2
    assert "--iterations must be at least 1, got 0" in done.stderr


@pytest.mark.stress
def test_threaded_drafters_finish_under_the_guard_as_each_does_alone() -> None:

    def train(*arguments: str) -> dict[str, list[float]]:
        command = [sys.executable, str(REPRO / "threaded_drafters.py"), "--devices", "cpu", "--steps", "1", "--json"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return {name: drafter["losses"] for name, drafter in json.loads(done.stdout)["drafters"].items()}

    together = train("--guard", "--snapshots")
    assert set(together) == {"0", "1", "2"}
    assert together["1"] == pytest.approx(train("--alone", "1")["1"], rel=1e-5)
