"""Reads the event logs of a run: all files of its folder, broken lines skipped and counted."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from compile_guard.events import SCHEMA_VERSION
from compile_guard.findings import Actor, Finding

Event: TypeAlias = dict[str, Any]
Lane: TypeAlias = tuple[int, int]
"""A thread: process id and native thread id."""

SPANS = ("lock_hold", "wait", "trace", "compile", "reset")
"""Kinds of events that have a length."""
_FIELDS: dict[str, tuple[type, ...]] = {"t_ns": (int,), "pid": (int,), "tid": (int,), "thread": (str,), "kind": (str,)}
_FIELDS_OF_KIND: dict[str, dict[str, tuple[type, ...]]] = {
    "lock_hold": {"lock": (str,), "what": (str,), "number": (int,), "waited": (bool,)},
    "wait": {"subject": (str,), "holders": (list,)},
    "trace": {"what": (str,)},
    "compile": {"what": (str,)},
    "finding": {"code": (str,), "subject": (str,), "prevented": (bool,), "times": (int,)},
    "dropped": {"num_events": (int,)},
}
"""What the reports rely on; the whole format is `events.schema.json`."""


@dataclass(kw_only=True)
class Run:
    """What the logs of one run tell, in the order of time."""

    folder: Path
    files: list[Path]
    events: list[Event] = field(default_factory=list)
    num_broken: int = 0
    """Lines that are no events: cut off by a crash or a full disk, or damaged."""
    num_newer: int = 0
    """Events in a format that this version does not know."""

    @property
    def processes(self) -> list[Event]:
        """The first event of each file: what the process is."""
        return [event for event in self.events if event["kind"] == "process"]

    @property
    def num_dropped(self) -> int:
        """Events that were not written because a file was full."""
        return sum(event["num_events"] for event in self.events if event["kind"] == "dropped")

    @property
    def began_ns(self) -> int:
        """Time of the first event."""
        return int(self.events[0]["t_ns"])

    @property
    def length_ns(self) -> int:
        """From the first event's begin to the last one's end."""
        return max(end_ns(event) for event in self.events) - self.began_ns

    def spans(self, kind: str) -> list[Event]:
        """Events of one kind in the order of time."""
        return [event for event in self.events if event["kind"] == kind]

    def lanes(self) -> dict[Lane, str]:
        """Name of each thread; of one that was renamed, the last."""
        return {lane_of(event): event["thread"] for event in self.events}

    def findings(self) -> list[Finding]:
        """Each finding once, with its count over all processes."""
        found: dict[str, Finding] = {}
        counts: dict[str, int] = defaultdict(int)
        for event in self.spans("finding"):
            key = f"{event['code']}:{event['subject']}"
            counts[key] += event["times"]
            known = found.get(key)
            if "now" in event and (known is None or (known.prevented and not event["prevented"])):
                found[key] = _finding(event)
        return [replace(finding, count=counts[key]) for key, finding in found.items()]

    def handovers(self) -> Iterator[tuple[Event, Event]]:
        """Holds of a lock that had to be waited for, each with the hold whose end it waited for."""
        holds = {(event["pid"], event["lock"], event["number"]): event for event in self.spans("lock_hold")}
        for (pid, lock, number), hold in holds.items():
            before = holds.get((pid, lock, number - 1))
            if hold["waited"] and before is not None:
                yield before, hold


def end_ns(event: Event) -> int:
    """When it was over."""
    return int(event["t_ns"] + event.get("dur_ns", 0))


def lane_of(event: Event) -> Lane:
    """The thread that it happened in."""
    return event["pid"], event["tid"]


def read(folder: Path) -> Run:
    """Read every `*.ndjson` of a folder.

    Raises:
        ValueError: there is no such folder, no log in it, or no event in those.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the one that COMPILE_GUARD_TRACE or `run --trace` named")
    run = Run(folder=folder, files=sorted(folder.glob("*.ndjson")))
    if not run.files:
        raise ValueError(f"{folder} has no event log (*.ndjson); run the program with `compile-guard run --trace {folder}`")
    for file in run.files:
        with file.open("rb") as lines:
            for line in lines:
                _take(line, run)
    if not run.events:
        raise ValueError(f"the logs in {folder} have no event that can be read ({run.num_broken} broken lines)")
    run.events.sort(key=lambda event: (event["t_ns"], -event.get("dur_ns", 0)))
    return run


def _take(line: bytes, run: Run) -> None:
    try:
        event = json.loads(line)
    except ValueError:
        run.num_broken += 1
        return
    if not isinstance(event, dict) or not isinstance(event.get("v"), int):
        run.num_broken += 1
    elif event["v"] > SCHEMA_VERSION:
        run.num_newer += 1
    elif _is_whole(event):
        run.events.append(event)
    else:
        run.num_broken += 1


def _is_whole(event: Event) -> bool:
    if not all(isinstance(event.get(name), types) for name, types in _FIELDS.items()):
        return False
    kind = event["kind"]
    if kind in SPANS and not (isinstance(event.get("dur_ns"), int) and event["dur_ns"] >= 0):
        return False
    return all(isinstance(event.get(name), types) for name, types in _FIELDS_OF_KIND.get(kind, {}).items())


def _finding(event: Event) -> Finding:
    return Finding(
        code=event["code"],
        subject=event["subject"],
        title=str(event.get("title", "")),
        now=_actor(event["now"]),
        other=_actor(event["other"]) if event.get("other") else None,
        shared=str(event.get("shared", "")),
        consequence=str(event.get("consequence", "")),
        fix=str(event.get("fix", "")),
        prevented=event["prevented"],
        time_ns=event["t_ns"],
    )


def _actor(actor: Any) -> Actor:
    known = actor if isinstance(actor, dict) else {}
    for_s = known.get("for_s")
    return Actor(
        str(known.get("thread", "?")),
        int(known.get("tid", 0)),
        str(known.get("doing", "")),
        tuple(map(str, known.get("stack", ()))),
        float(for_s) if isinstance(for_s, int | float) else None,
    )
