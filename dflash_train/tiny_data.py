"""Data for the `tiny` target, made by itself: random prompts, its own answers, prepared as any other data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from dflash_train.chat_tokenizers import ByteTokenizer
from dflash_train.data import Manifest
from dflash_train.prepare import prepare
from dflash_train.regenerate import Sampling, regenerate
from dflash_train.targets import Target


def make_tiny_data(
    target: Target,
    folder: Path,
    *,
    num_documents: int = 64,
    answer_tokens: int = 80,
    temperature: float = 0.5,
    seed: int = 0,
) -> Manifest:
    """Prepare `folder` with documents of a few random letters and the target's answer.

    A folder that exists is replaced.
    """
    letters = np.random.Philox(key=seed).random_raw(num_documents * 6).reshape(num_documents, 6) % 26
    prompts = folder.with_name(folder.name + ".prompts.jsonl")
    prompts.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"turns": ["".join(chr(97 + int(i)) for i in row)]}) for row in letters]
    prompts.write_text("\n".join(lines) + "\n", "utf-8")
    answers = folder.with_name(folder.name + ".answers.jsonl")
    sampling = Sampling(temperature=temperature, max_new_tokens=answer_tokens, seed=seed)
    regenerate([prompts], target, ByteTokenizer(), answers, sampling=sampling, batch_size=64, overwrite=True)
    return prepare([answers], ByteTokenizer(), folder, overwrite=True)
