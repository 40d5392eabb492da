"""The picture at the top of the HTML report: what each thread did when, as inline SVG of a bounded size."""

from __future__ import annotations

from html import escape

from compile_guard.report.event_log import Event, Lane, Run, end_ns, lane_of

_WIDTH, _LABEL, _TOP, _ROW = 1080, 150, 24, 26
_PLOT = _WIDTH - _LABEL - 10
_MAX_LANES = 40
_DRAWN = ("lock_hold", "wait", "reset", "trace", "compile")
"""Kinds of spans, the later over the earlier."""
LEGEND = {
    "compile": "compiles",
    "trace": "traces",
    "lock_hold": "holds the lock otherwise",
    "wait": "waits",
    "reset": "reset",
    "happened": "finding: happened",
    "prevented": "finding: prevented",
}


def overview(run: Run) -> str:
    """An SVG with a row for each of the busiest threads."""
    by_lane: dict[Lane, list[Event]] = {}
    for event in run.events:
        if event["kind"] in _DRAWN or event["kind"] == "finding":
            by_lane.setdefault(lane_of(event), []).append(event)
    busiest = sorted(by_lane, key=lambda lane: -len(by_lane[lane]))[:_MAX_LANES]
    lanes = [lane for lane in by_lane if lane in set(busiest)]
    height = _TOP + _ROW * len(lanes) + 4
    rows = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="What each thread did when">']
    rows += _axis(run, height)
    names = run.lanes()
    for number, lane in enumerate(lanes):
        top = _TOP + _ROW * number
        name = names[lane] if len(names[lane]) <= 20 else names[lane][:19] + "…"
        rows.append(f'<text x="0" y="{top + 16}">{escape(name)}<title>{escape(names[lane])}, tid {lane[1]}</title></text>')
        rows.append(f'<line x1="{_LABEL}" x2="{_WIDTH - 10}" y1="{top + 13}" y2="{top + 13}"/>')
        rows += _row(by_lane[lane], run, top)
    if len(by_lane) > len(lanes):
        rows.append(f"<title>{len(by_lane) - len(lanes)} threads with fewer events are left out</title>")
    return "\n".join([*rows, "</svg>"])


def _axis(run: Run, height: int) -> list[str]:
    rows = []
    for tick in range(6):
        x = _LABEL + _PLOT * tick / 5
        anchor = "end" if tick == 5 else "middle" if tick else "start"
        rows.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}"/>')
        rows.append(f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{seconds(run.length_ns * tick // 5)}</text>')
    return rows


def _row(events: list[Event], run: Run, top: int) -> list[str]:
    """Spans that fall on the same pixel are drawn once, so that the picture's size does not depend on their number."""
    scale = _PLOT / max(1, run.length_ns)
    rows = []
    for kind in _DRAWN:
        last_end = -1.0
        inset = 2 if kind in ("lock_hold", "wait", "reset") else 5
        for event in events:
            if event["kind"] != kind:
                continue
            begin = _LABEL + (event["t_ns"] - run.began_ns) * scale
            end = max(begin + 1.0, _LABEL + (end_ns(event) - run.began_ns) * scale)
            if end <= last_end + 0.5:
                continue
            begin, last_end = max(begin, last_end), end
            what = event.get("what") or event.get("subject") or kind
            title = f"{LEGEND[kind]}: {what}, {seconds(event['dur_ns'])}"
            place = f'x="{begin:.1f}" y="{top + inset}" width="{end - begin:.1f}" height="{_ROW - 4 - 2 * inset + 2}"'
            rows.append(f'<rect class="{kind}" {place} rx="1"><title>{escape(title)}</title></rect>')
    drawn: set[tuple[int, bool]] = set()
    for event in events:
        if event["kind"] == "finding":
            x = round(_LABEL + (event["t_ns"] - run.began_ns) * scale)
            if (x, event["prevented"]) not in drawn:
                drawn.add((x, event["prevented"]))
                title = f"{event['code']}: {event['subject']}"
                kind = "prevented" if event["prevented"] else "happened"
                rows.append(f'<circle class="{kind}" cx="{x}" cy="{top + 13}" r="4"><title>{escape(title)}</title></circle>')
    return rows


def seconds(ns: int) -> str:
    """A length of time for people."""
    if ns >= 100 * 10**9:
        return f"{ns / 6e10:.1f} min"
    if ns >= 10**9:
        return f"{ns / 1e9:.1f} s"
    if ns == 0:
        return "0"
    return f"{ns / 1e6:.0f} ms" if ns >= 10**7 else f"{ns / 1e6:.1f} ms"
