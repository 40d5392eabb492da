"""What the checks of the trainer share: a run with a time limit, what it is judged by, and documents for it."""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dflash_train.chat_tokenizers import Encoded
from dflash_train.config import RunConfig
from dflash_train.data import Documents, ShardWriter
from dflash_train.metrics import read_metrics
from dflash_train.targets import load_target
from dflash_train.trainer import LoadTarget, Outcome, train

SKIPPED = 10
"""First steps, not counted in rates."""
failures: list[str] = []
"""Bounds that did not hold."""


def report(what: str, value: str, holds: bool | None = None) -> None:
    """Print a figure, and whether its bound holds, where it has one."""
    print(f"{what:<84} {value:>26}{'' if holds is None else '   ok' if holds else '   FAILS'}", flush=True)
    if holds is False:
        failures.append(what)


def verdict() -> int:
    """Print which bounds do not hold; the exit status."""
    print(f"\n{len(failures)} bounds do not hold" + "".join(f"\n  {what}" for what in failures), flush=True)
    return 1 if failures else 0


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A run and its figures."""

    outcome: Outcome
    records: list[dict[str, Any]]
    seconds: float
    """With loading and warm-up."""
    warm_up: str
    tok_s: float
    """Tokens of context over time, after the first steps."""
    memory_gib: float
    spent: dict[str, dict[str, float]]
    """Seconds of each thread by kind."""

    def figures(self) -> dict[str, Any]:
        """For the JSON."""
        last = self.records[-1] if self.records else {}
        shown = ("step", "loss", "accept", "target_wait", "drafter_wait", "bad_steps")
        return {
            "tok_s": self.tok_s,
            "seconds": self.seconds,
            "memory_gib": self.memory_gib,
            "findings": list(self.outcome.findings),
            "threads": self.spent,
            **{name: last.get(name) for name in shown},
        }


@contextmanager
def signal_after(seconds: float | None) -> Iterator[None]:
    """Send SIGTERM to the main thread if the block takes longer: the trainer then saves and returns."""
    if seconds is None:
        yield
        return
    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(seconds, lambda: signal.pthread_kill(main, signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def judged_run(
    name: str,
    config: RunConfig,
    folder: Path,
    *,
    limit_s: float | None = None,
    say: Callable[[str], None] | None = None,
    load: LoadTarget = load_target,
) -> Judged:
    """Train, and print what a run is judged by. Past `limit_s` it is ended as by SIGTERM; the steps done then are told."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    print(f"\n{name} …", flush=True)
    began = time.perf_counter()
    lines: list[str] = []

    def note(line: str) -> None:
        lines.append(line)
        if line.startswith(("warmed up", "step ", "target ")):
            print("  " + line[:200], flush=True)
        if say is not None:
            say(line)

    try:
        with signal_after(limit_s):
            outcome = train(config, folder, report=note, load=load)
    except BaseException:
        print("\n".join(lines), file=sys.stderr)
        raise
    records = read_metrics(folder / "metrics.jsonl")
    steady = records[min(SKIPPED, len(records) // 2) :]
    tokens = sum(record["drafter_tok_s"] * record["step_s"] for record in steady)
    spent = json.loads((folder / "summary.json").read_text("utf-8"))["seconds"] if records else {}
    judged = Judged(
        outcome=outcome,
        records=records,
        seconds=time.perf_counter() - began,
        warm_up=next((line for line in lines if line.startswith("warmed up")), "no warm-up"),
        tok_s=tokens / max(1e-9, sum(record["step_s"] for record in steady)),
        memory_gib=torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
        spent=spent,
    )
    judge(judged, config)
    return judged


def judge(run: Judged, config: RunConfig) -> None:
    """Print the figures of a run."""
    for line in ("drafter-", "target-", "reader"):
        for who, seconds in run.spent.items():
            if who.startswith(line):
                total = max(1e-9, sum(seconds.values()))
                print(f"  {who:<10} " + ", ".join(f"{kind} {s:.1f} s ({s / total:.0%})" for kind, s in seconds.items()))
    steps = run.records[-1]["step"] if run.records else 0
    ended = "" if not run.outcome.signal else " (time limit)"
    report(f"  steps done of {config.train.steps}, in {run.seconds:.1f} s{ended}", str(steps), steps > 0)
    report("  tokens a second, drafters (after the first steps)", f"{run.tok_s:,.0f}")
    if run.records:
        last = run.records[-1]
        report("  waiting: drafters, targets", f"{last['drafter_wait']:.0%}, {last['target_wait']:.0%}")
        report("  accepted drafts a block, teacher-forced, of the last step", f"{last['accept']:.2f}")
    report("  peak memory allocated", f"{run.memory_gib:.1f} GiB")
    recompiles = [key for key in run.outcome.findings if key.startswith("sealed:")]
    report("  compiles after the warm-up", str(len(recompiles)), not recompiles)
    others = sorted(set(run.outcome.findings) - set(recompiles))
    report("  other findings that happened", ", ".join(others) or "none", not others)


def write_documents(folder: Path, documents: list[tuple[np.ndarray, int]], vocab_size: int) -> Documents:
    """Prepare a folder of documents: tokens, and how many of the first are a prompt."""
    folder.mkdir(parents=True)
    writer = ShardWriter(folder)
    for tokens, num_prompt in documents:
        writer.add(Encoded(tokens=tokens.astype(np.int32), supervised=np.arange(len(tokens)) >= num_prompt))
    writer.close(tokenizer="none", vocab_size=vocab_size, dropped={}, sources=[])
    return Documents(folder)


def random_documents(count: int, lengths: tuple[int, int], num_prompt: int, vocab_size: int) -> list[tuple[np.ndarray, int]]:
    """Random tokens, lengths drawn from `lengths`, both ends included."""
    random = np.random.Generator(np.random.Philox(key=0))
    drawn = random.integers(lengths[0], lengths[1] + 1, count)
    # Not the first ids, which are padding and the like, nor the last.
    return [(random.integers(8, vocab_size - 8, int(length)), num_prompt) for length in drawn]
