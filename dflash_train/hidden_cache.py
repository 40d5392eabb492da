"""Hidden states on disk: made once by a target, trained from without it.

A folder has, per document of a prepared data set, what the target hands to a drafter (`TargetStates`), and the target's
embedding and head. `hidden.json` is written last; a folder without it is unfinished, and is gone on with.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash_train.config import ConfigError, DrafterConfig, RunConfig
from dflash_train.conversations import DataError
from dflash_train.data import Documents
from dflash_train.packing import PackedDocuments, PackedRows
from dflash_train.targets import LoadTarget, Target, TargetStates, check_fit, load_target
from dflash_train.vocabulary import Vocabulary

VERSION = 1
MANIFEST, VOCABULARY = "hidden.json", "vocabulary.safetensors"
SHARD_BYTES = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of hidden states belongs to."""

    version: int
    data: str
    """`Documents.identity` of the documents."""
    target: str
    """Its name; told, not compared: folders move."""
    dtype: str
    target_seed: int
    """Of the `tiny` target."""
    layer_ids: list[int]
    """Layers tapped, in this order."""
    row_length: int
    """Longest document kept; longer ones are cut."""
    hidden_size: int
    num_layers: int
    logit_softcap: float
    first: list[int]
    """Number of the first document of each shard, and at the end that of all documents."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a cache will take."""

    tokens: int
    bytes: int
    shards: list[range]
    """Numbers of the documents of each."""


