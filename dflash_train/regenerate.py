"""`regenerate`: answers written by the target itself, which is what a drafter is to predict.

Prompts are batched by length, in a plan that follows from the input alone; every batch has its own seed. So a run that
was broken off goes on with the next batch and writes what an unbroken one would have written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from dflash_train.chat_tokenizers import ChatTokenizer
from dflash_train.conversations import DataError, Message, read_samples
from dflash_train.targets import Target


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How answers are drawn; written into every line of the output."""

    temperature: float = 0.7
    """0 for greedy."""
    max_new_tokens: int = 1024
    """Longest answer, in tokens."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise DataError(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if not 0 <= self.seed < 2**63:
            raise DataError(f"seed must lie in 0 … 2**63-1, got {self.seed}")
        if self.max_new_tokens < 1:
            raise DataError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")


def regenerate(
    inputs: Sequence[Path],
    target: Target,
    tokenizer: ChatTokenizer,
    output: Path,
    *,
    sampling: Sampling,
    batch_size: int = 32,
    overwrite: bool = False,
) -> int:
    """Let the target answer every user turn of the inputs; one JSON line per conversation: `messages`, `index` (its
    number in the input), `finish` (stop or length, of the last answer), `target`, `temperature`, `seed`.

    Assistant turns of the input are dropped; a conversation of several user turns is answered turn by turn. Lines come
    in the order of batches, shortest prompts first. An unfinished output of the same settings is continued.

    Returns:
        Lines written by this call.

    Raises:
        DataError: bad input, or `output` was made with other settings.
    """
    prompts, lengths = _read_prompts(inputs, tokenizer)
    settings = {
        "version": 1,
        "target": target.name,
        "tokenizer": tokenizer.fingerprint,
        "batch_size": batch_size,
        "prompts": hashlib.sha256(json.dumps([[asdict(m) for m in p] for p in prompts]).encode()).hexdigest(),
        **asdict(sampling),
    }
    done = _resume(output, settings, overwrite)
    written = 0
    with output.open("ab") as file:
        for number, batch in enumerate(
            tqdm(list(_batches(lengths, batch_size)), desc="regenerate", unit=" batches", disable=None)
        ):
            if number < done:
                continue
            conversations, finished = _answer(
                batch, prompts, target, tokenizer, sampling, _batch_seed(sampling.seed, number)
            )
            lines = b""
            for index, messages, finish in zip(batch, conversations, finished, strict=True):
                record = {
                    "messages": [asdict(message) for message in messages],
                    "index": index,
                    "batch": number,
                    "finish": finish,
                    "target": Path(target.name).name,
                    "temperature": sampling.temperature,
                    "seed": sampling.seed,
                }
                lines += json.dumps(record, ensure_ascii=False).encode() + b"\n"
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
            written += len(batch)
    return written


def _read_prompts(inputs: Sequence[Path], tokenizer: ChatTokenizer) -> tuple[list[list[Message]], list[int]]:
    """Per conversation, the turns that are given (all but the assistant's, which are to be written) and the tokens up
    to the first answer."""
    prompts, lengths = [], []
    for path in inputs:
        for sample in read_samples(path):
            if isinstance(sample, DataError):
                raise sample
            given = [message for message in sample.messages if message.role != "assistant"]
            first = next((i for i, message in enumerate(given) if message.role == "user"), None)
            if first is None:
                raise DataError(f"{sample.place}: has no user turn to answer")
            try:
                lengths.append(len(tokenizer.encode_prompt(given[: first + 1])))
            except DataError as error:
                raise DataError(f"{sample.place}: {error}") from error
            prompts.append(given)
    if not prompts:
        raise DataError(f"{', '.join(map(str, inputs))} has no prompt: no line at all")
    return prompts, lengths


def _batch_seed(seed: int, batch: int) -> int:
    """Unlike `seed + batch`, no batch of one seed draws as another batch of the next seed does."""
    return int(np.random.Philox(key=seed, counter=[0, batch, 0, 2]).random_raw()) >> 1


def _batches(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Prompts of similar length together, shortest first; ties in input order."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def _resume(output: Path, settings: dict[str, Any], overwrite: bool) -> int:
    """Check the settings beside `output`, cut it back to whole batches, and return how many there are."""
    beside = output.with_name(output.name + ".settings.json")
    if overwrite or not output.exists():
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_bytes(b"")
        beside.write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
        return 0
    try:
        earlier = json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{output} exists without readable settings beside it; pass --overwrite or another -o"
        ) from error
    for name, value in settings.items():
        if not isinstance(earlier, dict) or earlier.get(name) != value:
            was = earlier.get(name) if isinstance(earlier, dict) else None
            raise DataError(f"{output} was made with {name} = {was!r}, now {value!r}; pass --overwrite or another -o")
    # Only whole lines count. The last batch may lack lines, so it is always written again.
    batches: list[tuple[int, bytes]] = []
    for number, line in enumerate(output.read_bytes().splitlines(keepends=True), 1):
        if line.endswith(b"\n"):
            try:
                batches.append((int(json.loads(line)["batch"]), line))
            except (ValueError, KeyError, TypeError) as error:
                raise DataError(f"{output}:{number}: not a line of ours; pass --overwrite or another -o") from error
    done = max((batch for batch, _ in batches), default=0)
    kept = b"".join(line for batch, line in batches if batch < done)
    unfinished = output.with_name(output.name + ".tmp")
    unfinished.write_bytes(kept)
    os.replace(unfinished, output)
    return done


def _answer(
    batch: Sequence[int],
    prompts: Sequence[Sequence[Message]],
    target: Target,
    tokenizer: ChatTokenizer,
    sampling: Sampling,
    seed: int,
) -> tuple[list[list[Message]], list[str]]:
    """The conversations of a batch with every user turn answered, and how each ended."""
    waiting = {index: list(prompts[index]) for index in batch}
    conversations: dict[int, list[Message]] = {index: [] for index in batch}
    finish = dict.fromkeys(batch, "stop")
    special = SpecialTokens(tokenizer.stop_ids, tokenizer.suppressed_ids, tokenizer.pad_id)
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        while any(waiting.values()):
            asked = [index for index in batch if waiting[index]]
            for index in asked:
                while waiting[index]:
                    message = waiting[index].pop(0)
                    conversations[index].append(message)
                    if message.role == "user":
                        break
            # What follows the last user turn (a tool's result, say) has no answer of its own.
            asked = [index for index in asked if conversations[index][-1].role == "user"]
            ids = [tokenizer.encode_prompt(conversations[index]) for index in asked]
            for group in _groups(ids, equal_lengths=not target.packs_documents):
                answers = generate(target, [ids[i] for i in group], special, sampling)
                for i, (answer, ended) in zip(group, answers, strict=True):
                    text = tokenizer.decode(answer[:-1] if ended else answer)
                    conversations[asked[i]].append(Message("assistant", text))
                    finish[asked[i]] = "stop" if ended else "length"
    return [conversations[index] for index in batch], [finish[index] for index in batch]


def _groups(ids: Sequence[Sequence[int]], *, equal_lengths: bool) -> list[list[int]]:
    """All at once, or only prompts of one length together: padding on the left would enter a recurrent state."""
    if not equal_lengths:
        return [list(range(len(ids)))] if ids else []
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(ids):
        groups.setdefault(len(prompt), []).append(i)
    return list(groups.values())


class SpecialTokens(NamedTuple):
    """What `generate` reads of a tokenizer."""

    stop_ids: tuple[int, ...]
    suppressed_ids: tuple[int, ...]
    pad_id: int


@torch.no_grad()
def generate(
    target: Target, prompts: Sequence[Sequence[int]], special: SpecialTokens, sampling: Sampling, *, top_p: float = 1.0
) -> list[tuple[list[int], bool]]:
    """Answers of a target to prompts of tokens, padded on the left; per answer its tokens with the end token, and whether
    it ended by itself. Draws from torch's global generators."""
    from transformers import GenerationConfig

    make_config: Any = GenerationConfig

    width = max(map(len, prompts))
    tokens = torch.full((len(prompts), width), special.pad_id)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    mask = torch.arange(width)[None] >= width - lengths[:, None]
    greedy = sampling.temperature == 0
    model: Any = target.model
    out = model.generate(
        input_ids=tokens.to(target.device),
        attention_mask=mask.long().to(target.device),
        generation_config=make_config(
            max_new_tokens=sampling.max_new_tokens,
            do_sample=not greedy,
            eos_token_id=list(special.stop_ids) or None,
            pad_token_id=special.pad_id,
            suppress_tokens=list(special.suppressed_ids) or None,
            **({} if greedy else {"temperature": sampling.temperature, "top_k": 0, "top_p": top_p}),
        ),
    )
    answers = []
    for ids in out[:, width:].tolist():
        end = next((i for i, token in enumerate(ids) if token in special.stop_ids), None)
        answers.append((ids if end is None else ids[: end + 1], end is not None))
    return answers
