"""The signals that end a run."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class StopSignals:
    """SIGTERM and SIGINT: the first asks the run to save and end, a second one leaves at once."""

    def __init__(self) -> None:
        self.received = 0
        """Number of the signal, 0 for none."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            os._exit(128 + number)
        self.received = number
