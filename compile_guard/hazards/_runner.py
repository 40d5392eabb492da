"""Runs entries of the catalogue, each iteration in a process of its own, since several crash, hang or brick it.

Every script of `repro/` is this runner with a name. The parent needs no torch: the child tells what it found.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import faulthandler
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from compile_guard.hazards import _threads
from compile_guard.hazards._document import document, machine
from compile_guard.hazards._hazard import Hazard, catalogue

SAFE, OCCURRED, CANNOT_RUN = 0, 1, 2

Ended = Literal["finished", "crashed", "hung", "cannot run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """What one child process did."""

    ended: Ended
    torch: str = "unknown"
    affected: bool | None = None
    """None: the child ended before it could tell."""
    because: str = ""
    occurred: str | None = None
    """The trigger's own sentence, or what became of the child."""
    findings: list[dict[str, str]] = field(default_factory=list)
    """`code` and `text` of each finding of the guard; empty without the guard."""
    unhealthy: list[str] = field(default_factory=list)
    """What no longer works in the process after the trigger; asked with the guard only."""
    stacks: str = ""
    """What the child wrote to stderr: of a crash, hang or deadlock, the stacks of all its threads."""
    wall_s: float = 0.0

    def exit_code(self, hazard: Hazard) -> int:
        """0 safe, 1 the hazard occurred, 2 could not run here."""
        if self.ended == "cannot run":
            return CANNOT_RUN
        if self.ended != "finished" or self.unhealthy:
            return OCCURRED
        if self.occurred is None:
            return SAFE
        told = any(found["code"] == hazard.finding for found in self.findings)
        return SAFE if hazard.outcome != "prevented" and told else OCCURRED


def run_once(hazard: Hazard, *, guard: bool = False, mirror: bool = False, timeout_s: float = 90.0) -> Iteration:
    """Run a hazard's trigger (or its mirror program) once, in a child process, and say what became of it.

    With `mirror`, an exception of the program is an occurrence; findings are for the caller to judge.
    """
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    # The switch of this run is --guard, whatever the shell that it was started from has set.
    environment.pop("COMPILE_GUARD", None)
    # glibc overwrites what is freed: a use after free shows at once, and not by chance.
    environment.setdefault("MALLOC_PERTURB_", "165")
    with tempfile.TemporaryDirectory(prefix="compile_guard_") as folder:
        report = Path(folder, "report.ndjson")
        report.touch()
        command = [sys.executable, "-X", "faulthandler", "-m", "compile_guard.hazards", hazard.name]
        command += ["--child", str(report), "--timeout", str(timeout_s)] + ["--guard"] * guard + ["--mirror"] * mirror
        started = time.monotonic()
        with Path(folder, "stderr").open("w+", errors="replace") as stderr:
            # A session of its own: whatever the trigger forked or started ends with it.
            child = subprocess.Popen(command, env=environment, stdout=stderr, stderr=stderr, start_new_session=True)
            try:
                status: int | None = child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            stderr.seek(0)
            said = stderr.read()
        known: dict[str, Any] = {}
        for line in report.read_text().splitlines():
            known.update(json.loads(line))
    known["wall_s"] = round(time.monotonic() - started, 2)
    if status is None:
        how = f"hung: not finished after {timeout_s:g} s"
        return Iteration(**known | {"ended": "hung", "occurred": how, "stacks": said})
    if "ended" in known:
        return Iteration(**known | {"stacks": said})
    if status < 0:
        how = f"crashed: killed by {signal.Signals(-status).name}"
    else:
        how = f"ended with exit status {status}: {(said.strip().splitlines() or ['nothing said'])[-1]}"
    return Iteration(**known | {"ended": "crashed", "occurred": how, "stacks": said})


def _child(hazard: Hazard, report: Path, *, guard: bool, mirror: bool, timeout_s: float) -> None:
    """The child's side: tells what it learns line by line, so that a crash loses only what was not yet known."""
    # Slightly before the parent kills this process: then the stacks of all threads say where it hangs.
    faulthandler.dump_traceback_later(max(1.0, timeout_s - 2.0))

    def tell(**known: object) -> None:
        with report.open("a") as file:
            file.write(json.dumps(known) + "\n")

    import torch

    affected = hazard.affected()
    tell(torch=torch.__version__, affected=affected.yes, because=affected.because)
    if not affected.runnable:
        tell(ended="cannot run")
    else:
        if guard:
            import compile_guard

            compile_guard.install(mode="record")
        original_call = torch.nn.Module.__call__
        if mirror:
            hazard.mirror()
        else:
            tell(occurred=hazard.trigger())
        if guard:
            findings = [{"code": found.code, "text": str(found)} for found in compile_guard.findings()]
            tell(findings=findings)
            tell(unhealthy=_unhealthy(original_call))
        tell(ended="finished")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's exit: a thread that a hazard left behind could hang it, which says nothing more.
    os._exit(0)


