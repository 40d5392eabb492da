"""What a run tells of each step: its figures from the counts and clocks of all threads, to every logger and to a person."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from dflash_train.checkpoint import Progress
from dflash_train.config import RunConfig
from dflash_train.crew import Clock
from dflash_train.metrics import Logger, StepRecord, peak_memory_gib
from dflash_train.replica import learning_rate


class StepLog:
    """Makes the record of each step. Called by one thread at a time.

    Args:
        config: of the run.
        first_step: steps done before.
        clocks: of all threads.
        target_tokens: tokens that each target thread has run, counted on by it.
        devices: whose memory is told.
        loggers: get every record.
        report: told those that a person should read.
    """

    def __init__(
        self,
        config: RunConfig,
        first_step: int,
        clocks: Sequence[Clock],
        target_tokens: Sequence[int],
        devices: Sequence[torch.device],
        loggers: Sequence[Logger],
        report: Callable[[str], None],
    ) -> None:
        self._train = config.train
        self._first_step = first_step
        self._clocks = clocks
        self._target_tokens = target_tokens
        self._devices = devices
        self._loggers = loggers
        self._report = report
        self._began = time.perf_counter()
        self._counted = (0, 0)
        self.step_ended = self._began
        """When the last step ended, of `time.perf_counter`."""
        self.latest: StepRecord | None = None

    def log(
        self,
        progress: Progress,
        sums: Mapping[str, float],
        *,
        tokens: int,
        grad_norm: float,
        epoch: float,
        saved: int,
        tau: float | None,
        last: bool,
    ) -> StepRecord:
        """Record a step that has just ended.

        Args:
            progress: after it.
            sums: `LossSums` of all drafters.
            tokens: on which all drafters have trained since the start.
            grad_norm: of the first drafter.
            epoch: passes over the data.
            saved: step of the last checkpoint.
            tau: of the held-out prompts, if they were decoded.
            last: whether the run ends here.
        """
        now = time.perf_counter()
        spent = max(1e-9, now - self.step_ended)
        self.step_ended = now
        made = sum(self._target_tokens)
        before, self._counted = self._counted, (made, tokens)
        done = progress.step - self._first_step
        record = StepRecord(
            step=progress.step,
            steps=self._train.steps,
            loss=sums["numerator"] / sums["denominator"] if sums["denominator"] else 0.0,
            accept=sums["accepted"] / max(1.0, sums["blocks"]),
            accuracy=sums["correct"] / max(1.0, sums["supervised"]),
            lr=learning_rate(progress.step - 1, self._train),
            grad_norm=grad_norm,
            target_tok_s=(made - before[0]) / spent,
            drafter_tok_s=(tokens - before[1]) / spent,
            target_wait=self._mean_wait("target"),
            drafter_wait=self._mean_wait("drafter"),
            step_s=spent,
            memory_gib=peak_memory_gib(self._devices),
            bad_steps=progress.bad_steps,
            epoch=epoch,
            saved=saved,
            eta_s=(now - self._began) / max(1, done) * (self._train.steps - progress.step),
        )
        self.latest = record
        for logger in self._loggers:
            logger.log(vars(record) if tau is None else {**vars(record), "tau": tau})
        if progress.step % self._train.log_every == 0 or last or progress.bad_in_a_row:
            self._report(record.line())
        return record

    def _mean_wait(self, role: str) -> float:
        shares = [clock.share("wait") for clock in self._clocks if clock.name.startswith(role)]
        return sum(shares) / max(1, len(shares))
