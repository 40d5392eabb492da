"""`eval`: acceptance length and speed of a trained drafter, mode by mode on the same prompts.

What a drafter is worth shows here and not in its training accuracy: tau is counted on text that the target writes while
it is drafted for. Every speed-up is against `ar`, plain decoding by the same loop and the same caches.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from dflash_train.chat_tokenizers import ChatTokenizer
from dflash_train.config import ConfigError, DrafterConfig
from dflash_train.conversations import DataError, Sample, read_samples
from dflash_train.decode import MODES, DecodeConfig, Decoder, Generation, Mode
from dflash_train.drafter import Drafter
from dflash_train.drafter_files import read_run
from dflash_train.regenerate import Sampling, SpecialTokens, generate
from dflash_train.targets import Target, load_target

EvalMode = Literal[Mode, "generate"]
"""A mode of decoding, or the `generate` of `transformers` with its own cache."""
EVAL_MODES: tuple[EvalMode, ...] = (*MODES, "generate")

_STEPS_BEFORE_TREE = 4
LOOP_TOKENS = 16
"""A text loops from where it repeats this many tokens in a row: any copier predicts the rest."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt to decode from."""

    task: str
    """Name of the file that it came from, without its ending."""
    tokens: list[int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One mode on one task (or on all of them)."""

    mode: EvalMode
    budget: int | None
    """Drafted nodes of the tree; None but for ddtree."""
    task: str
    """`all` for the sum."""
    prompts: int
    tokens: int
    """Written, first tokens included."""
    steps: int
    """Per prompt and pass of the target, prompts' passes not included."""
    tau: float | None
    """Tokens per step: accepted drafts + 1. None without a step."""
    tau_before_loop: float | None
    """The same over the steps before a text first repeats 16 tokens in a row."""
    acceptance_by_position: list[float | None]
    """[D] share of steps in which at least 1, 2, … drafts were accepted."""
    tokens_per_second: float
    """Tokens of steps over time of steps, whole batches; prompts' passes and first tokens are in neither."""
    speedup: float | None
    """tokens_per_second over that of `ar` on the same task; None if `ar` was not run."""
    speedup_over_generate: float | None
    """The same over `generate` of `transformers`."""
    same_as_ar: int | None
    """Prompts whose greedy text is that of `ar`, token by token; None if sampled or `ar` was not run."""
    widest_gap: float | None
    """Where texts differ from those of `ar`: the target's logits of the two tokens at the first difference, how far apart
    they are as a share of the larger, at most. Of the size of rounding: a tie. None if no text differs."""


class Way(NamedTuple):
    """What is measured at once."""

    mode: EvalMode
    budget: int | None


def evaluate(
    run: Path,
    prompt_files: Sequence[Path],
    tokenizer: Callable[[str], ChatTokenizer],
    *,
    modes: Sequence[EvalMode] = ("ar", "chain", "ddtree", "lookup"),
    budgets: Sequence[int] = (64,),
    config: DecodeConfig | None = None,
    batch_size: int = 1,
    limit: int | None = None,
    device: torch.device | str = "cpu",
    compile: bool = False,
) -> dict[str, Any]:
    """Decode every prompt in every mode; returns the report that `--json` writes.

    Args:
        run: folder of a run or of one of its steps; its settings name the target.
        prompt_files: JSON lines as for `prepare`; of conversations all turns before the last answer are the prompt, and
            of plain text all of it. The files' names are the tasks.
        tokenizer: makes the tokenizer of a target, given its path.
        modes: in the order in which they run.
        budgets: trees of each size are a mode of their own.
        config: sampling and length; stop and suppressed tokens are the tokenizer's.
        batch_size: prompts at once.
        limit: first prompts of each file.
        device: of target and drafter.
        compile: the passes of target and drafter; compiles happen before the clock runs.

    Raises:
        ConfigError: the run, a mode or a budget.
        DataError: the prompts.
        TargetError: the target.
    """
    ways = list_ways(modes, budgets)
    settings, weights = read_run(run)
    words = tokenizer(settings.target.path)
    prompts = [prompt for path in prompt_files for prompt in read_prompts(path, words, limit)]
    config = config_for(words, config or DecodeConfig())
    target = load_target(settings.target, settings.drafter.taps, device)
    decoder = decoder_of(target, settings.drafter, weights, compile=compile)
    rows = measure(decoder, prompts, ways, config, batch_size=batch_size, pad_id=words.pad_id)
    return {
        "version": 1,
        "run": str(run),
        "target": settings.target.path,
        "prompts": [str(path) for path in prompt_files],
        "batch_size": batch_size,
        "block_size": settings.drafter.block_size,
        "decode": asdict(config),
        "compiled": compile,
        "dtype": str(target.vocabulary().embedding.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else platform.machine(),
        "torch": torch.__version__,
        "rows": [asdict(row) for row in rows],
        "tree": _show_tree(decoder, prompts[0], ways, config, words),
    }


def list_ways(modes: Sequence[str], budgets: Sequence[int]) -> list[Way]:
    """Modes, `ddtree` once for each budget.

    Raises:
        ConfigError: an unknown mode, or a budget below 1.
    """
    unknown = [mode for mode in modes if mode not in EVAL_MODES]
    if unknown or not modes:
        raise ConfigError(f"--mode takes {','.join(EVAL_MODES)}, or some of them; got {','.join(unknown) or 'nothing'}")
    bad = [budget for budget in budgets if budget < 1]
    if bad or ("ddtree" in modes and not budgets):
        raise ConfigError(f"--budget takes numbers of drafted nodes from 1 on, such as 16,64,256; got {bad or 'nothing'}")
    return [
        Way(mode, budget)
        for mode in cast(Sequence[EvalMode], modes)
        for budget in (budgets if mode == "ddtree" else [None])
    ]


def config_for(tokenizer: ChatTokenizer, config: DecodeConfig) -> DecodeConfig:
    """`config` with the tokenizer's stop and suppressed tokens."""
    return replace(config, stop_ids=tokenizer.stop_ids, suppressed_ids=tokenizer.suppressed_ids)


def decoder_of(
    target: Target, config: DrafterConfig, weights: Mapping[str, Tensor], *, compile: bool = False
) -> Decoder:
    """A decoder with a drafter of these weights, on the target's device and in its type.

    Raises:
        ConfigError: the drafter does not fit the target.
        TargetError: the target cannot be decoded with.
    """
    drafter = Drafter(config)
    drafter.load_state_dict(dict(weights))
    dtype = target.vocabulary().embedding.dtype
    return Decoder(target, drafter.to(target.device, dtype).eval().requires_grad_(False), compile=compile)


def measure(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    ways: Sequence[Way],
    config: DecodeConfig,
    *,
    batch_size: int = 1,
    pad_id: int = 0,
    warm_up: bool = True,
) -> list[Row]:
    """Decode the prompts in every way: a row for each, and with several tasks one more for each task.

    With `warm_up` the first batch of each way runs once before the clock does: kernels are chosen, and memory is taken, at
    the first use. Where only tau counts it can be left out.
    """
    batches = list(_batches(prompts, batch_size))
    measured: dict[Way, list[_Measured]] = {}
    for way in ways:
        if warm_up:
            _measure(decoder, batches[0], way, config, pad_id)
        measured[way] = [_measure(decoder, batch, way, config, pad_id) for batch in batches]
    tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
    plain, theirs = measured.get(Way("ar", None)), measured.get(Way("generate", None))
    greedy = not config.temperature
    if greedy and plain is not None:
        for batch in measured.values():
            _find_gaps(decoder, batch, plain, batches)
    return [
        _row(way, task, batch, plain, theirs, decoder.num_lookup, greedy=greedy)
        for way, batch in measured.items()
        for task in (["all", *tasks] if len(tasks) > 1 else ["all"])
    ]


def read_prompts(path: Path, tokenizer: ChatTokenizer, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file.

    Raises:
        DataError: a bad line, a conversation that asks nothing, or no prompt at all.
    """
    prompts: list[Prompt] = []
    for sample in read_samples(path):
        if limit is not None and len(prompts) == limit:
            break
        if isinstance(sample, DataError):
            raise sample
        prompts.append(Prompt(task=path.stem, tokens=_prompt_tokens(sample, tokenizer)))
    if not prompts:
        raise DataError(f"{path} has no prompt: no line at all")
    return prompts


def format_table(report: dict[str, Any]) -> str:
    """The rows of a report as a table for people."""
    columns = f"{'prompts':>8}{'tau':>8}{'no loop':>9}{'tok/s':>10}{'speed-up':>10}{'x generate':>12}{'same':>8}"
    lines = [f"{'mode':<12}{'task':<16}{columns}"]
    for row in report["rows"]:
        way = row["mode"] if row["budget"] is None else f"{row['mode']} {row['budget']}"
        speedup, over = ("" if row[name] is None else f"{row[name]:.2f}x" for name in ("speedup", "speedup_over_generate"))
        tau, before = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("tau", "tau_before_loop"))
        same = "" if row["same_as_ar"] is None else f"{row['same_as_ar']}/{row['prompts']}"
        gap = "" if row["widest_gap"] is None else f" {row['widest_gap']:.2%}"
        lines.append(
            f"{way:<12}{row['task'][:15]:<16}{row['prompts']:>8}{tau:>8}{before:>9}"
            f"{row['tokens_per_second']:>10,.0f}{speedup:>10}{over:>12}{same:>8}{gap}"
        )
    return "\n".join(lines)


def steps_before_loop(generation: Generation) -> int:
    """Steps that end before the text first repeats `LOOP_TOKENS` tokens in a row that stood in it before."""
    seen: set[tuple[int, ...]] = set()
    end = len(generation.tokens) + 1
    for start in range(len(generation.tokens) - LOOP_TOKENS + 1):
        gram = tuple(generation.tokens[start : start + LOOP_TOKENS])
        if gram in seen:
            end = start + LOOP_TOKENS
            break
        seen.add(gram)
    written = 1  # the first token belongs to no step
    for number, emitted in enumerate(generation.emitted):
        written += emitted
        if written >= end:
            return number
    return len(generation.emitted)


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """One batch in one mode: all of one task."""

    task: str
    generations: list[Generation]
    seconds: float
    gaps: list[float] = field(default_factory=list)
    """As `Row.widest_gap`, of each text that differs from that of `ar`."""


def _prompt_tokens(sample: Sample, tokenizer: ChatTokenizer) -> list[int]:
    if sample.text is not None:
        tokens = [int(token) for token in tokenizer.encode_text(sample.text).tokens]
        while tokens and tokens[-1] in tokenizer.stop_ids:  # the text is to be continued
            tokens.pop()
    else:
        messages = list(sample.messages)
        while messages and messages[-1].role == "assistant":
            messages.pop()
        if not messages:
            raise DataError(f"{sample.place}: has no user turn to answer")
        try:
            tokens = tokenizer.encode_prompt(messages)
        except DataError as error:
            raise DataError(f"{sample.place}: {error}") from error
    if not tokens:
        raise DataError(f"{sample.place}: is empty; a prompt needs at least one token")
    return tokens


def _batches(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Batches of one task each, prompts in order."""
    tasks: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        tasks.setdefault(prompt.task, []).append(prompt)
    return [group[start : start + size] for group in tasks.values() for start in range(0, len(group), size)]


def _measure(decoder: Decoder, batch: Sequence[Prompt], way: Way, config: DecodeConfig, pad_id: int) -> _Measured:
    prompts = [prompt.tokens for prompt in batch]
    if way.mode == "generate":
        generations, seconds = _generate(decoder.target, prompts, config, pad_id)
    else:
        out = decoder.generate(prompts, way.mode, config, budget=way.budget)
        generations, seconds = out.generations, out.decode_seconds
    return _Measured(task=batch[0].task, generations=generations, seconds=seconds)


def _generate(
    target: Target, prompts: Sequence[Sequence[int]], config: DecodeConfig, pad_id: int
) -> tuple[list[Generation], float]:
    """By `transformers`. Its prompts' pass and first tokens are timed by a call of their own and taken off."""
    tokens = SpecialTokens(config.stop_ids, config.suppressed_ids, pad_id)
    seconds = []
    devices = [target.device] if target.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(config.seed)
        for length in (1, config.max_new_tokens):
            sampling = Sampling(temperature=config.temperature, max_new_tokens=length, seed=config.seed)
            began = time.perf_counter()
            answers = generate(target, prompts, tokens, sampling, top_p=config.top_p)
            seconds.append(time.perf_counter() - began)
    generations = []
    for answer, ended in answers:
        generation = Generation(tokens=answer, emitted=[1] * (len(answer) - 1), finish="stop" if ended else "length")
        generations.append(generation)
    return generations, max(1e-9, seconds[1] - seconds[0])


@torch.no_grad()
def _find_gaps(
    decoder: Decoder, measured: Sequence[_Measured], plain: Sequence[_Measured], batches: Sequence[Sequence[Prompt]]
) -> None:
    for ours, theirs, batch in zip(measured, plain, batches, strict=True):
        for one, other, prompt in zip(ours.generations, theirs.generations, batch, strict=True):
            pairs = zip(one.tokens, other.tokens, strict=False)
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if first is None:
                continue
            target = decoder.target
            text = torch.tensor([[*prompt.tokens, *one.tokens[:first]]], device=target.device)
            positions = torch.arange(text.shape[1], device=target.device)[None]
            logits = target.vocabulary().logits(target.run(text, positions).final[:, -1]).float()[0]
            pair = logits[[one.tokens[first], other.tokens[first]]]
            ours.gaps.append(float((pair[0] - pair[1]).abs() / pair.abs().max().clamp_min(1e-6)))


def _show_tree(
    decoder: Decoder, prompt: Prompt, ways: Sequence[Way], config: DecodeConfig, words: ChatTokenizer
) -> dict[str, Any] | None:
    """One step of the smallest tree that was measured, a little way into the first prompt's answer; None without trees."""
    budget = min((way.budget for way in ways if way.budget is not None), default=None)
    if budget is None:
        return None
    tree, walk = decoder.one_step(prompt.tokens, config, budget, skip=_STEPS_BEFORE_TREE)
    tokens = tree.tokens[0].tolist()
    return {
        "tokens": tokens,
        "texts": [words.decode([token]) for token in tokens],
        "parents": tree.parents[0].tolist(),
        "depths": tree.depths[0].tolist(),
        # A prefix that cannot be has -inf, for which JSON has no word.
        "log_probs": [max(-1e9, value) for value in tree.log_probs[0].tolist()],
        "accepted": walk.path[0, : int(walk.accepted[0])].tolist(),
        "next_text": words.decode([int(walk.next_tokens[0])]),
    }


def _row(
    way: Way,
    task: str,
    measured: Sequence[_Measured],
    plain: Sequence[_Measured] | None,
    theirs: Sequence[_Measured] | None,
    num_drafts: int,
    *,
    greedy: bool,
) -> Row:
    def of_task(batches: Sequence[_Measured]) -> tuple[list[Generation], float]:
        chosen = [batch for batch in batches if task in ("all", batch.task)]
        return [g for batch in chosen for g in batch.generations], sum(batch.seconds for batch in chosen)

    def speed(batches: Sequence[_Measured]) -> float:
        texts, seconds = of_task(batches)
        return sum(sum(g.emitted) for g in texts) / max(seconds, 1e-9)

    def speedup(over: Sequence[_Measured] | None) -> float | None:
        return None if over is None else speed(measured) / max(speed(over), 1e-9)

    generations, _ = of_task(measured)
    emitted = [n for g in generations for n in g.emitted]
    before_loop = [n for g in generations for n in g.emitted[: steps_before_loop(g)]]
    pairs = None if plain is None or not greedy else zip(generations, of_task(plain)[0], strict=True)
    gaps = [gap for batch in measured if task in ("all", batch.task) for gap in batch.gaps]
    return Row(
        mode=way.mode,
        budget=way.budget,
        task=task,
        prompts=len(generations),
        tokens=sum(len(g.tokens) for g in generations),
        steps=len(emitted),
        tau=_mean(emitted),
        tau_before_loop=_mean(before_loop),
        acceptance_by_position=[_mean([n > k for n in emitted]) for k in range(1, num_drafts + 1)],
        tokens_per_second=speed(measured),
        speedup=speedup(plain),
        speedup_over_generate=speedup(theirs),
        same_as_ar=None if pairs is None else sum(ours.tokens == theirs.tokens for ours, theirs in pairs),
        widest_gap=max(gaps, default=None),
    )


def _mean(values: Sequence[float]) -> float | None:
    # None, not NaN, which JSON does not have.
    return sum(values) / len(values) if values else None
