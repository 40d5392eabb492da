"""What a run needs before its threads start: the checkpoint to go on from, targets, data, drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dflash_train.averaging import Hosts
from dflash_train.checkpoint import Checkpoint, Progress, changes, checkpoints, read_checkpoint
from dflash_train.config import ConfigError, RunConfig
from dflash_train.data import MANIFEST, Documents
from dflash_train.devices import group_name, parse_devices, target_groups
from dflash_train.held_out import HeldOut
from dflash_train.hidden_cache import CachedTarget
from dflash_train.packing import PackedDocuments
from dflash_train.pipeline import Source, Topology
from dflash_train.replica import Replica
from dflash_train.replicas import alike_always
from dflash_train.targets import LoadTarget, Target
from dflash_train.tiny_data import make_tiny_data
from dflash_train.vocabulary import Vocabulary


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """Everything loaded, at the step to go on from."""

    targets: list[Target | CachedTarget]
    """One for each target thread; threads on the same devices share one."""
    replicas: list[Replica]
    source: Source
    progress: Progress
    held_out: HeldOut | None
    """What this host evaluates by, if it does."""

    def describe(self, config: RunConfig, num_hosts: int) -> str:
        """A line for people."""
        return (
            f"{len(self.targets)} target threads on {', '.join(map(group_name, target_groups(config)))}; {len(self.replicas)} "
            f"drafters in {config.train.dtype} on {', '.join(str(replica.device) for replica in self.replicas)}; {num_hosts} "
            f"hosts; {self.source.rows_per_step} rows of {config.data.row_length} tokens a step; {self.progress.data}"
        )


def choose_checkpoint(config: RunConfig, run: Path, resume: bool, report: Callable[[str], None]) -> Checkpoint | None:
    """The last complete checkpoint of a run, if it is to go on and has one. Makes the folder of the run.

    Raises:
        ConfigError: there is one and `resume` is off, or the settings do not go on from it.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{run} cannot be made: {error.strerror}; give another folder as -o DIR") from error
    kept = checkpoints(run)
    if kept and not resume:
        raise ConfigError(f"{run} has {kept[-1].name} already; pass --resume to go on, or another -o DIR")
    if not kept:
        if resume:
            report(f"{run} has no complete checkpoint yet: starting at step 0")
        return None
    checkpoint = read_checkpoint(kept[-1])
    report(f"resuming from {checkpoint.path}")
    for change in changes(checkpoint.config, config):
        report(f"  changed: {change}")
    return checkpoint


def load_parts(
    config: RunConfig, run: Path, hosts: Hosts, topology: Topology, checkpoint: Checkpoint | None, load: LoadTarget
) -> Parts:
    """Load targets and data, make drafters, and bring them to where a checkpoint stands.

    Raises:
        ConfigError, DataError, TargetError: as `train` does.
    """
    groups = target_groups(config)
    loaded: dict[tuple[torch.device, ...], Target | CachedTarget] = {}
    documents = Documents(Path(config.data.path)) if config.data.path else None
    for group in dict.fromkeys(groups):
        loaded[group] = open_target(config, documents, group, load)
        loaded[group].check(config.drafter)
    first = loaded[groups[0]]
    documents = documents or _make_data(config, run, hosts, first)
    data = pack_rows(config, documents)
    dtype = getattr(torch, config.train.dtype)
    vocabularies: dict[torch.device, Vocabulary] = {}
    devices = parse_devices(config.train.drafter_devices, "drafter")
    for device in dict.fromkeys(devices):
        nearest = loaded.get((device,), first)
        vocabularies[device] = nearest.vocabulary(config.drafter.embedding_scale).to(device, dtype)
    replicas = [Replica(config, device, vocabularies[device]) for device in devices]
    progress = Progress(data=_describe_data(documents, data))
    if checkpoint is not None:
        _go_on(checkpoint, progress, replicas, topology, alike=alike_always(config, topology))
        progress = checkpoint.progress
    return Parts(
        targets=[loaded[group] for group in groups],
        replicas=replicas,
        source=Source(data, config, topology, progress.step, progress.place),
        progress=progress,
        held_out=HeldOut(config, first) if isinstance(first, Target) and config.eval.every and hosts.rank == 0 else None,
    )


def open_target(
    config: RunConfig, documents: Documents | None, group: tuple[torch.device, ...], load: LoadTarget
) -> Target | CachedTarget:
    """The target of a target thread, or what stands for it: hidden states on disk, if `data.hidden` names some.

    Raises:
        ConfigError, TargetError: it cannot be read, or does not belong to the documents.
    """
    if not config.data.hidden:
        return load(config.target, config.drafter.taps, *group)
    assert documents is not None  # the config sees to it
    return CachedTarget(Path(config.data.hidden), config, documents, group[0])


def _make_data(config: RunConfig, run: Path, hosts: Hosts, target: Target | CachedTarget) -> Documents:
    if config.target.path != "tiny" or not isinstance(target, Target):
        raise ConfigError("data.path is empty; name a folder that `dflash-train prepare` wrote")
    folder = run / "data"
    if hosts.rank == 0 and not (folder / MANIFEST).is_file():
        make_tiny_data(target, folder, seed=config.target.seed)
    hosts.wait()
    return Documents(folder)


def pack_rows(config: RunConfig, documents: Documents) -> PackedDocuments:
    """The documents as rows.

    Raises:
        ConfigError: they were made by a tokenizer that does not fit.
    """
    if documents.manifest.vocab_size > config.drafter.vocab_size:
        raise ConfigError(
            f"the data was made by a tokenizer of {documents.manifest.vocab_size} ids, more than drafter.vocab_size = "
            f"{config.drafter.vocab_size}; it belongs to another target"
        )
    return PackedDocuments(documents, config.data.row_length)


def _describe_data(documents: Documents, rows: PackedDocuments) -> str:
    manifest = documents.manifest
    counts = f"{manifest.documents} documents, {manifest.tokens} tokens, {len(rows)} rows"
    return f"{counts}, tokenizer {manifest.tokenizer[:12]}"


def _go_on(checkpoint: Checkpoint, now: Progress, replicas: list[Replica], topology: Topology, *, alike: bool) -> None:
    """Give drafters their weights and moments of a checkpoint."""
    if checkpoint.progress.data != now.data:
        raise ConfigError(
            f"cannot resume: {checkpoint.path} was trained on {checkpoint.progress.data}, and data.path now has {now.data}; "
            "give it the same data"
        )
    first = topology.rank * topology.drafters_here
    for i, replica in enumerate(replicas):
        state = checkpoint.replica(first + i, topology.drafters, alike=alike)
        replica.load_weights(_part(state, "weight."))
        replica.load_moments(_part(state, "moment."))
        if i == 0 and "rng.cpu" in state:
            torch.set_rng_state(state["rng.cpu"].to(torch.uint8))


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: value for name, value in state.items() if name.startswith(prefix)}