def _unhealthy(original_call: object) -> list[str]:
    """What does not work any more in this process; each sentence is one broken thing."""
    import torch
    import torch._dynamo.convert_frame as convert_frame
    import torch.fx._symbolic_trace as symbolic_trace

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    broken = []
    if symbolic_trace.is_fx_symbolic_tracing() or getattr(symbolic_trace, "_is_fx_tracing_flag", False):
        broken.append("the FX flag is set, though nothing traces")
    if torch.compiler.is_compiling():
        broken.append("torch.compiler.is_compiling() is True, though nothing compiles")
    if torch.nn.Module.__call__ is not original_call:
        broken.append("nn.Module.__call__ is not the function it was before")
    x = torch.ones(2, 2)
    compiled: Callable[[torch.Tensor], torch.Tensor] = torch.compile(plain, backend="eager")
    checks: dict[str, Callable[[], object]] = {
        "a compiled call": lambda: [compiled(x) for _ in range(2)],
        "nn.Linear's forward": lambda: torch.nn.Linear(2, 2)(x),
        "symbolic_trace": lambda: torch.fx.symbolic_trace(plain),
    }
    for what, check in checks.items():
        try:
            check()
        except (RuntimeError, NameError, AssertionError, TypeError, AttributeError) as error:
            broken.append(f"{what} fails: {type(error).__name__}: {error}")

    def take_lock() -> bool:
        taken: bool = convert_frame.compile_lock.acquire(timeout=5)
        if taken:
            convert_frame.compile_lock.release()
        return taken

    if not _threads.run_threads(asker=take_lock)["asker"]:
        broken.append("the compile lock is not free")
    return broken


def standalone(hazard: Hazard) -> str:
    """The trigger as one self-contained file for a bug report: plain torch, nothing of this package."""
    module = inspect.getmodule(hazard.trigger)
    assert module is not None
    source = inspect.getsource(module)
    statements: dict[str, ast.stmt] = {}
    imports = []
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            statements[statement.name] = statement
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            statements[statement.targets[0].id] = statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            text = ast.get_source_segment(source, statement) or ""
            if "compile_guard" not in text and "__future__" not in text:
                imports.append(text)
    needed = {"trigger"}
    todo = ["trigger"]
    while todo:
        used = {node.id for node in ast.walk(statements[todo.pop()]) if isinstance(node, ast.Name)}
        new = (used & statements.keys()) - needed
        needed |= new
        todo += sorted(new)

    def text_of(statement: ast.stmt) -> str:
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        return "\n".join(source.splitlines()[first - 1 : statement.end_lineno])

    # `from __future__` must come first, hence the text of `_threads` before anything of the entry's own.
    about = [f"{hazard.title} ({hazard.id} of compile_guard's catalogue).", hazard.symptom, hazard.mechanism]
    head = "\n\n".join(textwrap.fill(paragraph, 118) for paragraph in about)
    threads = inspect.getsource(_threads).split('"""', 2)[2].strip("\n")
    entry = ["\n".join(line for line in imports if line not in threads.splitlines())]
    entry += [text_of(statement) for name, statement in statements.items() if name in needed]
    tail = 'if __name__ == "__main__":\n    print(trigger() or "did not occur")\n'
    return f'"""{head}\n"""\n\n' + "\n\n\n".join([threads, *filter(None, entry), tail])


def _sentence(hazard: Hazard, result: Iteration) -> str:
    """What one iteration showed, for a reader who knows nothing of the catalogue."""
    if result.ended == "cannot run":
        return f"could not run here: {result.because}"
    parts = []
    if result.occurred is not None:
        parts.append(f"OCCURRED: {result.occurred}")
    elif result.affected:
        parts.append("did not occur")
    else:
        parts.append(f"did not occur; not affected: {result.because}")
    parts += [f"UNHEALTHY: {what}" for what in result.unhealthy]
    if result.occurred is not None and result.exit_code(hazard) == SAFE:
        parts.append(f"{hazard.outcome} by the guard's finding, and the process is healthy")
    return "; ".join(parts)


