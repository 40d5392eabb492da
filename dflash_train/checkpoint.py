"""Checkpoints: written beside the training threads, complete or absent, read without unpickling anything.

A run's folder has `step-000100` for each checkpoint kept:

==============================  ====================================================================================
`drafter.safetensors`           weights, float32; the mean over the drafters where they differ. This is what is exported
`config.toml`                   settings of the run
`replica-00000.safetensors`     the optimiser's moments, generator states; weights too where drafters differ, then one
                                file for each drafter of all hosts
`meta.json`                     where the run stood, and the size of every file; written last
==============================  ====================================================================================

It is written as `step-000100.tmp` and renamed when complete. With several hosts the folder is one that all can write.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from dflash_train.averaging import Hosts
from dflash_train.config import ConfigError, RunConfig, field_names
from dflash_train.config_files import dump_config, load_config
from dflash_train.drafter_files import SETTINGS, WEIGHTS, check_weights, read_weights

VERSION = 1
META = "meta.json"
WRITE_S = 1800.0
"""How long a checkpoint may take to be written before the run gives up."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands between two steps; with the weights and moments, all there is to go on from."""

    step: int = 0
    """Steps done. The learning rate, the draw of anchors and the place in the averaging window follow from it."""
    place: int = 0
    """The data cursor: rows read by all drafters together."""
    bad_steps: int = 0
    """Steps skipped so far because a gradient was not finite."""
    bad_in_a_row: int = 0
    """Those at the end."""
    data: str = ""
    """What the rows are made from: of other data the cursor means nothing."""
    acceptance: float = 0.0
    """Accepted drafts of a block, by which the best checkpoint is kept: decoded on held-out prompts where the run has
    such (`eval.every`), else the mean in training since the checkpoint before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Snapshot:
    """Copies on the CPU of all that a checkpoint holds."""

    progress: Progress
    config: RunConfig
    weights: Mapping[str, Tensor]
    replicas: Mapping[int, Mapping[str, Tensor]]
    """For each drafter of this host that has a file, by its number among all hosts': `moment.*`, `rng.*`, `weight.*`."""
    num_replicas: int
    """Drafters of all hosts that have a file: 1 if all are alike."""


class CheckpointWriter:
    """Writes snapshots to a run's folder on a thread of its own, one at a time."""

    def __init__(self, run: Path, hosts: Hosts, keep_last: int) -> None:
        self._run = run
        self._hosts = hosts
        self._keep_last = keep_last
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def submit(self, snapshot: Snapshot) -> None:
        """Begin to write; waits for the one before.

        Raises:
            OSError, SafetensorError: the one before could not be written.
        """
        self.wait()
        self._pending = self._executor.submit(write, self._run, snapshot, self._hosts, self._keep_last)

    def wait(self) -> None:
        """Wait until what was submitted is on disk.

        Raises:
            OSError, SafetensorError: it could not be written.
            TimeoutError: it takes too long.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result(timeout=WRITE_S)

    def close(self) -> None:
        """End the thread; a write that still runs ends first."""
        self._executor.shutdown(wait=False)


def write(run: Path, snapshot: Snapshot, hosts: Hosts, keep_last: int) -> None:
    """Write a checkpoint and delete old ones: all but the `keep_last` last and the best. All hosts take part.

    Raises:
        OSError, SafetensorError: the disk is full, or the like; what was begun is deleted.
    """
    final = run / f"step-{snapshot.progress.step:06d}"
    unfinished = final.with_name(final.name + ".tmp")
    if is_complete(final):
        return
    leads = hosts.rank == 0
    try:
        if leads:
            for leftover in run.glob("step-*.tmp"):
                shutil.rmtree(leftover)
            unfinished.mkdir(parents=True)
        hosts.wait_as_writer()
        for number, state in snapshot.replicas.items():
            _save(state, unfinished / _replica_file(number))
        if leads:
            _save(snapshot.weights, unfinished / WEIGHTS)
            _write_text(unfinished / SETTINGS, dump_config(snapshot.config))
        hosts.wait_as_writer()
        if leads:
            record = {
                "version": VERSION,
                **dataclasses.asdict(snapshot.progress),
                "num_replicas": snapshot.num_replicas,
                "files": {path.name: path.stat().st_size for path in sorted(unfinished.iterdir())},
            }
            _write_text(unfinished / META, json.dumps(record, indent=1) + "\n")
            os.replace(unfinished, final)
            _sync(run)
            _prune(run, keep_last)
        hosts.wait_as_writer()
    except (OSError, SafetensorError):
        if leads:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _replica_file(number: int) -> str:
    return f"replica-{number:05d}.safetensors"


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(dict(tensors), path)
    _sync(path)


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Have the system bring a file or folder to the disk, so that a rename never outlives what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prune(run: Path, keep_last: int) -> None:
    kept = checkpoints(run)
    best = max(kept, key=lambda path: _read_meta(path)["acceptance"], default=None)
    for path in kept[:-keep_last]:
        if path != best:
            # Renamed first: one that is deleted by half must not look complete.
            doomed = path.with_name(path.name + ".tmp")
            os.replace(path, doomed)
            shutil.rmtree(doomed)


def checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run, oldest first."""
    found = [path for path in run.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and is_complete(path)]
    return sorted(found, key=lambda path: int(path.name[len("step-") :]))


