"""Who runs next: a seeded random walk, priorities that change (PCT), few preemptions, or what a file says.

PCT: Burckhardt et al., "A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs", ASPLOS 2010. Few preemptions:
Musuvathi and Qadeer, "Iterative Context Bounding for Systematic Testing of Multithreaded Programs", PLDI 2007.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol


class Strategy(Protocol):
    """Chooses among the threads that can run, by their numbers."""

    def choose(self, step: int, current: int | None, runnable: Sequence[int]) -> int:
        """The thread to run next.

        Args:
            step: yield points passed so far, of all threads.
            current: the thread that is at a yield point, None where it can not go on.
            runnable: at least two threads, in order.
        """


class RandomWalk:
    """Each of the threads is as likely as the next, at every point."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, step: int, current: int | None, runnable: Sequence[int]) -> int:
        return self._random.choice(runnable)


class Priorities:
    """The thread of the highest priority runs; at few points, chosen beforehand, the running thread falls behind all others."""

    def __init__(self, seed: int, num_threads: int, length: int, num_changes: int = 4) -> None:
        chooser = random.Random(seed)
        self._priority = list(range(num_threads))
        chooser.shuffle(self._priority)
        self._changes = sorted(chooser.sample(range(max(length, num_changes)), num_changes))

    def choose(self, step: int, current: int | None, runnable: Sequence[int]) -> int:
        while self._changes and step >= self._changes[0]:
            del self._changes[0]
            if current is not None:
                self._priority[current] = min(self._priority) - 1
        return max(runnable, key=self._priority.__getitem__)


class FewPreemptions:
    """A thread runs until it waits or ends, but for a few points, chosen beforehand, where any other goes on."""

    def __init__(self, seed: int, length: int, num_preemptions: int = 3) -> None:
        self._random = random.Random(seed)
        self._at = sorted(self._random.sample(range(max(length, num_preemptions)), num_preemptions))

    def choose(self, step: int, current: int | None, runnable: Sequence[int]) -> int:
        others = [number for number in runnable if number != current]
        if current is None:
            return self._random.choice(runnable)
        if self._at and step >= self._at[0]:
            del self._at[0]
            return self._random.choice(others)
        return current


class Diverged(RuntimeError):
    """A replay came to a decision that its file does not have: the program no longer does what it did."""


class Replay:
    """What was chosen before, in order."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = iter(choices)

    def choose(self, step: int, current: int | None, runnable: Sequence[int]) -> int:
        choice = next(self._choices, None)
        if choice is None:  # the recorded run ended here, by its failure
            return runnable[0] if current is None else current
        if choice not in runnable:
            raise Diverged(f"at step {step} thread {choice} ran, which can not now; those that can: {list(runnable)}")
        return choice


STRATEGIES = ("walk", "priorities", "few")


def strategy(name: str, seed: int, num_threads: int, length: int) -> Strategy:
    """A strategy by its name.

    Args:
        length: yield points that the program passes when run in one thread, about.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "walk":
        return RandomWalk(seed)
    if name == "priorities":
        return Priorities(seed, num_threads, length)
    if name == "few":
        return FewPreemptions(seed, length)
    raise ValueError(f"strategy {name!r} is none of {', '.join(STRATEGIES)}")
