"""The training run: targets and drafters in one process for each host, from warm-up to the last checkpoint.

Drafter threads meet twice in a step. At the first meeting one of them combines the gradients while the others wait; then
each updates its own weights; at the second one of them closes the step: averages weights if it is time, counts, logs,
hands a snapshot to the checkpoint writer, and decides whether the run goes on. No drafter updates before all have their
gradients, so whatever happens during forward and backward leaves a state that can be saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor

import compile_guard
from dflash_train.averaging import Hosts
from dflash_train.checkpoint import CheckpointWriter, Progress, Snapshot, checkpoints, write
from dflash_train.config import RunConfig
from dflash_train.config_files import dump_config
from dflash_train.crew import Clock, Crew, Meeting, Stopped, dump_stacks
from dflash_train.devices import group_name, parse_devices, target_groups
from dflash_train.held_out import HeldOut
from dflash_train.live import Lane, LiveView
from dflash_train.losses import LossSums, add_sums
from dflash_train.metrics import METRICS, JsonLines, Logger, open_logger
from dflash_train.pipeline import Pipeline, Topology, hand_over, receive, with_states
from dflash_train.replicas import Replicas
from dflash_train.run_setup import choose_checkpoint, load_parts
from dflash_train.step_log import StepLog
from dflash_train.stop_signals import StopSignals
from dflash_train.summary import summarise
from dflash_train.target_graph import capture
from dflash_train.targets import LoadTarget, Target, load_target

Report = Callable[[str], None]


class TrainingError(RuntimeError):
    """A run that ended before its last step; the message has the cause, and what a resumed run starts from."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    progress: Progress
    checkpoint: Path | None
    """The last complete one."""
    signal: int = 0
    """Number of the signal that ended it early, or 0."""
    findings: tuple[str, ...] = ()
    """Of the guard, from the end of the warm-up on."""


def train(
    config: RunConfig,
    run: Path,
    *,
    resume: bool = False,
    log: Sequence[str] = (),
    report: Report = print,
    load: LoadTarget = load_target,
    live: bool = False,
) -> Outcome:
    """Train a drafter into the folder `run`; returns when the last step is saved, or after a signal, having saved.

    Call it from the main thread. Under `torchrun` every process calls it alike.

    Args:
        config: all settings.
        run: folder of checkpoints, `metrics.jsonl` and the rest.
        resume: go on from the last complete checkpoint in it, if there is one.
        log: further loggers, by the names that `metrics.open_logger` takes.
        report: told what a person should read.
        load: makes the target of each device, for one that does not come from disk.
        live: draw a table of all threads on the terminal while steps are done (needs rich).

    Raises:
        ConfigError: the settings do not fit the target, the data, the machine or the checkpoint.
        DataError, TargetError: data or target cannot be read.
        TrainingError: a thread failed, the loss was not finite too often, or nothing moved; its `__cause__` is what happened.
    """
    compile_guard.install()
    hosts = Hosts()
    with StopSignals() as signals:
        started = _Run(config, run, hosts, signals, report if hosts.rank == 0 else _say_nothing, load)
        outcome = started.execute(resume, log, live=live and hosts.rank == 0)
    hosts.close()
    return outcome


def _say_nothing(message: str) -> None:
    pass


