"""The stages that `road` and `losses` share: prompts, target, answers, data, drafters trained for a time, and their tau."""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.specforge_side import make_online
from dflash_train.chat_tokenizers import ChatTokenizer, TemplateTokenizer, load_tokenizer
from dflash_train.config import RunConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.data import Documents
from dflash_train.decode import DecodeConfig, Decoder
from dflash_train.evaluate import Prompt, Row, Way, config_for, measure, read_prompts
from dflash_train.prepare import prepare
from dflash_train.regenerate import Sampling, regenerate
from dflash_train.replica import learning_rate
from dflash_train.targets import Target, load_target
from dflash_train.trainer import train

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
PROBE_STEPS = 24
SPECFORGE_BATCH, SPECFORGE_ANCHORS = 48, 40


class Clock:
    """Prints what each stage took, and says when the time for new ones is over."""

    def __init__(self, limit: float) -> None:
        self._began = time.perf_counter()
        self._limit = limit
        self.seconds: dict[str, float] = {}

    def say(self, message: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {message}", flush=True)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 2)
        self.say(f"{name}: {self.seconds[name]:.1f} s")

    def is_over(self, what: str) -> bool:
        """Whether to leave `what` out, which is then said."""
        over = time.perf_counter() - self._began > self._limit
        if over:
            self.say(f"{what}: left out, the limit of {self._limit:.0f} s is reached")
        return over


def select_lines(source: str, folder: Path) -> Path:
    """A file of its own with the lines that FILE:FIRST-LAST names, counted from 1; FILE alone is itself."""
    name, _, span = source.rpartition(":")
    first, dash, last = span.partition("-")
    if not name or not dash or not (first + last).isdigit():
        return Path(source)
    lines = Path(name).read_text("utf-8").splitlines(keepends=True)[int(first) - 1 : int(last)]
    out = folder / f"{Path(name).stem}-{first}-{last}.jsonl"
    out.write_text("".join(lines), "utf-8")
    return out


def save_weights(path: str, folder: Path) -> None:
    """A target as a folder of bf16 weights."""
    loaded: Any = load_target(TargetConfig(path=path, dtype="bfloat16"), ()).model
    # What came from a .gguf file counts as quantised there and cannot be saved: a model of its own takes the weights.
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: Any = type(loaded)(config).to(torch.bfloat16)
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)


def convert_target(path: str, template: str | None, folder: Path) -> str:
    """A .gguf file as a folder of bf16 weights and a fast tokenizer, made once; anything else is what it is."""
    if not path.endswith(".gguf"):
        return path
    if not (folder / "tokenizer.json").is_file():
        tokenizer = load_tokenizer(path, template)
        assert isinstance(tokenizer, TemplateTokenizer)
        save_weights(path, folder)
        tokenizer._tokenizer.save_pretrained(folder)
    return str(folder)


def words_of(target: str, template: str | None) -> ChatTokenizer:
    """The tokenizer of a target."""
    return load_tokenizer("bytes" if target == "tiny" else target, template)


def write_answers(
    prompts: Path, target: Target, words: ChatTokenizer, folder: Path, *,
    temperatures: Sequence[float], tokens: int, batch_size: int, seconds: float,
) -> list[Path]:  # fmt: skip
    """Rounds of answers to all prompts, each with its own seed, as many as fit into the seconds (one at least)."""
    began = time.perf_counter()
    written: list[Path] = []
    while True:
        number = len(written)
        sampling = Sampling(temperature=temperatures[number % len(temperatures)], max_new_tokens=tokens, seed=number)
        out = folder / f"answers-{number}.jsonl"
        regenerate([prompts], target, words, out, sampling=sampling, batch_size=batch_size, overwrite=True)
        written.append(out)
        spent = time.perf_counter() - began
        if spent + spent / len(written) > seconds:
            return written


def prepare_answers(answers: Sequence[Path], words: ChatTokenizer, folder: Path) -> str:
    """Shards of the answers; what they are, in words."""
    manifest = prepare(answers, words, folder, skip_bad=True, overwrite=True)
    return f"{manifest.documents} documents, {manifest.tokens} tokens, {manifest.supervised_tokens} supervised"


def run_config(preset: str, target: str, data: Path, dtype: str, overrides: Sequence[str]) -> RunConfig:
    """Settings of a run on the one device."""
    settings = [f"target.path={target}", f"data.path={data}", f"target.dtype={dtype}", f"train.dtype={dtype}"]
    devices = [f"train.{role}_devices={DEVICE}" for role in ("target", "drafter")]
    return load_config(preset, [*settings, *devices, "train.save_every=1000000", *overrides])


