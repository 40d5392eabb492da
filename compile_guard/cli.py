"""The command `compile-guard`, also `python -m compile_guard`.

Exit status: 0 clean, 1 findings, 2 could not run; `run` exits with the program's own, and with 1 where a finding happened
in mode `raise`. Data goes to stdout, talk to stderr.
"""

from __future__ import annotations

import argparse
import builtins
import json
import os
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

from compile_guard import __version__, events
from compile_guard.findings import MODES, FindingError, findings, mode_from_environment
from compile_guard.install import install
from compile_guard.report import text
from compile_guard.report.environment import environment
from compile_guard.stress import options as stress_options
from compile_guard.tracing import TRACE_LOCK

CLEAN, FINDINGS, CANNOT_RUN = 0, 1, 2


def run(script: str, arguments: list[str], *, mode: str, report: Path | None, trace: Path | None) -> int:
    """Run an unmodified program under the guard and report at its end; returns the status to exit with."""
    path = Path(script)
    if not path.is_file():
        print(
            f"compile-guard: {script} is not a file; give the program to run as `compile-guard run script.py args…`",
            file=sys.stderr,
        )
        return CANNOT_RUN
    if report is not None and not report.parent.is_dir():
        print(f"compile-guard: --report {report}: the folder {report.parent} does not exist", file=sys.stderr)
        return CANNOT_RUN
    if report is not None and report.is_dir():
        print(f"compile-guard: --report {report} is a folder; name a file in it", file=sys.stderr)
        return CANNOT_RUN
    if trace is not None and next(trace.glob("*.ndjson"), None) is not None:
        print(f"compile-guard: --trace {trace} holds the log of an earlier run; name another folder", file=sys.stderr)
        return CANNOT_RUN
    if trace is not None:
        os.environ[events.VARIABLE] = str(trace.absolute())  # the program may change its folder, or start others
    # In the environment, so that an `install(mode=…)` of the program's own does not change what was asked for here.
    os.environ["COMPILE_GUARD"] = mode
    install()
    sys.argv = [script, *arguments]
    sys.path[0] = str(path.resolve().parent)
    status = _status_of(path.absolute())
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()  # as the interpreter does when a program's main thread ends
    found = findings()
    if status == CLEAN and mode == "raise" and any(not finding.prevented for finding in found):
        status = FINDINGS
    sys.stdout.flush()
    print(text.as_text(found, TRACE_LOCK, status), file=sys.stderr)
    if report is not None:
        render = text.as_json if report.suffix == ".json" else text.as_text
        report.write_text(render(found, TRACE_LOCK, status), encoding="utf-8")
    return status


def _status_of(script: Path) -> int:
    """Run the script as the main program; its exit status, as the interpreter would give it.

    Its module stays `__main__`: threads that outlive its last line look there for their classes.
    """
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(script), __builtins__=builtins)
    sys.modules["__main__"] = module
    try:
        exec(compile(script.read_bytes(), str(script), "exec"), module.__dict__)
    except SystemExit as ended:
        if ended.code is None:
            return CLEAN
        if isinstance(ended.code, int):
            return ended.code
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return 130
    except BaseException as error:
        if not isinstance(error, FindingError):
            _print_without_our_frames(error, str(script))
        else:
            print(error, file=sys.stderr)
        return 1
    return CLEAN


def _print_without_our_frames(error: BaseException, script: str) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace or error.__traceback__)


def report(folder: Path, out: Path, *, overwrite: bool, profile: Path | None) -> int:
    """Write the report of a run from its event logs; 1 where a finding happened."""
    from compile_guard.report import event_log
    from compile_guard.report import folder as report_folder

    try:
        report_folder.check(out, overwrite=overwrite)
        logged = event_log.read(folder)
        report_folder.write(logged, out, profile)
    except (ValueError, OSError) as error:
        print(f"compile-guard: {error}", file=sys.stderr)
        return CANNOT_RUN
    print(text.of_run(logged), end="")
    print(f"written: {out / 'index.html'}, report.txt, events, timeline.trace.json (for ui.perfetto.dev)", file=sys.stderr)
    return FINDINGS if any(not finding.prevented for finding in logged.findings()) else CLEAN


def doctor(*, as_json: bool, only: Sequence[str], quick: bool) -> int:
    """Run the hazards without and with the guard and say what came of it; 1 where one is open."""
    from compile_guard import doctor as clinic

    try:
        diagnoses = clinic.diagnose(clinic.chosen(only), quick=quick)
    except (ValueError, OSError) as error:
        print(f"compile-guard: {error}", file=sys.stderr)
        return CANNOT_RUN
    if as_json:
        print(json.dumps(clinic.as_dict(diagnoses, environment()), indent=1))
    else:
        clinic.show(diagnoses, environment())
    return FINDINGS if any(diagnosis.verdict == "open" for diagnosis in diagnoses) else CLEAN


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="compile-guard", description="Make torch.compile safe in threads, and show where it is not."
    )
    parser.add_argument("--version", action="version", version=f"compile-guard {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("run", help="run an unmodified program under the guard, and report at its end")
    verb.add_argument("--mode", choices=MODES, help="what becomes of findings (what COMPILE_GUARD says, else warn)")
    verb.add_argument("--report", type=Path, metavar="FILE", help="write the report here too; as JSON where FILE ends in .json")
    verb.add_argument("--trace", type=Path, metavar="DIR", help="log events into this folder, for `compile-guard report`")
    verb.add_argument("script", help="the program")
    verb.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments: all that follows the program")
    verb = verbs.add_parser("report", help="text, HTML and a timeline of a run that logged its events")
    verb.add_argument("run", type=Path, metavar="RUN", help="the folder that --trace or COMPILE_GUARD_TRACE named")
    verb.add_argument("-o", dest="out", type=Path, metavar="DIR", default=Path("cg_out"), help="folder to write (cg_out)")
    verb.add_argument("--overwrite", action="store_true", help="replace the report that is in DIR")
    verb.add_argument("--merge", type=Path, metavar="FILE", help="put the timeline into this trace of torch.profiler")
    verb = verbs.add_parser("doctor", help="which hazards has this torch, and what does the guard do about each")
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--only", action="append", default=[], metavar="ID", help="this hazard, by id or name; may be repeated")
    verb.add_argument("--quick", action="store_true", help="ask the feature tests only, run nothing")
    verb = verbs.add_parser("stress", help="run threaded programs, the guard's or yours, under schedules that are explored")
    stress_options.add_arguments(verb)
    options = parser.parse_args(arguments)
    if options.verb == "report":  # needs no torch
        return report(options.run, options.out, overwrite=options.overwrite, profile=options.merge)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"compile-guard: torch cannot be imported ({error}); install it in this environment first", file=sys.stderr)
        return CANNOT_RUN
    if options.verb == "run":
        try:
            mode = options.mode or mode_from_environment("warn")
        except ValueError as error:
            print(f"compile-guard: {error}", file=sys.stderr)
            return CANNOT_RUN
        return run(options.script, options.arguments, mode=mode, report=options.report, trace=options.trace)
    if options.verb == "stress":
        from compile_guard.stress import command

        return command.run(options)
    return doctor(as_json=options.json, only=options.only, quick=options.quick)
