"""What must hold after a program, whatever the schedule: compared with the same program run by one thread after the other."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from compile_guard import entry, waits
from compile_guard.stress.operations import MAY_COMPILE, World
from compile_guard.stress.program import Program
from compile_guard.stress.scheduler import Outcome
from compile_guard.torch_seams.process_state import process_state
from compile_guard.tracing import TRACE_LOCK, num_live_traces

_VARYING = re.compile(r"0x[0-9a-f]+|\b\d+\b")


@dataclass(frozen=True, slots=True)
class Expected:
    """What the sequential run did."""

    results: list[Any]
    num_compiles: int
    num_steps: int


def guard_state() -> dict[str, Any]:
    """What the guard itself keeps while somebody is inside: nothing, between programs."""
    return {
        "the lock's owner": TRACE_LOCK.owner,
        "waiting threads": waits.waiting(),
        "live traces": num_live_traces(),
        "the gate is closed": entry.is_gate_closed(),
    }


def state() -> dict[str, Any]:
    """All that must be after a program what it was before."""
    return process_state() | guard_state()


def problems(
    program: Program, outcome: Outcome, expected: Expected, num_compiles: int, world: World, before: Mapping[str, Any]
) -> Iterator[str]:
    """Each broken invariant, as a line that is the same for the same fault; more text may follow the line."""
    if outcome.hang:
        yield f"hang: {outcome.hang}"
        return
    for number, error in outcome.errors.items():
        yield f"{_in_a_line(error)}\nin thread {number}:\n{''.join(traceback.format_exception(error))}"
    if not outcome.errors:
        for number, (got, wanted) in enumerate(zip(outcome.results, expected.results, strict=True)):
            if got != wanted:
                yield f"results differ\nthread {number} returned {got}\nand alone {wanted}"
        yield from _compiles(program, num_compiles, expected.num_compiles)
        yield from _compiled_still(program, world)
    if len(set(world.draws)) != len(world.draws):
        yield f"a random number was drawn twice\ndraws: {world.draws}"
    after = state()
    for name in before.keys() & after.keys():
        if before[name] != after[name]:
            was, now = _what_differs(before[name], after[name])
            yield f"not pristine: {name}\nwas {was!r}, is {now!r}"


def _what_differs(was: Any, now: Any) -> tuple[Any, Any]:
    """Two values, or of two dicts the items that are not in both."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return was, now
    names = {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}
    return {name: was.get(name) for name in sorted(names)}, {name: now.get(name) for name in sorted(names)}


def has_reset(program: Program) -> bool:
    """Whether functions may be cold again in it."""
    return any("reset" in thread for thread in program.threads)


def _compiled_still(program: Program, world: World) -> Iterator[str]:
    """Each function once more, in one thread."""
    before = world.kit.num_compiles
    try:
        world.call_again()
    except Exception as error:  # a finding, whatever it is
        yield f"afterwards: {_in_a_line(error)}\n{''.join(traceback.format_exception(error))}"
    num = world.kit.num_compiles - before
    if num and not has_reset(program):
        yield f"afterwards a function was compiled again\n{num} compiles"


def _compiles(program: Program, got: int, alone: int) -> Iterator[str]:
    if not has_reset(program):
        # What comes after a graph break is inside a call that has begun: who waits there to compile it cannot begin anew.
        may_repeat = max(0, sum("graph_break" in thread for thread in program.threads) - 1)
        if not alone <= got <= alone + may_repeat:
            yield f"compiled {'more' if got > alone else 'less'} often than alone\n{got} compiles, and {alone} alone"
    elif got > sum(MAY_COMPILE.get(name, 0) for thread in program.threads for name in thread):
        yield f"compiled more often than called\n{got} compiles"


def _in_a_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {_VARYING.sub('N', text[0])[:160] if text else ''}"