def is_complete(path: Path) -> bool:
    """Whether every file that the metadata names is there in its size."""
    try:
        files = _read_meta(path)["files"]
        return all((path / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _read_meta(path: Path) -> dict[str, Any]:
    record = json.loads((path / META).read_text("utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path / META} is not a JSON object")
    return record


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A complete checkpoint, read."""

    path: Path
    progress: Progress
    config: RunConfig
    weights: dict[str, Tensor]
    num_replicas: int

    def replica(self, number: int, of: int, *, alike: bool) -> dict[str, Tensor]:
        """State of drafter `number` of `of`: `moment.*`, `weight.*`, and `rng.*` where it is its own.

        Where the checkpoint's drafters differed and must not (`alike`), or were of another number, each gets their mean.

        Raises:
            ConfigError: a file is damaged.
        """
        if self.num_replicas == 1 or (self.num_replicas == of and not alike):
            state = read_weights(self.path / _replica_file(number if self.num_replicas == of else 0))
            weights = {f"weight.{name}": value for name, value in self.weights.items()}
            return {**weights, **state}
        states = [read_weights(self.path / _replica_file(i)) for i in range(self.num_replicas)]
        shared = [name for name in states[0] if not name.startswith("rng.") and all(name in state for state in states)]
        return {name: torch.stack([state[name] for state in states]).mean(0) for name in shared}


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's metadata, settings and weights.

    Raises:
        ConfigError: it is not one of ours, or damaged.
    """
    try:
        meta = _read_meta(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path / META} cannot be read: {error}; delete {path.name}, and an earlier one is taken") from error
    if meta.get("version") != VERSION:
        raise ConfigError(f"{path} is of version {meta.get('version')!r}, this program reads {VERSION}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(Progress):
        kinds: Any = {"int": int, "str": str, "float": (int, float)}[str(field.type)]
        values[field.name] = meta.get(field.name)
        if not isinstance(values[field.name], kinds):
            raise ConfigError(f"{path / META}: {field.name} must be {field.type}, got {values[field.name]!r}")
    if not isinstance(meta.get("num_replicas"), int) or meta["num_replicas"] < 1:
        raise ConfigError(f"{path / META}: num_replicas must be 1 or more, got {meta.get('num_replicas')!r}")
    config = load_config(path / SETTINGS)
    weights = read_weights(path / WEIGHTS)
    check_weights(weights, config.drafter, path / WEIGHTS)
    return Checkpoint(
        path=path, progress=Progress(**values), config=config, weights=weights, num_replicas=meta["num_replicas"]
    )


_REFUSED = {
    "data.seed": "the order of the rows would be another, and the position in it would mean nothing",
    "data.row_length": "documents would be packed into other rows, and the position in them would mean nothing",
    "target.dtype": "the hidden states would be others",
    "target.seed": "it would be another target",
}
_MEANING = {
    "target.cuda_graph": "it makes the same hidden states in another way",
    "target": "it must hold the same model: the drafter was trained on its hidden states",
    "anchors": "other numbers of anchors are drawn from here on",
    "loss": "the objective changes here, and losses before and after do not compare",
    "data.hidden": "they must be hidden states of the same target",
    "data": "the rows must be the same; they go on from the same place",
    "train.steps": "the learning rate follows the schedule of the new length",
    "train.learning_rate": "the schedule goes on with the new peak",
    "train.schedule": "the learning rate follows the new schedule",
    "train.accumulation": "the global batch changes",
    "train.dtype": "float32 weights and moments are taken over; rounding differs",
    "train.synchronise": "drafters that differ go on from their mean if their number changes",
    "train": "it applies from here on",
}


def changes(before: RunConfig, now: RunConfig) -> list[str]:
    """What differs between a checkpoint's settings and those given now, each with what that means.

    Raises:
        ConfigError: a difference with which the run cannot go on.
    """
    told: list[str] = []
    refused: list[str] = []
    for section in field_names(RunConfig):
        old, new = getattr(before, section), getattr(now, section)
        for name in field_names(type(old)):
            was, is_now = getattr(old, name), getattr(new, name)
            if was == is_now:
                continue
            key = f"{section}.{name}"
            reason = _REFUSED.get(key)
            if section == "drafter" and name != "attention":
                reason = "it would be another drafter"
            if reason:
                refused.append(f"{key} was {was!r} and is now {is_now!r}: {reason}")
            else:
                meaning = _MEANING.get(key) or _MEANING.get(section) or "it applies from here on"
                told.append(f"{key} was {was!r} and is now {is_now!r}: {meaning}")
    if refused:
        raise ConfigError("cannot resume: " + "; ".join(refused) + ". Set it back, or start a new run with another -o DIR")
    return told


def mean_of(drafters: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several drafters' weights, on the CPU."""
    if len(drafters) == 1:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in drafters[0].items()}
    return {
        name: torch.stack([drafter[name].detach().to("cpu") for drafter in drafters]).mean(0) for name in drafters[0]
    }
