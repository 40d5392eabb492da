"""The live view of a run on a terminal: what each thread does now, its rate, and how much of its time it waits. Needs rich."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dflash_train.crew import Clock
from dflash_train.metrics import StepRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

REFRESHES_A_SECOND = 4
WINDOW_S = 10.0
"""Over which rates are taken."""


def can_show() -> bool:
    """Whether there is a terminal, and rich to draw on it."""
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


@dataclass(frozen=True, kw_only=True)
class Lane:
    """A thread, as a row of the view."""

    clock: Clock
    device: str
    tokens: Callable[[], int]
    """How many it has done."""


class LiveView:
    """A table of the threads, made anew each time it is drawn. It only reads what the threads count anyway."""

    def __init__(self, lanes: Sequence[Lane], latest: Callable[[], StepRecord | None]) -> None:
        self._lanes = lanes
        self._latest = latest
        self._seen: list[deque[tuple[float, int]]] = [deque() for _ in lanes]

    def show(self, console: Console | None = None) -> AbstractContextManager[object]:
        """Draw it while the block runs; what is printed meanwhile stands above it."""
        from rich.console import Console
        from rich.live import Live

        return Live(
            get_renderable=self.table,
            console=console or Console(stderr=True),
            refresh_per_second=REFRESHES_A_SECOND,
            transient=True,
        )

    def table(self) -> Table:
        """One row for each thread, and the last step below."""
        from rich.table import Table

        now = time.perf_counter()
        table = Table(box=None, pad_edge=False, caption=self._caption(), caption_justify="left")
        for name in ("thread", "device", "now"):
            table.add_column(name)
        for name in ("tok/s", "compute", "wait", "copy", "sync"):
            table.add_column(name, justify="right")
        for lane, seen in zip(self._lanes, self._seen, strict=True):
            seen.append((now, lane.tokens()))
            while now - seen[0][0] > WINDOW_S:
                seen.popleft()
            spent = now - seen[0][0]
            rate = f"{(seen[-1][1] - seen[0][1]) / spent:,.0f}" if spent > 0 else ""
            shares = [f"{lane.clock.share(kind):.0%}" for kind in ("compute", "wait", "copy", "sync")]
            table.add_row(lane.clock.name, lane.device, lane.clock.now or "-", rate, *shares)
        return table

    def _caption(self) -> str:
        latest = self._latest()
        if latest is None:
            return "no step is done yet"
        minutes, seconds = divmod(round(latest.eta_s), 60)
        return (
            f"step {latest.step}/{latest.steps}   loss {latest.loss:.4f}   accepted {latest.accept:.2f} (teacher-forced)   "
            f"{minutes}:{seconds:02d} left"
        )
