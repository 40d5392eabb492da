"""Runs entries of the catalogue, each iteration in a process of its own, since several crash, hang or brick it.

Every script of `repro/` is this runner with a name. The parent needs no torch: the child tells what it found.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from compile_guard.hazards import _threads
from compile_guard.hazards._diagnosing import diagnosing
from compile_guard.hazards._document import document, machine
from compile_guard.hazards._hazard import Hazard, catalogue
from compile_guard.hazards._nursery import Nursery, serve
from compile_guard.hazards._standalone import standalone

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

    def cell(self, hazard: Hazard) -> str:
        """What happened, in a word for a table."""
        if self.ended == "cannot run":
            return "not run (needs other hardware)"
        if self.unhealthy:
            return "process unhealthy"
        if self.occurred is None:
            return "safe"
        if self.exit_code(hazard) == SAFE:
            return hazard.outcome
        return {"finished": "occurs", "crashed": "crash", "hung": "hang"}.get(self.ended, self.ended)


Verdict = Literal["unaffected", "prevented", "detected", "open"]
ATTEMPTS = 3
"""Runs without the guard until an affected torch shows a hazard: what a use after free meets is not forced by any order."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One hazard, run without the guard and with it."""

    hazard: Hazard
    bare: Iteration
    guarded: Iteration
    """The first that was not safe, else the first."""
    num_guarded: int = 1
    num_safe: int = 1

    @property
    def verdict(self) -> Verdict:
        """What the guard does about it here; `unaffected` also where the machine lacks what it takes."""
        if self.bare.ended == "cannot run" or (self.bare.affected is False and self.bare.occurred is None):
            return "unaffected"
        if self.guarded.exit_code(self.hazard) != SAFE:
            return "open"
        return "prevented" if self.guarded.occurred is None else "detected"


def child_environment() -> dict[str, str]:
    """What a child process finds in its environment."""
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    # The switch of this run is --guard, whatever the shell that it was started from has set.
    for switch in ("COMPILE_GUARD", "COMPILE_GUARD_TRACE", "COMPILE_GUARD_SUPPRESSIONS"):
        environment.pop(switch, None)
    # glibc overwrites what is freed: a use after free shows at once, and not by chance.
    environment.setdefault("MALLOC_PERTURB_", "165")
    return environment


def run_once(
    hazard: Hazard,
    *,
    guard: bool = False,
    mirror: bool = False,
    timeout_s: float = 90.0,
    nursery: Nursery | None = None,
) -> Iteration:
    """Run a hazard's trigger (or its mirror program) once, in a child process, and say what became of it.

    With `mirror`, an exception of the program is an occurrence; findings are for the caller to judge. The child is a fresh
    Python, or forked from `nursery`.
    """
    with tempfile.TemporaryDirectory(prefix="compile_guard_") as folder:
        report = Path(folder, "report.ndjson")
        report.touch()
        output = Path(folder, "output")
        output.touch()
        arguments = [hazard.name, "--child", str(report), "--timeout", str(timeout_s)]
        arguments += ["--guard"] * guard + ["--mirror"] * mirror
        started = time.monotonic()
        if nursery is None or hazard.environment:
            status = _run_fresh(arguments, output, timeout_s, child_environment() | hazard.environment)
        else:
            status = nursery.run(arguments, output, timeout_s)
        said = output.read_text(errors="replace")
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


def _run_fresh(arguments: Sequence[str], output: Path, timeout_s: float, environment: dict[str, str]) -> int | None:
    """As `Nursery.run`, in a Python of its own."""
    command = [sys.executable, "-X", "faulthandler", "-m", "compile_guard.hazards", *arguments]
    with output.open("ab") as file:
        # A session of its own: whatever the trigger forked or started ends with it.
        child = subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
        try:
            return child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


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


