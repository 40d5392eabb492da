"""Options of `compile-guard stress`; importing them imports no torch."""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from compile_guard.stress.decorator import FOLDER


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """The options of the command."""
    verb.add_argument("target", nargs="?", metavar="MODULE:FUNCTION", help="a function of yours (none: the guard's programs)")
    verb.add_argument("--schedules", type=int, default=1000, metavar="N", help="distinct schedules to run (1000)")
    verb.add_argument("--minutes", type=float, default=inf, metavar="M", help="end after so long, with what was run by then")
    verb.add_argument("--seed", type=int, default=0, metavar="S", help="other schedules for another seed (0)")
    verb.add_argument("--threads", type=int, default=4, metavar="N", help="threads that call FUNCTION (4)")
    verb.add_argument("--replay", type=Path, metavar="FILE", help="run a saved schedule again, in a process of its own")
    verb.add_argument("--tries", type=int, default=1, metavar="N", help="how often to replay it (1)")
    verb.add_argument("--unguarded", action="store_true", help="without the guard, each schedule in a process of its own")
    verb.add_argument("--save", type=Path, default=FOLDER, metavar="DIR", help=f"where failures are saved ({FOLDER})")
    verb.add_argument("--json", action="store_true", help="print the outcome as JSON")
