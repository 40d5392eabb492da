"""The live view, drawn into text."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from runs import SMALL

from dflash_train.crew import Clock
from dflash_train.live import Lane, LiveView

rich_console = pytest.importorskip("rich.console")


def drawn(view: LiveView) -> list[str]:
    console = rich_console.Console(file=io.StringIO(), width=120)
    console.print(view.table())
    return [line.strip() for line in console.file.getvalue().splitlines()]


def test_a_row_says_what_a_thread_does_now_and_where_its_time_went() -> None:
    clock, count = Clock("target-0"), [0]
    clock.seconds |= {"compute": 3.0, "wait": 1.0}
    view = LiveView([Lane(clock=clock, device="cuda:0", tokens=lambda: count[0])], lambda: None)
    assert drawn(view)[1].split()[:3] == ["target-0", "cuda:0", "-"]
    count[0] = 4096
    with clock("copy"):
        row = drawn(view)[1].split()
    assert row[2] == "copy"
    assert float(row[3].replace(",", "")) > 0
    assert row[4:6] == ["75%", "25%"]
    assert drawn(view)[-1] == "no step is done yet"


def test_on_a_terminal_the_run_draws_all_threads_and_prints_its_lines_above(tiny_data: Path, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "dflash_train", "train", "tiny-cpu", "-o", str(tmp_path / "run")]
    command += ["--drafter-devices=cpu,cpu"]
    command += [f"--set={setting}" for setting in (f"data.path={tiny_data}", *SMALL, "train.steps=40", "train.log_every=20")]
    root = str(Path(__file__).parents[2])
    environ = {**os.environ, "PYTHONPATH": root, "TERM": "xterm", "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=slave, stdout=subprocess.PIPE, stderr=slave, env=environ, text=True)
    os.close(slave)
    seen = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    os.close(master)
    assert process.wait(60) == 0
    text = seen.decode(errors="replace")
    assert all(name in text for name in ("target-0", "drafter-0", "drafter-1", "teacher-forced"))
    assert "step 00040/00040" in text
