"""Prepared documents on disk: safetensors shards and a manifest.

A shard holds `tokens` [T] int32, `supervised` [T] uint8 and `offsets` [D+1] int64, document i being tokens offsets[i] …
offsets[i+1]. `manifest.json` is written last: a folder without it is unfinished.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from dflash_train.chat_tokenizers import Encoded
from dflash_train.conversations import DataError

VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder of shards holds."""

    version: int
    tokenizer: str
    """`ChatTokenizer.fingerprint` of the tokenizer that made it."""
    vocab_size: int
    documents: int
    tokens: int
    supervised_tokens: int
    dropped: dict[str, int]
    """Samples left out, by reason."""
    shards: list[str]
    """File names, in order."""
    sources: list[str]
    """Names of the input files."""


class ShardWriter:
    """Writes documents to shards of about `shard_tokens` tokens, and the manifest at `close`."""

    def __init__(self, folder: Path, *, shard_tokens: int = 1 << 25) -> None:
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._pending: list[Encoded] = []
        self._pending_tokens = 0
        self._shards: list[str] = []
        self._documents = self._tokens = self._supervised = 0

    def add(self, document: Encoded) -> None:
        """Append a document."""
        self._pending.append(document)
        self._pending_tokens += len(document.tokens)
        self._documents += 1
        self._tokens += len(document.tokens)
        self._supervised += int(document.supervised.sum())
        if self._pending_tokens >= self._shard_tokens:
            self._flush()

    def close(self, *, tokenizer: str, vocab_size: int, dropped: dict[str, int], sources: list[str]) -> Manifest:
        """Write what is left, then the manifest."""
        self._flush()
        manifest = Manifest(
            version=VERSION,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
            documents=self._documents,
            tokens=self._tokens,
            supervised_tokens=self._supervised,
            dropped=dropped,
            shards=self._shards,
            sources=sources,
        )
        unfinished = self._folder / f"{MANIFEST}.tmp"
        unfinished.write_text(json.dumps(dataclasses.asdict(manifest), indent=1) + "\n", "utf-8")
        os.replace(unfinished, self._folder / MANIFEST)
        return manifest

    def _flush(self) -> None:
        if not self._pending:
            return
        name = f"shard-{len(self._shards):05d}.safetensors"
        save_file(
            {
                "tokens": np.concatenate([d.tokens for d in self._pending]).astype(np.int32),
                "supervised": np.concatenate([d.supervised for d in self._pending]).astype(np.uint8),
                "offsets": np.cumsum([0, *(len(d.tokens) for d in self._pending)]).astype(np.int64),
            },
            self._folder / name,
        )
        self._shards.append(name)
        self._pending, self._pending_tokens = [], 0


class Documents:
    """The documents of a prepared folder, in memory (5 bytes a token), numbered from 0.

    Raises:
        DataError: the folder is not prepared, unfinished, damaged, of another version, or made by another tokenizer.
    """

    def __init__(self, folder: Path, *, tokenizer: str | None = None) -> None:
        self.manifest = read_manifest(folder)
        if tokenizer is not None and tokenizer != self.manifest.tokenizer:
            raise DataError(
                f"{folder} was prepared with another tokenizer (hash {self.manifest.tokenizer[:12]}, "
                f"now {tokenizer[:12]}); prepare it again"
            )
        self._shards = [_read_shard(folder / name) for name in self.manifest.shards]
        self.lengths = np.concatenate([np.empty(0, np.int64), *(np.diff(s["offsets"]) for s in self._shards)])
        self._first = np.cumsum([0, *(len(s["offsets"]) - 1 for s in self._shards)])
        if (len(self.lengths), int(self.lengths.sum())) != (self.manifest.documents, self.manifest.tokens):
            raise DataError(
                f"{folder} has {len(self.lengths)} documents of {int(self.lengths.sum())} tokens, but its manifest "
                f"says {self.manifest.documents} of {self.manifest.tokens}; prepare it again"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def identity(self) -> str:
        """What tells these documents from others: their lengths and tokenizer."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()[:12]
        tokens, tokenizer = self.manifest.tokens, self.manifest.tokenizer[:12]
        return f"{len(self)} documents, {tokens} tokens, lengths {digest}, tokenizer {tokenizer}"

    def __getitem__(self, number: int) -> Encoded:
        if not 0 <= number < len(self):
            raise IndexError(f"document {number} of {len(self)}")
        shard = int(np.searchsorted(self._first, number, side="right")) - 1
        arrays, i = self._shards[shard], number - int(self._first[shard])
        part = slice(*arrays["offsets"][i : i + 2].tolist())
        return Encoded(arrays["tokens"][part], arrays["supervised"][part].astype(np.bool_))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        DataError: there is none, or it is not one of ours.
    """
    path = folder / MANIFEST
    try:
        record: Any = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no {MANIFEST}; make it with `python -m dflash_train prepare -o {folder}`"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} cannot be read: {error}; prepare it again") from error
    fields = {f.name: f.type for f in dataclasses.fields(Manifest)}
    if not isinstance(record, dict) or record.get("version") != VERSION:
        version = record.get("version") if isinstance(record, dict) else None
        raise DataError(f"{path} is of version {version!r}, this program reads {VERSION}; prepare it again")
    kinds = {"int": int, "str": str, "dict[str, int]": dict, "list[str]": list}
    for name, kind in fields.items():
        if not isinstance(record.get(name), kinds[str(kind)]):
            raise DataError(f"{path}: {name} must be {kind}, got {record.get(name)!r}; prepare it again")
    if not all(isinstance(name, str) and Path(name).name == name for name in record["shards"]):
        raise DataError(f"{path}: shards must be plain file names, got {record['shards']!r}; prepare it again")
    return Manifest(**{name: record[name] for name in fields})


def _read_shard(path: Path) -> dict[str, np.ndarray]:
    try:
        arrays: dict[str, np.ndarray] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path} cannot be read: {error}; prepare it again") from error
    kinds = {name: (str(array.dtype), array.ndim) for name, array in arrays.items()}
    offsets = arrays.get("offsets", np.zeros(0))
    if (
        kinds != {"tokens": ("int32", 1), "supervised": ("uint8", 1), "offsets": ("int64", 1)}
        or not len(offsets)
        or offsets[0] != 0
        or (np.diff(offsets) < 0).any()
        or not offsets[-1] == len(arrays["tokens"]) == len(arrays["supervised"])
    ):
        raise DataError(f"{path} is not a shard of documents; prepare it again")
    return arrays
