"""`compile-guard report RUN -o DIR`: text, HTML, timeline and the logs themselves, in one folder to attach to a bug report."""

from __future__ import annotations

import shutil
from pathlib import Path

from compile_guard.report import html, text, timeline
from compile_guard.report.event_log import Run

_OURS = ("index.html", "report.txt", "timeline.trace.json", "events")


def check(out: Path, *, overwrite: bool) -> None:
    """Whether a report may be written to `out`.

    Raises:
        ValueError: it exists, and is not to be overwritten or holds something else than a report.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file; name a folder with -o")
    if not overwrite:
        raise ValueError(f"{out} exists; pass --overwrite or another folder with -o")
    strange = sorted(entry.name for entry in out.iterdir() if entry.name not in _OURS)
    if strange:
        raise ValueError(f"{out} holds something else than a report ({strange[0]}), and is left alone; name another folder")


def write(run: Run, out: Path, profile: Path | None = None) -> None:
    """Write the report of a run; what `check` allowed to overwrite goes first.

    Raises:
        ValueError: `profile` is no trace of `torch.profiler`.
        OSError: a file cannot be written.
    """
    if profile is not None:
        timeline.read_profile(profile)  # before anything is written
    logs = {file.name: file.read_bytes() for file in run.files}  # RUN may be the old report's own `events`
    if out.exists():
        shutil.rmtree(out)
    (out / "events").mkdir(parents=True)
    for name, log in logs.items():
        (out / "events" / name).write_bytes(log)
    (out / "report.txt").write_text(text.of_run(run), encoding="utf-8")
    timeline.write(run, out / "timeline.trace.json", profile)
    (out / "index.html").write_text(html.as_html(run), encoding="utf-8")
