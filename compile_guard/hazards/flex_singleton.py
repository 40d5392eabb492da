"""F2: transformers keeps one compiled flex_attention for all threads, and makes it anew when `training` changes."""

from __future__ import annotations

import importlib.util
import threading
from typing import Any

from compile_guard.hazards._hazard import Affected, Hazard
from compile_guard.hazards._threads import run_threads, wait

NUM_TURNS = 4


def affected() -> Affected:
    if importlib.util.find_spec("transformers") is None:
        return Affected(True, "transformers is not installed here", runnable=False)
    from transformers.integrations import flex_attention

    if hasattr(flex_attention, "WrappedFlexAttention"):
        return Affected(True, "`WrappedFlexAttention` of transformers is one object for all threads, with no lock")
    return Affected(False, "this transformers has no `WrappedFlexAttention`")


def count_wrappers(*, evaluate_between: bool) -> int:
    """A thread that trains and one that evaluates ask in turn for the compiled function; how many different ones are made?"""
    from transformers.integrations.flex_attention import WrappedFlexAttention

    turns = [threading.Event() for _ in range(2 * NUM_TURNS + 1)]
    turns[0].set()
    seen: list[Any] = []

    def ask(training: bool, first_turn: int) -> None:
        for turn in range(first_turn, 2 * NUM_TURNS, 2):
            wait(turns[turn])
            if training or evaluate_between:
                seen.append(WrappedFlexAttention(training)())
            turns[turn + 1].set()

    run_threads(trainer=lambda: ask(True, 0), evaluator=lambda: ask(False, 1))
    return len({id(each) for each in seen})


def trigger() -> str | None:
    num_made = count_wrappers(evaluate_between=True)
    if num_made == 1:
        return None
    return (
        f"a thread that trains and one that evaluates asked {2 * NUM_TURNS} times for the compiled flex_attention of "
        f"transformers: torch.compile was called {num_made} times"
    )


def mirror() -> None:
    num_made = count_wrappers(evaluate_between=False)
    if num_made != 1:
        raise AssertionError(f"one thread that trains was given {num_made} compiled functions")


HAZARD = Hazard(
    id="F2",
    name="flex_singleton",
    title="One compiled flex_attention of transformers for all threads, made anew at each switch",
    symptom=(
        "Steps that are slow where a training and an evaluating thread take turns; the recompile limit reached after a few "
        "devices and shapes, and flex_attention running eager from then on (13 GiB of scores instead of 33 MiB)."
    ),
    mechanism=(
        "`WrappedFlexAttention` is a singleton without a lock: `training` other than the last caller's makes it call "
        "`torch.compile(flex_attention)` again, for every thread. The compiled versions hang on one code object, whose "
        "limit all devices, shapes and modes share (B1)."
    ),
    links=("transformers#41782", "axolotl#2363"),
    affected=affected,
    trigger=trigger,
    mirror=mirror,
    seams=("transformers_flex",),
    finding="flex-singleton",
    fix="Install the guard; or register an attention function of your own for each device (`ALL_ATTENTION_FUNCTIONS`).",
)
