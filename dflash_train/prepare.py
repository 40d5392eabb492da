"""`prepare`: conversations to shards of tokens."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dflash_train.anchors import admissible_anchors
from dflash_train.chat_tokenizers import ChatTokenizer, Encoded
from dflash_train.conversations import DataError, Sample, read_samples
from dflash_train.data import Manifest, ShardWriter


def prepare(
    inputs: Sequence[Path],
    tokenizer: ChatTokenizer,
    output: Path,
    *,
    max_tokens: int = 32768,
    skip_bad: bool = False,
    overwrite: bool = False,
    report: Callable[[str], None] = lambda message: None,
) -> Manifest:
    """Tokenize JSONL files into a folder of shards; a sample without a supervised token, or without room for one block,
    is dropped and counted.

    The folder appears under its name only when it is complete.

    Args:
        inputs: JSONL files, read in order.
        tokenizer: from `load_tokenizer`.
        output: folder to make.
        max_tokens: longer samples are bad input.
        skip_bad: count bad input under `bad` and go on, telling each through `report`; else the first one stops.
        overwrite: replace an existing folder.
        report: told of each bad line that is skipped.

    Raises:
        DataError: bad input (file, line and reason), no sample left, or `output` exists.
    """
    if output.exists() and not overwrite:
        raise DataError(f"{output} exists; pass --overwrite or another -o DIR")
    unfinished = output.with_name(output.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        manifest = _write(inputs, tokenizer, unfinished, max_tokens, skip_bad, report)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if output.exists():
        shutil.rmtree(output)
    unfinished.rename(output)
    return manifest


def _write(
    inputs: Sequence[Path],
    tokenizer: ChatTokenizer,
    folder: Path,
    max_tokens: int,
    skip_bad: bool,
    report: Callable[[str], None],
) -> Manifest:
    writer = ShardWriter(folder)
    dropped: Counter[str] = Counter()
    kept = 0
    for path in inputs:
        for sample in tqdm(read_samples(path), desc=path.name, unit=" samples", disable=None):
            try:
                if isinstance(sample, DataError):
                    raise sample
                document = encode_sample(sample, tokenizer, max_tokens)
            except DataError as error:
                if not skip_bad:
                    raise DataError(f"{error}; fix it, or pass --skip-bad to go on without such samples") from error
                report(str(error))
                dropped["bad"] += 1
                continue
            if not document.supervised.any():
                dropped["no supervised token"] += 1
            elif not len(admissible_anchors(document.supervised)):
                dropped["no two supervised tokens in a row"] += 1
            else:
                writer.add(document)
                kept += 1
    if not kept:
        counts = ", ".join(f"{reason}: {count}" for reason, count in dropped.items()) or "no line at all"
        raise DataError(
            f"no sample of {', '.join(map(str, inputs))} can be trained on ({counts}); "
            "conversations need assistant turns, which `regenerate` can write"
        )
    return writer.close(
        tokenizer=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        dropped=dict(dropped),
        sources=[path.name for path in inputs],
    )


def encode_sample(sample: Sample, tokenizer: ChatTokenizer, max_tokens: int) -> Encoded:
    """Tokens of a sample and which of them are supervised.

    Raises:
        DataError: the chat template refuses it, or it has more than `max_tokens` tokens.
    """
    try:
        if sample.text is not None:
            document = tokenizer.encode_text(sample.text)
        else:
            document = tokenizer.encode_conversation(sample.messages)
    except DataError as error:
        raise DataError(f"{sample.place}: {error}") from error
    if len(document.tokens) > max_tokens:
        raise DataError(f"{sample.place}: {len(document.tokens)} tokens are more than --max-tokens {max_tokens}")
    assert document.tokens.shape == document.supervised.shape
    assert document.supervised.dtype == np.bool_
    return document
