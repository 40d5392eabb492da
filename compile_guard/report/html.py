"""The report of a run as one HTML page: nothing from the network, no scripts, everything escaped."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from compile_guard.findings import Actor, Finding
from compile_guard.report._overview import LEGEND, overview, seconds
from compile_guard.report.event_log import Event, Lane, Run, end_ns, lane_of

_LONGEST = 20
"""Rows of the tables that are sorted by length."""
_MOST_FINDINGS = 200


def as_html(run: Run) -> str:
    """The page."""
    found = sorted(run.findings(), key=lambda finding: (finding.prevented, -finding.count))
    process = run.processes[0] if run.processes else {}
    name = Path(str(process.get("program") or run.folder.name)).name
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.began_ns / 1e9))
    versions = f"torch {process.get('torch', '?')}, Python {process.get('python', '?')}, {process.get('platform', '?')}"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>compile_guard: {escape(name)}</title>
<style>
{style}</style>
</head>
<body>
<main>
<h1>{escape(name)}</h1>
<p class="about">{escape(began)}, {seconds(run.length_ns)} from the first event to the last. {escape(versions)}.</p>
{_verdict(found)}
{_tiles(run)}
<h2>Threads</h2>
<p class="about">What each thread did when. <code>timeline.trace.json</code>, in ui.perfetto.dev, shows it in full.</p>
<div class="card">{overview(run)}
<p class="legend">{_legend()}</p></div>
<h2>Findings</h2>
<p class="about">Conflicts between threads, and silent effects of compiling in threads, each once: what happened first,
then what the guard prevented.</p>
{_findings(found)}
<h2>Lock waits</h2>
<p class="about">The longest waits of the guard: what was waited for, and for whom.</p>
{_waits(run)}
<h2>Compiles</h2>
<p class="about">Which thread compiled, and what took longest. A compile holds the lock, so that the others wait.</p>
{_threads(run)}
{_functions(run)}
<h2>Data</h2>
<p class="about">This page names files, functions and threads of the program. Its source is not in here.</p>
{_data(run)}
</main>
</body>
</html>
"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = (), wide: Sequence[int] = ()) -> str:
    """A table of cells that are HTML already."""

    def kind(column: int) -> str:
        return ' class="number"' if column in numbers else ' class="wide"' if column in wide else ""

    heads = "".join(f"<th{kind(column)}>{escape(text)}</th>" for column, text in enumerate(head))
    lines = ["".join(f"<td{kind(column)}>{cell}</td>" for column, cell in enumerate(row)) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="card"><table><thead><tr>{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _verdict(found: list[Finding]) -> str:
    happened = [finding for finding in found if not finding.prevented]
    if happened:
        what = "; ".join(dict.fromkeys(finding.title for finding in happened[:3]))
        more = f" and {len(happened) - 3} more" if len(happened) > 3 else ""
        return f'<div class="verdict bad"><b>{len(happened)} happened.</b> {_prose(what)}{more}.</div>'
    prevented = f" {len(found)} would have, without the guard." if found else ""
    return f'<div class="verdict"><b>Nothing happened.</b>{prevented}</div>'


def _tiles(run: Run) -> str:
    compiles, waits = run.spans("compile"), run.spans("wait")
    longest = max((event["dur_ns"] for event in waits), default=0)
    num_processes = len({pid for pid, _ in run.lanes()})
    tiles = {
        "compiles": str(len(compiles)),
        "spent compiling": seconds(sum(event["dur_ns"] for event in compiles)),
        "waits": str(len(waits)),
        "longest wait": seconds(longest),
        "threads": str(len(run.lanes())),
        "processes" if num_processes > 1 else "process": str(num_processes),
    }
    cells = [f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles.items()]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _legend() -> str:
    def mark(kind: str) -> str:
        shape = '<circle cx="6" cy="6" r="5"' if kind in ("happened", "prevented") else '<rect width="12" height="12" rx="2"'
        return f'<svg viewBox="0 0 12 12">{shape} class="{kind}"/></svg>'

    return "".join(f"<span>{mark(kind)}{name}</span>" for kind, name in LEGEND.items())


def _findings(found: list[Finding]) -> str:
    if not found:
        return '<div class="card"><p>None.</p></div>'
    rows = [_finding(finding) for finding in found[:_MOST_FINDINGS]]
    if len(found) > _MOST_FINDINGS:
        rows.append(f"<p>{len(found) - _MOST_FINDINGS} more are in report.txt.</p>")
    return "\n".join(rows)


def _finding(finding: Finding) -> str:
    outcome = "prevented" if finding.prevented else "happened"
    times = f" <small class=about>{finding.count} times</small>" if finding.count > 1 else ""
    shown = "" if finding.prevented else " open"
    rows = {
        "Shared": finding.shared,
        "Without the guard" if finding.prevented else "Leads to": finding.consequence,
        "Fix": finding.fix,
    }
    facts = "".join(f"<dt>{name}</dt><dd>{_prose(text)}</dd>" for name, text in rows.items())
    facts += f"<dt>Suppress</dt><dd><code>{escape(finding.key)}</code> in the file that COMPILE_GUARD_SUPPRESSIONS names</dd>"
    other = f"<pre>{_actor('while', finding.other)}</pre>" if finding.other is not None else ""
    badge = f'<span class="badge{"" if finding.prevented else " bad"}">{outcome}</span>'
    return (
        f"<details{shown}><summary>{badge}{_prose(finding.title)} <code>{escape(finding.code)}</code>{times}</summary>"
        f"<div><dl>{facts}</dl><pre>{_actor('now', finding.now)}</pre>{other}</div></details>"
    )


def _prose(text: str) -> str:
    """Text with code between backticks."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", escape(text))


