"""Runs in processes of their own, with a time limit each: how they ended, and what those that did not end were doing."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FRAMES = 7
"""Innermost frames shown of each thread."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended."""

    how: str
    """`finished`, `did not end in time`, or its exit code and last error."""
    text: str
    """All that it wrote."""

    @property
    def late(self) -> bool:
        """Whether it was killed at its time limit."""
        return self.how == "did not end in time"


def run_process(command: Sequence[str], environ: Mapping[str, str], log: Path, timeout: float, *, nice: int = 0) -> Ended:
    """Run a command to its end, or kill it with its children after `timeout` seconds.

    Its own time limit is in `DUMP_AT` (`dump_when_late`).
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environ = {**environ, "DUMP_AT": str(time.time() + timeout - 4)}
    with log.open("w") as file:
        process = subprocess.Popen(
            ["nice", "-n", str(nice), *command], env=environ, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        late = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)  # its compilers as well
            process.wait()
    text = log.read_text("utf-8", "replace")
    if late:
        return Ended(how="did not end in time", text=text)
    last = next((line for line in reversed(text.splitlines()) if "rror" in line), "")
    return Ended(how="finished" if process.returncode == 0 else f"exit {process.returncode}: {last.strip()[:200]}", text=text)


def dump_when_late() -> None:
    """Twice before this process is killed, half-way and at the end, write the stacks of all threads."""
    if "DUMP_AT" in os.environ:
        left = float(os.environ["DUMP_AT"]) - time.time()
        faulthandler.dump_traceback_later(max(1.0, left / 2), repeat=True, file=sys.stderr)


def last_stacks(text: str) -> list[str]:
    """The last dump in what a process wrote, the innermost frames of each thread, and the last line before it."""
    before, found, dump = text.rpartition("Timeout (")
    if not found:
        return [*text.splitlines()[-5:], "(no stacks: it was killed before it wrote them)"]
    said = [line for line in before.splitlines() if not re.match(r"\s*(File|Thread|Timeout|Current)\b", line) and line.strip()]
    shown = said[-1:]
    frames = 0
    for line in dump.splitlines()[1:]:
        frames = 0 if not line.startswith("  ") else frames + 1
        if line.strip() and frames <= FRAMES:
            shown.append(line)
    return shown