def run_pairs(
    hazards: Sequence[Hazard],
    *,
    jobs: int,
    timeout_s: float,
    progress: Callable[[int, int, Hazard], None],
    num_guarded: int = 1,
) -> list[Pair]:
    """Run hazards without and with the guard, `jobs` at a time, in children forked from warm parents where that is safe.

    Args:
        progress: called as (number done, number of all, hazard just done), in the thread that ran it.
        num_guarded: runs of each with the guard.

    Raises:
        ChildProcessError: a warm parent died.
    """
    done = itertools.count(1)
    with contextlib.ExitStack() as stack:
        nurseries: queue.SimpleQueue[Nursery | None] = queue.SimpleQueue()
        for _ in range(jobs):
            can_fork = sys.platform == "linux"
            nurseries.put(stack.enter_context(Nursery(child_environment())) if can_fork else None)

        def both(hazard: Hazard) -> Pair:
            nursery = nurseries.get()
            try:
                for _ in range(ATTEMPTS):
                    bare = run_once(hazard, timeout_s=timeout_s, nursery=nursery)
                    if not bare.affected or bare.occurred is not None or bare.ended == "cannot run":
                        break
                guarded = [bare]
                if bare.ended != "cannot run":
                    guarded = [run_once(hazard, guard=True, timeout_s=timeout_s, nursery=nursery) for _ in range(num_guarded)]
                progress(next(done), len(hazards), hazard)
                unsafe = [result for result in guarded if result.exit_code(hazard) == OCCURRED]
                return Pair(hazard, bare, [*unsafe, *guarded][0], len(guarded), len(guarded) - len(unsafe))
            finally:
                nurseries.put(nursery)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(both, hazards))


def show_progress(number: int, num_hazards: int, hazard: Hazard) -> None:
    """One line on stderr, rewritten where that is a terminal."""
    line = f"{number}/{num_hazards} {hazard.id} {hazard.name}"
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}" + "\r\x1b[K" * (number == num_hazards), end="", file=sys.stderr, flush=True)
    else:
        print(line, file=sys.stderr, flush=True)


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
    rows = run_pairs(
        list(catalogue().values()),
        jobs=arguments.jobs,
        timeout_s=arguments.timeout,
        progress=show_progress,
        num_guarded=arguments.iterations,
    )
    if arguments.json:
        entries = [
            {
                "id": pair.hazard.id,
                "name": pair.hazard.name,
                "affected": pair.bare.affected,
                "bare": pair.bare.cell(pair.hazard),
                "guarded": pair.guarded.cell(pair.hazard),
                "guarded_runs": pair.num_guarded,
                "guarded_safe": pair.num_safe,
                **({} if pair.verdict != "open" else {"fault": asdict(pair.guarded)}),
            }
            for pair in rows
        ]
        print(json.dumps({"torch": rows[0].bare.torch, "machine": machine(), "entries": entries}, indent=1))
    else:
        versions = {pair.bare.torch for pair in rows}
        print(f"torch {', '.join(sorted(versions))}\n")
        print("| id | hazard | script | affected | without the guard | with the guard |")
        print("|---|---|---|---|---|---|")
        for pair in rows:
            affected = {True: "yes", False: "no", None: "?"}[pair.bare.affected]
            cells = [pair.hazard.id, pair.hazard.title, f"`repro/{pair.hazard.name}.py`", affected]
            runs = f" {pair.num_safe}/{pair.num_guarded}" * (pair.num_guarded > 1)
            print(f"| {' | '.join([*cells, pair.bare.cell(pair.hazard), pair.guarded.cell(pair.hazard) + runs])} |")
    return OCCURRED if any(pair.verdict == "open" for pair in rows) else SAFE


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line of every script in `repro/` and of `python -m compile_guard.hazards`."""
    parser = argparse.ArgumentParser(
        prog="compile_guard.hazards",
        description="Make one hazard of torch.compile in threads happen, in a process of its own.",
        epilog="Exit status: 0 safe, 1 the hazard occurred, 2 could not run here.",
    )
    parser.add_argument("name", nargs="?", help="entry of the catalogue; none with --table or --list")
    parser.add_argument("--guard", action="store_true", help="install compile_guard in the child first")
    parser.add_argument("--iterations", type=int, default=1, metavar="N", help="runs; with --table, those with the guard (1)")
    parser.add_argument("--timeout", type=float, default=90.0, metavar="S", help="seconds a child may take (90)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--standalone", action="store_true", help="print the trigger as one self-contained file")
    parser.add_argument("--mirror", action="store_true", help="run the correct program of the same shape instead")
    parser.add_argument("--table", action="store_true", help="run all entries, bare and guarded; print a table")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="entries to run at a time, with --table (1)")
    parser.add_argument(
        "--document", type=Path, nargs="+", metavar="FILE", help="print docs/hazards.md from --table --json files"
    )
    parser.add_argument("--diagnosing", action="store_true", help="print docs/diagnosing.md")
    parser.add_argument("--list", action="store_true", help="print ids, names and titles of all entries")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--nursery", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.nursery:
        serve(main)
        return SAFE
    entries = catalogue()
    if options.list:
        for hazard in entries.values():
            print(f"{hazard.id:4}{hazard.name:20}{hazard.title}")
        return SAFE
    if options.document is not None:
        print(document(options.document), end="")
        return SAFE
    if options.diagnosing:
        print(diagnosing(), end="")
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
