"""The command line: `run` is the program plus a report, wrong use is a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRACES_WHILE_CALLED = """
import sys, threading, torch
compiled = torch.compile(lambda x: x + 1, backend="eager")
compiled(torch.ones(2))
inside, done = threading.Event(), threading.Event()
def traced(x):
    inside.set()
    done.wait(30)
    return x * 2
tracer = threading.Thread(target=lambda: torch.fx.symbolic_trace(traced), name="tracer")
tracer.start()
inside.wait(30)
torch.nn.Linear(2, 2)(torch.ones(2, 2))
print("called", compiled(torch.ones(2)).sum().item(), sys.argv[1:], __name__)
done.set()
tracer.join()
"""

OVER_THE_LIMIT = """
import torch
torch._dynamo.config.recompile_limit = 2
step = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
for n in range(1, 6):
    step(torch.ones(n))
"""


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(
        [sys.executable, "-m", "compile_guard", *arguments], capture_output=True, text=True, env=env, timeout=180, check=False
    )


def script(folder: Path, text: str) -> str:
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_run_gives_the_program_its_arguments_and_name_and_reports_what_was_prevented(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = command("run", "--report", str(report), script(tmp_path, TRACES_WHILE_CALLED), "--its", "own")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "called 4.0 ['--its', 'own'] __main__"
    assert "compile_guard report: 0 findings happened" in done.stderr
    written = json.loads(report.read_text(encoding="utf-8"))
    assert written["status"] == 0
    codes = {finding["code"]: finding for finding in written["findings"]}
    assert codes["module-patch"]["prevented"]
    assert any("program.py" in row for row in codes["module-patch"]["other"]["stack"])


@pytest.mark.parametrize(("mode", "status"), [("record", 0), ("raise", 1)])
def test_a_finding_that_happened_fails_the_run_only_in_mode_raise(tmp_path: Path, mode: str, status: int) -> None:
    done = command("run", "--mode", mode, script(tmp_path, OVER_THE_LIMIT))
    assert done.returncode == status, done.stderr
    assert "runs eager from now on" in done.stderr


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('no data')", 1, "no data"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import sys; sys.exit()", 0, ""),
    ],
)
def test_run_ends_with_the_status_of_the_program(tmp_path: Path, text: str, status: int, said: str) -> None:
    done = command("run", script(tmp_path, text))
    assert done.returncode == status
    assert said in done.stderr
    assert "runpy" not in done.stderr, "the program's traceback shows frames of ours"


def test_run_waits_for_the_threads_of_the_program(tmp_path: Path) -> None:
    text = (
        "import threading, torch\n"
        "main = threading.current_thread()\n"
        "def late():\n"
        "    torch.compile(lambda x: x + 1, backend='eager')(torch.ones(1))\n"
        "    print('late', flush=True)\n"
        "threading.Thread(target=late).start()\n"
    )
    done = command("run", script(tmp_path, text))
    assert done.returncode == 0
    assert done.stdout == "late\n"
    assert "trace lock: taken" in done.stderr


def test_a_script_that_is_not_there_is_a_sentence_and_status_2(tmp_path: Path) -> None:
    done = command("run", str(tmp_path / "missing.py"))
    assert done.returncode == 2
    assert "missing.py is not a file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_report_into_a_folder_that_is_not_there_stops_before_the_program_runs(tmp_path: Path) -> None:
    done = command("run", "--report", str(tmp_path / "no" / "report.txt"), script(tmp_path, "print('ran')"))
    assert done.returncode == 2
    assert "does not exist" in done.stderr
    assert done.stdout == ""


def test_a_bad_mode_in_the_environment_lists_the_good_ones(tmp_path: Path) -> None:
    text = "import compile_guard\ncompile_guard.install()"
    done = subprocess.run(
        [sys.executable, script(tmp_path, text)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COMPILE_GUARD": "loud"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert "COMPILE_GUARD must be one of off, record, warn, raise, got 'loud'" in done.stderr


def test_the_environment_names_the_mode_where_the_command_line_does_not(tmp_path: Path) -> None:
    text = "import compile_guard; print(compile_guard.is_installed(), compile_guard.findings.mode)"
    assert command("run", script(tmp_path, text), COMPILE_GUARD="off").stdout == "False off\n"
    assert command("run", "--mode", "record", script(tmp_path, text), COMPILE_GUARD="off").stdout == "True record\n"
    refused = command("run", script(tmp_path, text), COMPILE_GUARD="loud")
    assert refused.returncode == 2
    assert "COMPILE_GUARD must be one of" in refused.stderr


def test_the_program_stays_main_for_threads_that_outlive_its_last_line(tmp_path: Path) -> None:
    text = (
        "import os, pickle, sys, threading\n"
        "class Kept: pass\n"
        "main, tick = threading.main_thread().ident, threading.Event()\n"
        "def is_in_program(frame):\n"
        "    return frame is not None and (frame.f_code.co_filename == __file__ or is_in_program(frame.f_back))\n"
        "def late():\n"
        "    while is_in_program(sys._current_frames()[main]):\n"
        "        tick.wait(0.001)\n"
        "    pickle.dumps(Kept())\n"
        "    print(os.path.isabs(__file__), flush=True)\n"
        "threading.Thread(target=late).start()\n"
    )
    done = command("run", script(tmp_path, text))
    assert done.stdout == "True\n", done.stderr
