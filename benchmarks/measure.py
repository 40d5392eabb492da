"""What the benchmarks share: timing on a CUDA device, peak memory, the environment beside the figures, JSON and markdown."""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


@dataclass
class Timing:
    """Milliseconds of each round, after the warm-up, and what the rounds took beyond what was allocated before."""

    rounds: list[float] = field(default_factory=list)
    first_ms: float = 0.0
    """The first call: compiles are in it."""
    extra_gib: float = 0.0
    peak_gib: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def spread(self) -> float:
        """Half the distance from the fastest round to the slowest, over the median."""
        return (max(self.rounds) - min(self.rounds)) / 2 / self.median

    def as_dict(self) -> dict[str, float]:
        return {
            "ms": round(self.median, 3),
            "spread": round(self.spread, 4),
            "first_ms": round(self.first_ms, 1),
            "extra_gib": round(self.extra_gib, 3),
            "peak_gib": round(self.peak_gib, 3),
        }


def time_cuda(call: Callable[[], Any], *, warm_ups: int = 2, rounds: int = 7, limit_s: float = 20.0) -> Timing:
    """Time `call` round by round with CUDA events; ends after `rounds`, or once `limit_s` is spent and a round is measured.

    The memory is that of the rounds after the warm-up, so that what compiling takes is not in it.
    """
    timing = Timing()
    began = time.perf_counter()
    for number in range(warm_ups):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if number == 0:
            timing.first_ms = 1e3 * (time.perf_counter() - start)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(rounds):
        start_event, end_event = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start_event.record()
        call()
        end_event.record()
        end_event.synchronize()
        timing.rounds.append(start_event.elapsed_time(end_event))
        if time.perf_counter() - began > limit_s:
            break
    peak = torch.cuda.max_memory_allocated()
    timing.peak_gib, timing.extra_gib = peak / GIB, (peak - before) / GIB
    return timing


def environment() -> dict[str, str]:
    """Command, card and versions, to stand beside the figures."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("triton", "transformers", "liger_kernel", "specforge"):
        module = sys.modules.get(name)
        if module is not None and getattr(module, "__version__", None):
            versions[name] = str(module.__version__)
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    command = " ".join(["python -m", spec.name if spec else sys.argv[0], *sys.argv[1:]])
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"command": command, "card": card, **versions, "date": time.strftime("%Y-%m-%d")}


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table for RESULTS.md."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: str | None, result: dict[str, Any]) -> None:
    """Write the figures where asked, with the environment."""
    if path:
        Path(path).write_text(json.dumps({"environment": environment(), **result}, indent=1), "utf-8")