def _actor(role: str, actor: Actor) -> str:
    return escape("\n".join(line.removeprefix("  ") for line in actor.lines(role)))


def _waits(run: Run) -> str:
    longest = sorted(run.spans("wait"), key=lambda event: -event["dur_ns"])[:_LONGEST]
    if not longest:
        return '<div class="card"><p>No thread had to wait.</p></div>'
    held_by = _who_held(run, longest)
    rows = []
    for number, event in enumerate(longest):
        over = " (gave up)" if event.get("timed_out") or "error" in event else ""
        rows.append(
            [
                f"+{seconds(event['t_ns'] - run.began_ns)}",
                escape(event["thread"]),
                f"{seconds(event['dur_ns'])}{over}",
                escape(event["subject"]),
                escape(held_by[number] or ", ".join(map(str, event["holders"])) or "code that took torch's own lock"),
            ]
        )
    return _table(["when", "thread", "waited", "for", "held by"], rows, numbers=[0, 2], wide=[4])


def _who_held(run: Run, waits: list[Event]) -> list[str]:
    """For each wait for a lock, who held that meanwhile and what for, the longest hold first."""
    holds = run.spans("lock_hold")
    told = []
    for wait in waits:
        during = [
            hold
            for hold in holds
            if hold["pid"] == wait["pid"] and hold["lock"] == wait["subject"] and hold["tid"] != wait["tid"]
            if hold["t_ns"] < end_ns(wait) and end_ns(hold) > wait["t_ns"]
        ]
        during.sort(key=lambda hold: -hold["dur_ns"])
        more = f", and {len(during) - 2} more" if len(during) > 2 else ""
        told.append(", ".join(f"{hold['thread']} ({hold['what']})" for hold in during[:2]) + more)
    return told


def _threads(run: Run) -> str:
    by_lane: dict[Lane, dict[str, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in run.events:
        if "dur_ns" in event:
            by_lane[lane_of(event)][event["kind"]].append(event)
    names = run.lanes()
    rows = []
    for lane, kinds in sorted(by_lane.items(), key=lambda item: -_total(item[1]["compile"])):
        outcomes = [event.get("outcome", "raised") for event in kinds["compile"]]
        rows.append(
            [
                f"{escape(names[lane])} <small>pid {lane[0]}, tid {lane[1]}</small>",
                str(outcomes.count("compiled")),
                str(outcomes.count("limit")),
                str(outcomes.count("skipped")),
                seconds(_total(kinds["compile"])),
                str(len(kinds["trace"])),
                seconds(_total(kinds["lock_hold"])),
                seconds(_total(kinds["wait"])),
            ]
        )
    head = ["thread", "compiled", "over the limit", "left alone", "compiling", "traces", "held locks", "waited"]
    return _table(head, rows, numbers=range(1, 8), wide=[0])


def _functions(run: Run) -> str:
    by_function: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in run.spans("compile"):
        by_function[event["what"], str(event.get("where", ""))].append(event)
    longest = sorted(by_function.items(), key=lambda item: -_total(item[1]))[:_LONGEST]
    if not longest:
        return ""
    rows = [
        [
            f"<code>{escape(what)}</code> <small>{escape(where)}</small>",
            str(len(events)),
            seconds(_total(events)),
            seconds(max(event["dur_ns"] for event in events)),
            escape(", ".join(sorted({event["thread"] for event in events})[:6])),
        ]
        for (what, where), events in longest
    ]
    return "<h3>By function</h3>" + _table(
        ["function", "compiles", "in all", "longest", "threads"], rows, numbers=[1, 2, 3], wide=[0, 4]
    )


def _total(events: list[Event]) -> int:
    return sum(event["dur_ns"] for event in events)


def _data(run: Run) -> str:
    links = ["report.txt", "timeline.trace.json", *(f"events/{file.name}" for file in run.files)]
    items = "".join(f'<li><a href="{quote(link)}">{escape(link)}</a></li>' for link in links)
    lines = [f"{len(run.events)} events of {len(run.files)} file(s)."]
    if run.num_broken:
        lines.append(f"{run.num_broken} broken lines were skipped: the program was killed, or the disk was full.")
    if run.num_newer:
        lines.append(f"{run.num_newer} events are of a newer format, and were skipped.")
    if run.num_dropped:
        lines.append(f"{run.num_dropped} events were not written: a file had reached its limit.")
    return f'<div class="card"><p>{escape(" ".join(lines))}</p><ul>{items}</ul></div>'