def step_seconds(config: RunConfig, folder: Path) -> float:
    """Median step of a short run, compiles and warm-up not counted."""
    times: list[float] = []
    probe = replace(config, train=replace(config.train, steps=PROBE_STEPS, log_every=1))
    train(probe, folder, report=lambda line: times.append(time.perf_counter()) if line.startswith("step ") else None)
    return statistics.median(np.diff(times)[PROBE_STEPS // 4 :])


def train_for(config: RunConfig, folder: Path, seconds: float, step_s: float, clock: Clock) -> tuple[float, int]:
    """Train for about `seconds` of steps; seconds from the warm-up to the last step, and steps."""
    steps = max(10, int(seconds / step_s))
    config = replace(config, train=replace(config.train, steps=steps, log_every=max(1, steps // 5)))
    times: list[float] = []

    def report(line: str) -> None:
        if line.startswith(("warmed up", "step ")):
            times.append(time.perf_counter())
            clock.say("  " + line.split(" | lr")[0])

    train(config, folder, report=report)
    return times[-1] - times[0], steps


def train_specforge(config: RunConfig, target: Target, seconds: float, clock: Clock) -> tuple[dict[str, Tensor], int]:
    """SpecForge's core for `seconds` of steps on the same data, the target's pass in the same loop, one document in a row.

    Its learning rate follows our schedule over the time; float32 master weights, as in its own trainer.

    Raises:
        ImportError: it is not installed.
    """
    documents = Documents(Path(config.data.path))
    longest = min(config.data.row_length, max(len(documents[i].tokens) for i in range(len(documents))))
    width = -(-longest // 128) * 128
    torch.manual_seed(config.train.seed)
    attention = "flex_attention" if DEVICE.type == "cuda" else "sdpa"
    online = make_online(config, target.vocabulary(), SPECFORGE_ANCHORS, attention, 0)
    dtype = getattr(torch, config.train.dtype)
    online.draft_model = online.draft_model.to(DEVICE)
    masters = {name: weight.detach().clone().float() for name, weight in online.draft_model.named_parameters()}
    online.draft_model = online.draft_model.to(dtype)
    weights = dict(online.draft_model.named_parameters())
    settings = config.train
    optimizer = torch.optim.AdamW(
        masters.values(), lr=settings.learning_rate, betas=(settings.beta1, settings.beta2),
        weight_decay=settings.weight_decay, fused=DEVICE.type == "cuda",
    )  # fmt: skip
    order = np.random.Generator(np.random.Philox(key=config.data.seed)).permutation(len(documents))
    began = time.perf_counter()
    step, warm_ups = 0, 2
    shares = 1000
    while step < warm_ups or time.perf_counter() - began < seconds:
        if step == warm_ups:  # compiled by now
            began = time.perf_counter()
        share = 0.0 if step < warm_ups else (time.perf_counter() - began) / seconds
        numbers = [int(order[(step * SPECFORGE_BATCH + i) % len(order)]) for i in range(SPECFORGE_BATCH)]
        tokens, mask, owners = padded(documents, numbers, width)
        states = target.states(tokens, owners, torch.arange(width, device=DEVICE).expand_as(tokens))
        loss, _, _ = online(tokens, states.taps.to(dtype), mask)
        loss.backward()
        for name, master in masters.items():
            gradient = weights[name].grad
            master.grad = None if gradient is None else gradient.float()
            weights[name].grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), settings.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(int(share * shares), replace(settings, steps=shares))
        optimizer.step()
        with torch.no_grad():
            for name, master in masters.items():
                weights[name].copy_(master)
        if step % 200 == 0:
            clock.say(f"  SpecForge step {step}, loss {float(loss.detach()):.3f}")
        step += 1
        if DEVICE.type == "cuda" and step % 4 == 0:
            torch.cuda.synchronize()
    return {name: master.detach().cpu() for name, master in masters.items()}, step - warm_ups


def padded(documents: Documents, numbers: Sequence[int], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, loss mask and documents [rows, width], one document in a row."""
    shape = (len(numbers), width)
    tokens, mask, owners = np.zeros(shape, np.int64), np.zeros(shape, np.float32), np.full(shape, -1, np.int64)
    for row, number in enumerate(numbers):
        document = documents[number]
        end = min(width, len(document.tokens))
        tokens[row, :end], mask[row, :end], owners[row, :end] = document.tokens[:end], document.supervised[:end], 0
    return torch.from_numpy(tokens).to(DEVICE), torch.from_numpy(mask).to(DEVICE), torch.from_numpy(owners).to(DEVICE)


def read_judges(files: Sequence[Path], words: ChatTokenizer, each: int) -> list[Prompt]:
    """The first prompts of each file."""
    return [prompt for path in files for prompt in read_prompts(path, words, each)]


def judge(
    decoder: Decoder, prompts: Sequence[Prompt], words: ChatTokenizer, ways: Sequence[Way], temperature: float,
    tokens: int, batch_size: int, *, timed: bool = False,
) -> list[Row]:  # fmt: skip
    """Rows of all ways at one temperature; speeds mean something if `timed`."""
    config = config_for(words, DecodeConfig(max_new_tokens=tokens, temperature=temperature))
    return measure(decoder, prompts, ways, config, batch_size=batch_size, pad_id=words.pad_id, warm_up=timed)


def tau(row: Row, temperature: float) -> float:
    """Above temperature 0 of the whole text, at 0 before its first repeated 16 tokens."""
    value = row.tau if temperature else row.tau_before_loop
    return float("nan") if value is None else value


def write(path: str | None, result: dict[str, Any]) -> None:
    """The figures so far; called after every stage, so that a run that is cut off leaves them."""
    if path:
        Path(path).write_text(json.dumps(result, indent=1), "utf-8")
