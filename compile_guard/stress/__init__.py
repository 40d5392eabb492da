"""Schedules of threaded programs, explored and replayed: what a guard is worth, and whether a program of your own is safe.

    @compile_guard.stress.stress(threads=4, iterations=200)
    def test_step():
        train_step(...)

or `compile-guard stress module:function`. Threads run one at a time, and a seeded scheduler decides at each yield point (in
torch's traces and compiles, at its lock, before warm calls, at `point("…")` of your own) which goes on. A schedule that
fails is saved, and runs again exactly.

Importing this package imports no torch.
"""

from compile_guard.stress.decorator import StressError, stress
from compile_guard.stress.points import point

__all__ = ["StressError", "point", "stress"]