def run_entry(hazard: Hazard, arguments: argparse.Namespace) -> int:
    """Run one entry as asked on the command line, and print what happened."""
    results = []
    for number in range(1, arguments.iterations + 1):
        result = run_once(hazard, guard=arguments.guard, mirror=arguments.mirror, timeout_s=arguments.timeout)
        results.append(result)
        if arguments.json:
            continue
        how = "with the guard" if arguments.guard else "without the guard"
        what = f"{hazard.id} {hazard.name} {number}/{arguments.iterations}, torch {result.torch}, {how}"
        print(f"{what}: {_sentence(hazard, result)}")
        for found in result.findings:
            print(found["text"])
        if result.stacks and result.exit_code(hazard) == OCCURRED:
            print(result.stacks, file=sys.stderr)
        sys.stdout.flush()
    codes = {result.exit_code(hazard) for result in results}
    code = next(code for code in (OCCURRED, CANNOT_RUN, SAFE) if code in codes)
    if arguments.json:
        iterations = [asdict(result) | {"exit": result.exit_code(hazard)} for result in results]
        asked = {"id": hazard.id, "name": hazard.name, "guard": arguments.guard}
        print(json.dumps(asked | {"exit": code, "iterations": iterations}))
    return code


def run_table(arguments: argparse.Namespace) -> int:
    """Run every entry without and with the guard, and print the table that docs/hazards.md shows for this torch."""

    def both(hazard: Hazard) -> tuple[Hazard, Iteration, Iteration]:
        print(f"running {hazard.id} {hazard.name}", file=sys.stderr)
        bare = run_once(hazard, timeout_s=arguments.timeout)
        return hazard, bare, run_once(hazard, guard=True, timeout_s=arguments.timeout)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        rows = list(pool.map(both, catalogue().values()))
    if arguments.json:
        entries = [
            {
                "id": hazard.id,
                "name": hazard.name,
                "affected": bare.affected,
                "bare": _cell(hazard, bare),
                "guarded": _cell(hazard, guarded),
            }
            for hazard, bare, guarded in rows
        ]
        print(json.dumps({"torch": rows[0][1].torch, "machine": machine(), "entries": entries}, indent=1))
    else:
        versions = {bare.torch for _, bare, _ in rows}
        print(f"torch {', '.join(sorted(versions))}\n")
        print("| id | hazard | script | affected | without the guard | with the guard |")
        print("|---|---|---|---|---|---|")
        for hazard, bare, guarded in rows:
            affected = {True: "yes", False: "no", None: "?"}[bare.affected]
            cells = [hazard.id, hazard.title, f"`repro/{hazard.name}.py`", affected]
            print(f"| {' | '.join([*cells, _cell(hazard, bare), _cell(hazard, guarded)])} |")
    return max((guarded.exit_code(hazard) == OCCURRED for hazard, _, guarded in rows), default=False)


def _cell(hazard: Hazard, result: Iteration) -> str:
    if result.ended == "cannot run":
        return "not run (needs other hardware)"
    if result.unhealthy:
        return "process unhealthy"
    if result.occurred is None:
        return "safe"
    if result.exit_code(hazard) == SAFE:
        return hazard.outcome
    return {"finished": "occurs", "crashed": "crash", "hung": "hang"}.get(result.ended, result.ended)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of every script in `repro/` and of `python -m compile_guard.hazards`."""
    parser = argparse.ArgumentParser(
        prog="compile_guard.hazards",
        description="Make one hazard of torch.compile in threads happen, in a process of its own.",
        epilog="Exit status: 0 safe, 1 the hazard occurred, 2 could not run here.",
    )
    parser.add_argument("name", nargs="?", help="entry of the catalogue; none with --table or --list")
    parser.add_argument("--guard", action="store_true", help="install compile_guard in the child first")
    parser.add_argument("--iterations", type=int, default=1, metavar="N", help="child processes to run (1)")
    parser.add_argument("--timeout", type=float, default=90.0, metavar="S", help="seconds a child may take (90)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--standalone", action="store_true", help="print the trigger as one self-contained file")
    parser.add_argument("--mirror", action="store_true", help="run the correct program of the same shape instead")
    parser.add_argument("--table", action="store_true", help="run all entries, bare and guarded; print a table")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="entries to run at a time, with --table (1)")
    parser.add_argument(
        "--document", type=Path, nargs="+", metavar="FILE", help="print docs/hazards.md from --table --json files"
    )
    parser.add_argument("--list", action="store_true", help="print ids, names and titles of all entries")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    entries = catalogue()
    if options.list:
        for hazard in entries.values():
            print(f"{hazard.id:4}{hazard.name:20}{hazard.title}")
        return SAFE
    if options.document is not None:
        print(document(options.document), end="")
        return SAFE
    if options.table:
        return run_table(options)
    if options.name not in entries:
        parser.error(f"no entry named {options.name!r}; there are: {', '.join(entries)}")
    if options.iterations < 1:
        parser.error(f"--iterations must be at least 1, got {options.iterations}")
    hazard = entries[options.name]
    if options.standalone:
        print(standalone(hazard), end="")
        return SAFE
    if options.child is not None:
        _child(hazard, options.child, guard=options.guard, mirror=options.mirror, timeout_s=options.timeout)
    return run_entry(hazard, options)
