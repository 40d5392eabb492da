"""The end of a run: where time went by thread, acceptance before and after, plots, and a timeline."""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dflash_train.crew import Clock
from dflash_train.metrics import METRICS, read_metrics

NUM_LAST = 10
"""Steps over which the final acceptance is averaged."""


def write_timeline(clocks: Sequence[Clock], path: Path) -> None:
    """What each thread did when, for ui.perfetto.dev: Chrome's trace format, in microseconds since the first span."""
    begins = [span[1] for clock in clocks for span in clock.spans]
    origin = min(begins, default=0.0)
    events: list[dict[str, Any]] = []
    for clock in clocks:
        place = {"pid": os.getpid(), "tid": clock.ident}
        events.append({"ph": "M", "name": "thread_name", "args": {"name": clock.name}, **place})
        events += [
            {"ph": "X", "name": kind, "ts": 1e6 * (began - origin), "dur": 1e6 * (ended - began), **place}
            for kind, began, ended in clock.spans
        ]
    path.write_text(json.dumps({"traceEvents": events}), "utf-8")


def time_table(clocks: Sequence[Clock]) -> dict[str, dict[str, float]]:
    """Seconds of each thread by kind."""
    return {clock.name: {kind: round(spent, 3) for kind, spent in clock.seconds.items() if spent} for clock in clocks}


def summarise(
    run: Path, clocks: Sequence[Clock], findings: Sequence[str], lock_s: float, report: Callable[[str], None]
) -> None:
    """Write `summary.json`, `timeline.trace.json` and, with matplotlib, `summary.png`; tell the main figures.

    Args:
        run: folder of the run.
        clocks: of all threads.
        findings: of the guard, after the warm-up.
        lock_s: seconds that all threads together waited for the lock over torch's tracers, after the warm-up.
        report: told each line.
    """
    records = read_metrics(run / METRICS)
    table = time_table(clocks)
    write_timeline(clocks, run / "timeline.trace.json")
    accept = [record["accept"] for record in records]
    last = accept[-NUM_LAST:]
    # The loss of step 1 is that of the first weights.
    acceptance = {"untrained": sum(accept[:1]), "trained": sum(last) / max(1, len(last))}
    summary = {
        "last": records[-1] if records else {},
        "acceptance_teacher_forced": acceptance,
        "seconds": table,
        "lock_s": round(lock_s, 3),
        "findings": list(findings),
    }
    (run / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", "utf-8")
    report(
        f"acceptance, teacher-forced (not decoded): {acceptance['trained']:.2f} drafts a block over the last {len(last)} "
        f"steps; of the untrained drafter, at the first step: {acceptance['untrained']:.2f}"
    )
    report(
        f"findings after the warm-up: {', '.join(findings) or 'none'}; all threads together waited {lock_s:.1f} s for the lock "
        "over torch's tracers"
    )
    for name, seconds in table.items():
        total = max(1e-9, sum(seconds.values()))
        spent = ", ".join(f"{kind} {span:.1f} s ({span / total:.0%})" for kind, span in sorted(seconds.items()))
        report(f"  {name:<12} {spent}")
    if plot(records, run / "summary.png"):
        report(f"  plots in {run / 'summary.png'}, timeline in {run / 'timeline.trace.json'} (ui.perfetto.dev)")
    else:
        report(f"  timeline in {run / 'timeline.trace.json'} (ui.perfetto.dev); pip install matplotlib for plots")


def plot(records: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Loss, acceptance and throughput over the steps as a PNG; False where matplotlib is not installed."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    figure = figures.Figure(figsize=(10, 3), layout="constrained")
    steps = [record["step"] for record in records]
    names = {"loss": "loss", "accept": "accepted drafts a block (teacher-forced)", "drafter_tok_s": "tokens a second"}
    for axes, (name, title) in zip(figure.subplots(1, 3), names.items(), strict=True):
        # What was not finite stands as null, and is a gap.
        axes.plot(steps, [math.nan if record[name] is None else record[name] for record in records], linewidth=1)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("step", fontsize=8)
    figure.savefig(path, dpi=120)
    return True