def predict_size(config: RunConfig, documents: Documents, shard_bytes: int = SHARD_BYTES) -> Size:
    """Bytes of the hidden states of all documents (without the vocabulary), and how they are spread over files."""
    drafter = config.drafter
    per_token = (len(drafter.taps) + 1) * drafter.hidden_size * BYTES[config.target.dtype]
    ends = np.cumsum(np.minimum(documents.lengths, config.data.row_length)) * per_token
    shards: list[range] = []
    start = 0
    while start < len(documents):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + shard_bytes, side="right")))
        shards.append(range(start, stop))
        start = stop
    total = int(ends[-1]) if len(documents) else 0
    return Size(tokens=total // per_token, bytes=total, shards=shards)


def cache_hidden(
    config: RunConfig,
    folder: Path,
    groups: Sequence[tuple[torch.device, ...]],
    report: Callable[[str], None],
    *,
    size_only: bool = False,
    load: LoadTarget = load_target,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Run a target over all documents of `data.path` and keep its hidden states; goes on with what was begun.

    Args:
        config: of the runs that will train from it: target, taps, data.
        folder: where to.
        groups: one copy of the target on the devices of each.
        report: told the size before anything is loaded, then each file.
        size_only: tell the size, and no more.
        load: makes each target.
        shard_bytes: size of a file, about.

    Raises:
        ConfigError: the disk has no room, or the folder belongs to something else.
        DataError, TargetError: data or target cannot be read.
    """
    if not config.data.path:
        raise ConfigError("data.path is empty; name a folder that `dflash-train prepare` wrote")
    documents = Documents(Path(config.data.path))
    size = predict_size(config, documents, shard_bytes)
    done = [i for i in range(len(size.shards)) if (folder / _shard(i)).is_file()]
    written = sum((folder / _shard(i)).stat().st_size for i in done)
    disk = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    free = shutil.disk_usage(disk).free
    report(
        f"{len(documents)} documents, {size.tokens:,} tokens: {size.bytes / 2**30:.3f} GiB of hidden states in "
        f"{len(size.shards)} files, of which {len(done)} are there; {free / 2**30:.1f} GiB are free on the disk of {folder}"
    )
    if size_only:
        return
    if size.bytes - written > free:
        raise ConfigError(
            f"{folder} has room for {free / 2**30:.1f} GiB, and {(size.bytes - written) / 2**30:.1f} are needed; name a folder "
            "on another disk, prepare fewer documents, or train with the target (without data.hidden)"
        )
    manifest = Manifest(
        version=VERSION,
        data=documents.identity,
        target=config.target.path,
        dtype=config.target.dtype,
        target_seed=config.target.seed,
        layer_ids=list(config.drafter.taps),
        row_length=config.data.row_length,
        hidden_size=config.drafter.hidden_size,
        num_layers=config.drafter.num_target_layers,
        logit_softcap=config.drafter.logit_softcap,
        first=[shard.start for shard in size.shards] + [len(documents)],
    )
    folder.mkdir(parents=True, exist_ok=True)
    _claim(folder, manifest)
    targets: queue.SimpleQueue[Target] = queue.SimpleQueue()
    for group in groups:
        target = load(config.target, config.drafter.taps, *group)
        target.check(config.drafter)
        targets.put(target)

    def make(number: int) -> None:
        target = targets.get()
        try:
            numbers = size.shards[number]
            rows = PackedDocuments(documents, config.data.row_length, numbers)
            _write(_states_of_documents(target, rows, numbers, config.data.rows_per_batch), folder / _shard(number))
        finally:
            targets.put(target)
        report(f"{folder / _shard(number)}: documents {size.shards[number].start} … {size.shards[number].stop - 1}")

    with ThreadPoolExecutor(len(groups), thread_name_prefix="target") as pool:
        for future in [pool.submit(make, number) for number in range(len(size.shards)) if number not in done]:
            future.result()
    vocabulary = targets.get().vocabulary()
    tensors = {"head": vocabulary.head, "head_bias": vocabulary.head_bias}
    if vocabulary.embedding is not vocabulary.head:
        tensors["embedding"] = vocabulary.embedding
    _write({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / VOCABULARY)
    (folder / _CLAIM).rename(folder / MANIFEST)


_CLAIM = MANIFEST + ".tmp"


def _claim(folder: Path, manifest: Manifest) -> None:
    """Write what the folder is for, or see that it says so already."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1) + "\n"
    for name in (MANIFEST, _CLAIM):
        if (folder / name).is_file() and (folder / name).read_text("utf-8") != text:
            raise ConfigError(f"{folder} holds hidden states of other data or settings; delete it, or name another folder")
    (folder / _CLAIM).write_text(text, "utf-8")


def _shard(number: int) -> str:
    return f"states-{number:05d}.safetensors"


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, unfinished)
    os.replace(unfinished, path)


def _states_of_documents(target: Target, rows: PackedDocuments, numbers: range, rows_per_batch: int) -> dict[str, Tensor]:
    """`taps`, `final` and `offsets` of some documents, in their order; `rows` has just these."""
    width, dtype = target.hidden_size, target.vocabulary().embedding.dtype
    empty = (torch.empty(0, len(target.layer_ids) * width, dtype=dtype), torch.empty(0, width, dtype=dtype))
    parts = dict.fromkeys(numbers, empty)
    for start in range(0, len(rows), rows_per_batch):
        batch = rows.batch(range(start, min(len(rows), start + rows_per_batch)))
        states = target.states_of(batch.to(target.device))
        for row, inside in enumerate(batch.document_numbers):
            for index, number in enumerate(inside):
                mine = batch.documents[row] == index
                parts[number] = states.taps[row].cpu()[mine], states.final[row].cpu()[mine]
    lengths = torch.tensor([0, *(len(taps) for taps, _ in parts.values())])
    return {
        "taps": torch.cat([taps for taps, _ in parts.values()]),
        "final": torch.cat([final for _, final in parts.values()]),
        "offsets": lengths.cumsum(0),
    }


class CachedTarget:
    """Stands for a target whose hidden states are on disk: what `train` asks of a target, without a model.

    May be called from several threads.

    Raises:
        ConfigError: the folder is unfinished, or of other data or settings.
    """

    def __init__(self, folder: Path, config: RunConfig, documents: Documents, device: torch.device) -> None:
        self.device = device
        self.name = str(folder)
        self._folder = folder
        self._manifest = _read_manifest(folder)
        there = self._manifest
        for what, theirs, ours in (
            ("data", there.data, documents.identity),
            ("target.dtype", there.dtype, config.target.dtype),
            ("target.seed", there.target_seed, config.target.seed),
            ("tapped layers", there.layer_ids, list(config.drafter.taps)),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"{folder} has hidden states of {what} {theirs}, and the run has {ours}; make them with `dflash-train "
                    "cache-hidden`, or leave data.hidden empty"
                )
        longest = min(int(documents.lengths.max()), config.data.row_length)
        if longest > there.row_length:
            hint = f"--set data.row_length={there.row_length}"
            raise ConfigError(f"{folder} has documents cut at {there.row_length} tokens; {hint}")
        tensors = _load(folder / VOCABULARY)
        head = tensors["head"].to(device)
        self._vocabulary = Vocabulary(
            embedding=tensors["embedding"].to(device) if "embedding" in tensors else head,
            head=head,
            head_bias=tensors["head_bias"].to(device) if "head_bias" in tensors else None,
            logit_softcap=there.logit_softcap,
        )

    def vocabulary(self, embedding_scale: float = 1.0) -> Vocabulary:
        """The target's embedding and head."""
        return dataclasses.replace(self._vocabulary, embedding_scale=embedding_scale)

    def check(self, drafter: DrafterConfig) -> None:
        """Whether a drafter fits the target, as `Target.check` does."""
        manifest = self._manifest
        check_fit(
            drafter, self._vocabulary, self.name, manifest.hidden_size, manifest.num_layers, tuple(manifest.layer_ids)
        )

    def states_of(self, rows: PackedRows) -> TargetStates:
        """What is on disk of the documents of packed rows, on this target's device; zeros at padding."""
        width = self._manifest.hidden_size
        shape = tuple(rows.tokens.shape)
        dtype: torch.dtype = getattr(torch, self._manifest.dtype)
        taps = torch.zeros(*shape, len(self._manifest.layer_ids) * width, dtype=dtype)
        final = torch.zeros(*shape, width, dtype=dtype)
        owners = rows.documents.cpu()
        for row, numbers in enumerate(rows.document_numbers):
            lengths = owners[row][owners[row] >= 0].bincount(minlength=len(numbers)).tolist()
            start = 0
            for number, length in zip(numbers, lengths, strict=True):
                taps[row, start : start + length], final[row, start : start + length] = self._read(number, length)
                start += length
        return TargetStates(taps=taps.to(self.device), final=final.to(self.device))

    def _read(self, number: int, length: int) -> tuple[Tensor, Tensor]:
        shard = bisect_right(self._manifest.first, number) - 1
        path = self._folder / _shard(shard)
        try:
            # Opened anew each time: a file is mapped, not read, and nothing is shared between threads.
            with safe_open(path, "pt") as file:
                start = int(file.get_slice("offsets")[number - self._manifest.first[shard]])
                return file.get_slice("taps")[start : start + length], file.get_slice("final")[start : start + length]
        except (OSError, SafetensorError) as error:
            hint = "delete it, and `dflash-train cache-hidden` makes it again"
            raise DataError(f"{path} cannot be read: {error}; {hint}") from error


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        record: Any = json.loads(path.read_text("utf-8"))
        manifest = Manifest(**record)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} has no {MANIFEST}; make it, or go on with it, by `dflash-train cache-hidden`") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; make it again with `dflash-train cache-hidden`") from error
    if manifest.version != VERSION:
        raise ConfigError(f"{path} is of version {manifest.version!r}, this program reads {VERSION}; make it again")
    return manifest


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; delete its folder, and make it again") from error
