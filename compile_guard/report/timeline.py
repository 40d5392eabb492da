"""The event log as a timeline for ui.perfetto.dev or chrome://tracing: one lane for each thread.

Lanes are process and native thread ids, times microseconds after `baseTimeNanoseconds`, as in the traces of `torch.profiler`:
the two can be merged, and a thread of both is one lane.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compile_guard.report.event_log import SPANS, Event, Run, end_ns, lane_of

_NAME_OF_SPAN = {
    "lock_hold": "holds {lock}: {what}",
    "wait": "waits for {subject}",
    "trace": "{what}",
    "compile": "compile {what}",
    "reset": "reset",
}
_SHOWN_OTHERWISE = frozenset({"v", "t_ns", "dur_ns", "pid", "tid", "thread", "kind"})


def as_trace(run: Run) -> dict[str, Any]:
    """The run in Chrome's trace format."""
    base = run.began_ns
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base,
        "traceEvents": [*_names(run), *(row for event in run.events for row in _rows(event, base)), *_flows(run, base)],
    }


def write(run: Run, file: Path, profile: Path | None = None) -> None:
    """Write the timeline, merged with a trace that `torch.profiler` has exported where one is given.

    Raises:
        ValueError: `profile` is no such trace.
    """
    trace = as_trace(run)
    if profile is not None:
        trace = merged(trace, read_profile(profile))
    file.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")


def read_profile(file: Path) -> dict[str, Any]:
    """A trace that `torch.profiler` has exported.

    Raises:
        ValueError: it is none.
    """
    try:
        profile = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read as a trace of torch.profiler: {error}") from error
    if not isinstance(profile, dict) or not isinstance(profile.get("traceEvents"), list):
        raise ValueError(f"{file} is no trace of torch.profiler: it has no list `traceEvents`")
    if not isinstance(profile.get("baseTimeNanoseconds"), int):
        raise ValueError(f"{file} does not say when it began (`baseTimeNanoseconds`), so that it cannot be merged")
    return profile


def merged(trace: dict[str, Any], profile: dict[str, Any]) -> dict[str, Any]:
    """Both in one, on the profile's clock."""
    shift_us = (trace["baseTimeNanoseconds"] - profile["baseTimeNanoseconds"]) / 1000
    ours = [event | ({"ts": event["ts"] + shift_us} if "ts" in event else {}) for event in trace["traceEvents"]]
    return profile | {"traceEvents": [*profile["traceEvents"], *ours]}


def _names(run: Run) -> Iterator[dict[str, Any]]:
    for process in run.processes:
        name = f"rank {process.get('rank', '?')}: {process.get('program', '')}"
        yield {"ph": "M", "name": "process_name", "pid": process["pid"], "tid": 0, "args": {"name": name}}
    for (pid, tid), name in run.lanes().items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _place(event: Event, base: int, at_ns: int | None = None) -> dict[str, Any]:
    pid, tid = lane_of(event)
    return {"pid": pid, "tid": tid, "ts": ((event["t_ns"] if at_ns is None else at_ns) - base) / 1000}


def _rows(event: Event, base: int) -> Iterator[dict[str, Any]]:
    kind = event["kind"]
    about = {name: value for name, value in event.items() if name not in _SHOWN_OTHERWISE}
    if kind in SPANS:
        name = _NAME_OF_SPAN[kind].format_map(event)
        yield {"ph": "X", "cat": kind, "name": name, **_place(event, base), "dur": event["dur_ns"] / 1000, "args": about}
    elif kind == "finding":
        outcome = "prevented" if event["prevented"] else "happened"
        name = f"{event['code']} ({outcome})"
        yield {"ph": "i", "s": "t", "cat": "finding", "name": name, **_place(event, base), "args": about}
    elif kind in ("fork", "dropped"):
        yield {"ph": "i", "s": "p", "cat": kind, "name": kind, **_place(event, base), "args": about}


def _flows(run: Run, base: int) -> Iterator[dict[str, Any]]:
    """An arrow from the end of a hold to the begin of the next one, where that had been waited for."""
    for number, (released, taken) in enumerate(run.handovers()):
        arrow = {"cat": "lock", "name": f"{taken['lock']} handed over", "id": number}
        # At its very end the span is over for a viewer: the arrow would have no span to begin from.
        yield {"ph": "s", **arrow, **_place(released, base, max(released["t_ns"], end_ns(released) - 1))}
        yield {"ph": "f", "bp": "e", **arrow, **_place(taken, base)}