class _Run:
    """One call of `train`."""

    def __init__(
        self, config: RunConfig, run: Path, hosts: Hosts, signals: StopSignals, report: Report, load: LoadTarget
    ) -> None:
        self.config = config
        self.run = run
        self.hosts = hosts
        self.signals = signals
        self.report = report
        self.load = load
        self.target_groups = target_groups(config)
        self.drafter_devices = parse_devices(config.train.drafter_devices, "drafter")
        num_drafters = len(self.drafter_devices)
        self.topology = Topology(drafters_here=num_drafters, hosts=hosts.size, rank=hosts.rank)
        self.progress = Progress()
        self.last_saved = 0
        self.findings: list[str] = []
        self.crew = Crew()
        self.writer = CheckpointWriter(run, hosts, config.train.keep_last)
        self.loggers: list[Logger] = []
        # Of the step in progress, one for each drafter here.
        self._sums: list[Tensor] = [torch.zeros(0)] * num_drafters
        self._updates = [(0.0, True)] * num_drafters
        self._denominators = [0.0] * num_drafters
        self._tokens = [0] * num_drafters
        self._leaving = False
        self._consistent = True
        """Whether all drafters stand between the same two steps."""
        self._accepted: list[float] = []
        self._held_out: HeldOut | None = None
        self._combined = Meeting(num_drafters, self._combine)
        self._closed = Meeting(num_drafters, self._close_step)
        # Not the second one: who has met to combine goes on to the end of the step, whatever failed elsewhere.
        self.crew.on_stop(self._combined.close)

    # Preparation: in the main thread.

    def execute(self, resume: bool, log: Sequence[str], live: bool) -> Outcome:
        """The whole run."""
        checkpoint = choose_checkpoint(self.config, self.run, resume, self.report)
        self.hosts.agree("number of drafter devices", self.topology.drafters_here)
        self.hosts.agree("checkpoint to resume from", checkpoint.progress.step if checkpoint else 0)
        parts = load_parts(self.config, self.run, self.hosts, self.topology, checkpoint, self.load)
        self.targets, self.replicas, self.source = parts.targets, parts.replicas, parts.source
        self.drafters = Replicas(self.config, self.topology, self.hosts, self.replicas)
        self.progress, self.last_saved = parts.progress, parts.progress.step
        self._held_out = parts.held_out
        self.report(parts.describe(self.config, self.hosts.size))
        if self.hosts.rank == 0:
            (self.run / "config.toml").write_text(dump_config(self.config), "utf-8")
            self.loggers.append(JsonLines(self.run / METRICS, self.progress.step))
            self.loggers += [open_logger(name, self.run, {"config": dump_config(self.config)}) for name in log]
        if self.progress.step >= self.config.train.steps:
            self.report(f"{self.run} has all {self.config.train.steps} steps already")
            return self._outcome()
        self._warm_up()
        if self.signals.received:
            self.report("stopped before the first step; nothing to save")
            return self._outcome()
        stop_listening = compile_guard.findings.listen(self._note_finding)
        try:
            with compile_guard.sealed():
                self._train(live)
        finally:
            stop_listening()
            for logger in self.loggers:
                logger.close()
        return self._outcome()

    def _outcome(self) -> Outcome:
        kept = checkpoints(self.run)
        return Outcome(
            progress=self.progress,
            checkpoint=kept[-1] if kept else None,
            signal=self.signals.received,
            findings=tuple(self.findings),
        )

    def _warm_up(self) -> None:
        """Run the first batch through every target and drafter, in turn: all compiles happen here, forward and backward."""
        began = time.perf_counter()
        batch = self.source.batch(0)
        dtype = getattr(torch, self.config.train.dtype)
        for target in dict.fromkeys(self.targets):
            made = with_states(batch, target)
            if isinstance(target, Target) and target.device.type == "cuda" and self.config.target.cuda_graph:
                # Before there are threads, and in the shape that every batch of the run has.
                self.report(capture(target, batch.rows.to(target.device)))
        for replica in self.replicas:
            if self.signals.received:
                return
            here = hand_over(made, replica.device, dtype)
            try:
                with torch.cuda.device(replica.device) if replica.device.type == "cuda" else nullcontext():
                    sums = replica.accumulate(here.rows, here.anchors, receive(here, replica.device))
                float(sums.numerator)  # until the device is done
            except RuntimeError as error:  # out of memory, or a compile that failed
                raise TrainingError(
                    f"the first batch failed on {replica.device}: {type(error).__name__}: {error}. Nothing was trained; "
                    "`dflash-train doctor` tells what a drafter needs"
                ) from error
            replica.zero_grad()
        self.report(f"warmed up in {time.perf_counter() - began:.1f} s; from here on a compile is a finding")

    # The run: main thread and crew.

    def _train(self, live: bool) -> None:
        dtype = getattr(torch, self.config.train.dtype)
        self.pipeline = Pipeline(
            self.crew, self.source, self.targets, self.drafter_devices, dtype, self.config.train.prefetch
        )
        for i, device in enumerate(self.drafter_devices):
            self.crew.add(f"drafter-{i}", device, lambda clock, i=i: self._run_drafter(i, clock))  # type: ignore[misc]
        self.step_log = StepLog(
            self.config, self.progress.step, self.crew.clocks, self.pipeline.target_tokens,
            [*sum(self.target_groups, ()), *self.drafter_devices], self.loggers, self.report,
        )  # fmt: skip
        self._lock_waited_s = compile_guard.trace_lock.statistics().waited_s
        with LiveView(self._lanes(), lambda: self.step_log.latest).show() if live else nullcontext():
            self.crew.start()
            while not self.crew.wait(1.0):
                if time.perf_counter() - self.step_log.step_ended > self.config.train.stall_seconds:
                    dump_stacks()
                    self.crew.stop("watchdog", TimeoutError(f"no step ended within {self.config.train.stall_seconds:.0f} s"))
                    break
            stuck = self.crew.join()
        self._finish(stuck)

    def _lanes(self) -> list[Lane]:
        counts = {f"target-{i}": (self.pipeline.target_tokens, i) for i in range(len(self.targets))}
        counts |= {f"drafter-{i}": (self._tokens, i) for i in range(len(self.replicas))}
        devices = dict(zip(counts, map(str, [*map(group_name, self.target_groups), *self.drafter_devices]), strict=True))
        clocks = {clock.name: clock for clock in self.crew.clocks}
        return [
            Lane(clock=clocks[name], device=devices[name], tokens=lambda tokens=tokens, i=i: tokens[i])  # type: ignore[misc]
            for name, (tokens, i) in counts.items()
        ]

    def _run_drafter(self, index: int, clock: Clock) -> None:
        replica, channel = self.replicas[index], self.pipeline.channels[index]
        while True:
            step = self.progress.step
            parts: list[LossSums] = []
            for _ in range(self.config.train.accumulation):
                with clock("wait"):
                    received = channel.get()
                assert received is not None
                batch = received[1]
                assert batch.step == step
                with clock("compute"):
                    parts.append(replica.accumulate(batch.rows, batch.anchors, receive(batch, replica.device)))
                self._tokens[index] += batch.num_tokens
            with clock("compute"):
                self._sums[index] = torch.stack(list(vars(add_sums(parts)).values())).cpu().double()
            with clock("sync"):
                self._combined.wait()
            with clock("compute"):
                try:
                    self._updates[index] = replica.update(step, self._denominators[index])
                except BaseException:
                    self._closed.close()  # the others would wait for this one
                    raise
            with clock("sync"):
                self._closed.wait()
            if self._leaving:
                raise Stopped

    def _combine(self) -> None:
        """First meeting: by one drafter thread, while the others wait."""
        which = list(vars(_NO_SUMS)).index("denominator")
        self._denominators = [float(sums[which]) for sums in self._sums]
        if self.config.train.synchronise == "gradients":
            total = torch.tensor([sum(self._denominators)], dtype=torch.float64)
            self.hosts.sum([total])
            self._denominators = [float(total)] * len(self.replicas)
            self.drafters.combine_gradients()
        self._consistent = False

    def _close_step(self) -> None:
        """Second meeting: by one drafter thread, while the others wait."""
        train = self.config.train
        bad = sum(not finite for _, finite in self._updates)
        # Everything that all hosts must know or decide alike, in one sum.
        shared = torch.cat([sum(self._sums), torch.tensor([bad, self.signals.received > 0, sum(self._tokens)])])  # type: ignore[list-item]
        self.hosts.sum([shared])
        *values, bad, stop, tokens = shared.tolist()
        step = self.progress.step + 1
        self.progress = replace(
            self.progress,
            step=step,
            place=self.progress.place + self.source.rows_per_step,
            bad_steps=self.progress.bad_steps + (bad > 0),
            bad_in_a_row=self.progress.bad_in_a_row + 1 if bad else 0,
        )
        if train.synchronise == "weights" and step % train.average_every == 0:
            self.drafters.average()
        self._consistent = True
        self._leaving = stop > 0 or step == train.steps
        saves = self._leaving or step % train.save_every == 0
        tau = self._decode() if not stop and (saves or step % max(1, self.config.eval.every) == 0) else None
        record = self.step_log.log(
            self.progress,
            dict(zip(vars(_NO_SUMS), values, strict=True)),
            tokens=int(tokens),
            grad_norm=self._updates[0][0],
            epoch=self.source.epoch(self.progress.place),
            saved=self.last_saved,
            tau=tau,
            last=self._leaving,
        )
        self._accepted.append(record.accept)
        if saves:
            self.writer.submit(self._snapshot())
            self.last_saved = step
            self._accepted.clear()
        if self.progress.bad_in_a_row >= train.max_bad_steps:
            raise FloatingPointError(
                f"{self.progress.bad_in_a_row} steps in a row had gradients that are not finite; lower train.learning_rate, or "
                "look at the data from this step on"
            )

    def _decode(self) -> float | None:
        """tau on the held-out prompts, if there are any; where the drafters differ, of their mean."""
        if self._held_out is None:
            return None
        began = time.perf_counter()
        tau = self._held_out.tau(self.drafters.mean_here(self.progress.step))
        self.progress = replace(self.progress, acceptance=tau - 1)
        prompts, spent = len(self._held_out.prompts), time.perf_counter() - began
        self.report(f"held out, step {self.progress.step}: tau {tau:.2f} on {prompts} prompts, {spent:.1f} s")
        return tau

    def _snapshot(self) -> Snapshot:
        if self._held_out is None:
            self.progress = replace(self.progress, acceptance=sum(self._accepted) / max(1, len(self._accepted)))
        return self.drafters.snapshot(self.progress)

    # The end: in the main thread.

    def _finish(self, stuck: Sequence[str]) -> None:
        cause = self.crew.cause
        try:
            self.writer.wait()
        except (OSError, SafetensorError, TimeoutError, RuntimeError) as error:  # the last: a host is gone
            cause = cause or error
        self.writer.close()
        if cause is None:
            if self.hosts.rank == 0:
                waited = compile_guard.trace_lock.statistics().waited_s - self._lock_waited_s
                summarise(self.run, self.crew.clocks, self.findings, waited, self.report)
            return
        saved = self._save_after_failure(stuck)
        thread = f"thread {self.crew.failed}" if self.crew.failed else "the run"
        what = f"{type(cause).__name__}: {cause}".rstrip(".")
        raise TrainingError(f"{thread} failed after step {self.progress.step}: {what}. {saved}") from cause

    def _save_after_failure(self, stuck: Sequence[str]) -> str:
        """What a resumed run starts from, in words; saves the last step first if all drafters stand there."""
        kept = checkpoints(self.run)
        last = f"{kept[-1].name} is complete; --resume goes on from it" if kept else "No checkpoint was complete yet"
        if (kept and kept[-1].name == f"step-{self.progress.step:06d}") or self.progress.step == 0:
            return last
        if stuck or not self._consistent:
            return f"The drafters stand at different steps, so nothing was saved now. {last}"
        if self.hosts.size > 1 and not self.drafters.alike(self.progress.step):
            return f"Each host has drafters of its own, and not all may be there, so nothing was saved now. {last}"
        if self.hosts.rank > 0:
            return f"Rank 0 has the same step, and saves it. {last}"
        try:
            # All drafters are alike, here and elsewhere: nobody else is needed, nor waited for.
            write(self.run, self._snapshot(), Hosts(alone=True), self.config.train.keep_last)
        except (OSError, SafetensorError, RuntimeError) as error:  # a GPU that failed may refuse the copy as well
            return f"Saving failed too ({error}). {last}"
        return f"Step {self.progress.step} was saved; --resume goes on from it"

    def _note_finding(self, finding: compile_guard.Finding) -> None:
        if finding.prevented:
            return
        self.findings.append(finding.key)
        with (self.run / "findings.log").open("a", encoding="utf-8") as file:
            file.write(f"{finding}\n\n")


_NO_SUMS = LossSums(**dict.fromkeys(LossSums.__dataclass_fields__, torch.zeros(())))

