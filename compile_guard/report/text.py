"""The report at the end of a guarded run, or of its event logs: one page of text, or the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from compile_guard.findings import Finding
from compile_guard.install import failed_seams
from compile_guard.report.environment import environment
from compile_guard.report.event_log import Run
from compile_guard.trace_lock import TraceLock

SCHEMA_VERSION = 1


def as_dict(found: Sequence[Finding], lock: TraceLock, status: int | None) -> dict[str, Any]:
    """The report as plain data: `{"version", "environment", "status", "lock", "failed_seams", "findings"}`."""
    return {
        "version": SCHEMA_VERSION,
        "environment": environment(),
        "status": status,
        "lock": asdict(lock.statistics()),
        "failed_seams": failed_seams(),
        "findings": [asdict(finding) for finding in found],
    }


def as_text(found: Sequence[Finding], lock: TraceLock, status: int | None) -> str:
    """The report as a page: what happened first, then what was prevented, each with both threads' stacks."""
    env = environment()
    statistics = lock.statistics()
    lines = [
        _headline(found),
        f"  torch {env['torch']}, Python {env['python']}, {env['devices']}",
        f"  trace lock: taken {statistics.num_acquired} times, {statistics.num_contended} had to wait, "
        f"{statistics.waited_s:.1f} s in all",
    ]
    if status is not None:
        lines.append(f"  the program ended with status {status}")
    for name, reason in failed_seams().items():
        lines.append(f"  seam {name} does not fit this torch, what it prevents is not covered: {reason}")
    return "\n".join([*lines, *_by_outcome(found)]) + "\n"


def of_run(run: Run) -> str:
    """The report of a run that is over, from its event logs."""
    found = run.findings()
    process = run.processes[0] if run.processes else {}
    waits = run.spans("wait")
    compiles = run.spans("compile")
    lines = [
        _headline(found),
        f"  {process.get('program', run.folder)}",
        f"  torch {process.get('torch', '?')}, Python {process.get('python', '?')}, {process.get('platform', '?')}",
        f"  {len(run.events)} events of {len({event['pid'] for event in run.events})} process(es) and "
        f"{len(run.lanes())} thread(s), {run.length_ns / 1e9:.1f} s",
        f"  {len(compiles)} compiles, {sum(event['dur_ns'] for event in compiles) / 1e9:.1f} s; "
        f"{len(waits)} waits, {sum(event['dur_ns'] for event in waits) / 1e9:.1f} s",
    ]
    if run.num_broken or run.num_newer or run.num_dropped:
        lines.append(
            f"  skipped: {run.num_broken} broken lines, {run.num_newer} events of a newer format; "
            f"{run.num_dropped} events were not written"
        )
    return "\n".join([*lines, *_by_outcome(found)]) + "\n"


def _headline(found: Sequence[Finding]) -> str:
    happened = [finding for finding in found if not finding.prevented]
    return f"compile_guard report: {_count(happened, 'finding')} happened, {len(found) - len(happened)} prevented"


def _by_outcome(found: Sequence[Finding]) -> Iterator[str]:
    """What happened, then what was prevented, the most frequent first."""
    for heading, prevented in (("Happened", False), ("Prevented", True)):
        group = [finding for finding in found if finding.prevented == prevented]
        if group:
            yield ""
            yield f"{heading}:"
            yield from map(str, sorted(group, key=lambda finding: -finding.count))


def as_json(found: Sequence[Finding], lock: TraceLock, status: int | None) -> str:
    """`as_dict` as indented JSON."""
    return json.dumps(as_dict(found, lock, status), indent=1) + "\n"


def _count(group: Sequence[Finding], noun: str) -> str:
    return f"{len(group)} {noun}{'' if len(group) == 1 else 's'}"
