"""`docs/diagnosing.md`: from what a user sees to the hazard, made from the symptoms in the catalogue."""

from __future__ import annotations

import re
import textwrap

from compile_guard.hazards._hazard import Hazard, catalogue

_HEAD = """# Diagnosing

Made by `python -m compile_guard.hazards --diagnosing > docs/diagnosing.md`, from `compile_guard/hazards/`; do not edit.

From an error text or a symptom to the hazard. Each is described in [hazards.md](hazards.md); `python repro/NAME.py` shows it,
`compile-guard doctor --only ID` says whether the installed torch has it. Where nothing here fits, in this order:

1. `compile-guard run program.py`: the report at the end names the threads, what they shared, and what to change.
2. `compile-guard run --trace DIR program.py`, then `compile-guard report DIR -o OUT`: `OUT/index.html` and a timeline of all
   threads. The profile of `torch.profiler` goes into the same timeline with `--merge`.
3. `COMPILE_GUARD=raise`: the first finding that happens raises where it happens. `TORCH_LOGS=+compile_guard` logs each as it
   comes, and `TORCH_TRACE=DIR` gives it to tlparse beside its compile.
4. `compile-guard doctor` ends with a table of what to turn off, to find out which part is at fault.

A process that hangs: wait 30 s. Every wait of the guard that lasts so long becomes a finding with the stacks of both threads.
Without the guard: `py-spy dump --pid PID`, and look for `compile_lock`.
"""

_CODE = re.compile("`([^`]+)`")
_MESSAGE = re.compile(r"Error|[Ff]ail|[Dd]etected|must|cannot|not |already|hit |[A-Z][a-z]+ [a-z]+ ")
_EXCEPTION = re.compile(r"\w+(Error|Hit|Exception)")


def diagnosing() -> str:
    """The page: a table of error texts, then one of symptoms without, then one of findings."""
    hazards = list(catalogue().values())
    texts = [(text, hazard) for hazard in hazards for text in error_texts(hazard)]
    told = {hazard.name for _, hazard in texts}
    lines = [_HEAD, "## By error text", "", "| the program says | hazard | what to change |", "|---|---|---|"]
    lines += [f"| `{_cell(text)}` | {_link(hazard)} | {_cell(hazard.fix)} |" for text, hazard in texts]
    lines += ["", "## By symptom", "", "| what is seen | hazard | what to change |", "|---|---|---|"]
    silent_first = sorted(hazards, key=lambda hazard: hazard.name in told)
    lines += [f"| {_cell(hazard.symptom)} | {_link(hazard)} | {_cell(hazard.fix)} |" for hazard in silent_first]
    lines += ["", "## By finding", "", "| code | hazards |", "|---|---|"]
    by_code: dict[str, list[Hazard]] = {}
    for hazard in hazards:
        by_code.setdefault(hazard.finding, []).append(hazard)
    lines += [f"| `{code}` | {', '.join(map(_link, by_code[code]))} |" for code in sorted(by_code)]
    return "\n".join(lines) + "\n"


def error_texts(hazard: Hazard) -> list[str]:
    """The messages and exceptions among what a symptom quotes: names of functions and options are none."""
    quoted = _CODE.findall(hazard.symptom)
    return [text for text in quoted if (" " in text and _MESSAGE.search(text)) or _EXCEPTION.fullmatch(text)]


def _link(hazard: Hazard) -> str:
    title = f"{hazard.id}: {hazard.title}"
    # As GitHub makes anchors: punctuation is dropped, each blank becomes a dash.
    anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{hazard.id} {hazard.title}](hazards.md#{anchor})"


def _cell(text: str) -> str:
    return " ".join(textwrap.dedent(text).split()).replace("|", "\\|")
