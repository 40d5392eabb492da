"""Speculative decoding with a DFlash drafter: chain, DDTree, and the two baselines that need no drafter.

Every mode is one loop: propose a tree, run it through the target once, keep the path that the target agrees with.
Plain decoding (`ar`) proposes nothing, so its tree is the root alone; what it is compared with runs the same code.

Lossless: at temperature 0 the tokens are those of plain decoding, above it their distribution is the target's. A tree
is walked by the target's own samples. A drafted chain at a temperature is sampled from the drafter and accepted with
probability min(1, p/q), the rest of p being drawn from at the first refusal (Leviathan et al., arXiv 2211.17192): that
accepts Σ min(p, q) at each position, where the drafter's single best token would be accepted with its p.

Legend of shapes: R rows, D drafts, L nodes, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_train.caches import DrafterCache, check_decoding, open_cache
from dflash_train.config import ConfigError
from dflash_train.ddtree import Tree, Walk, build_tree, chain_tree, walk_tree
from dflash_train.drafter import Drafter
from dflash_train.targets import Target

Mode = Literal["ar", "chain", "ddtree", "lookup"]
MODES: tuple[Mode, ...] = get_args(Mode)

SLOTS_COMPILED = 256
"""Compiled, caches have a multiple of this many slots, so that few lengths of prompts make a shape of their own."""

# Nodes of all rows whose logits exist at once: those of 150,000 tokens take 0.3 GB in fp32, twice when sampled.
_NODES_PER_CHUNK = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeConfig:
    """How text is drawn and where it ends."""

    max_new_tokens: int = 256
    """Longest answer, in tokens, its stop token included."""
    temperature: float = 0.0
    """0 for greedy."""
    top_p: float = 1.0
    """Nucleus: the most probable tokens whose probability sums to this; 1 for all. Unused if greedy."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end an answer, wherever in an accepted run they stand."""
    suppressed_ids: tuple[int, ...] = ()
    """Tokens that are never written."""
    seed: int = 0
    """Of the draws; unused if greedy."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature must be 0 (greedy) or positive and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p must lie above 0 and be at most 1 (all tokens), got {self.top_p}")


@dataclass(kw_only=True)
class Generation:
    """One answer."""

    tokens: list[int]
    """Without the prompt, with the stop token."""
    emitted: list[int] = field(default_factory=list)
    """Tokens that each step added: accepted drafts and the target's own (bonus) token, less what the end cut off. The
    first token comes from the prompt's pass and belongs to no step."""
    finish: Literal["stop", "length"] | None = None
    """Why it ended; None while it is being written."""

    @property
    def tau(self) -> float:
        """Acceptance length: tokens per step, so accepted drafts + 1; NaN without a step."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")

    def add(self, tokens: Sequence[int], config: DecodeConfig) -> int:
        """Append what of `tokens` comes before the end; returns how many."""
        room = config.max_new_tokens - len(self.tokens)
        taken = list(tokens[:room])
        stop = next((i for i, token in enumerate(taken) if token in config.stop_ids), None)
        if stop is not None:
            taken = taken[: stop + 1]
            self.finish = "stop"
        elif len(taken) == room:
            self.finish = "length"
        self.tokens += taken
        return len(taken)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """A batch of answers, and the time that they took."""

    generations: list[Generation]
    prefill_seconds: float
    """Prompts through the target, and the first token."""
    decode_seconds: float
    """All steps."""
    num_steps: int
    """Passes of the target after the prompts'."""


class Decoder:
    """A target, and a drafter for it. Not for several threads at once.

    Args:
        target: loaded to tap the layers that the drafter reads.
        drafter: on the same device; None if only `ar` and `lookup` are wanted.
        num_lookup: drafts of prompt lookup; None: as many as the drafter's, or 7 without one.
        compile: compile the passes of target and drafter in a step, with static shapes, once for each number of rows, of nodes
            and (by `SLOTS_COMPILED`) of slots. Prompts' passes stay eager.

    Raises:
        ConfigError: the drafter does not fit the target.
        TargetError: the target does not give the same states with a cache as without.
    """

    def __init__(
        self, target: Target, drafter: Drafter | None = None, *, num_lookup: int | None = None, compile: bool = False
    ) -> None:
        if drafter is not None:
            target.check(drafter.config)
        check_decoding(target)
        self.target = target
        self.drafter = drafter
        drafts = 7 if drafter is None else drafter.config.num_draft_tokens
        self.num_lookup = drafts if num_lookup is None else num_lookup
        self.compile = compile
        self._vocabulary = target.vocabulary(1.0 if drafter is None else drafter.config.embedding_scale)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], mode: Mode, config: DecodeConfig, *, budget: int | None = None
    ) -> Decoded:
        """Answer a batch of prompts, each row accepting as many drafts as it can.

        Rows that have ended stay in the batch unchanged, so no shape changes from the first step to the last.

        Args:
            prompts: token ids; lengths may differ.
            mode: `ar`, `chain`, `ddtree` or `lookup`.
            config: sampling and stop rules.
            budget: drafted nodes of a tree; required by `ddtree`, refused by the others.

        Raises:
            ConfigError: an empty prompt, an id without a row in the embedding, or a mode that lacks what it needs.
        """
        run = self._begin(prompts, mode, config, budget)
        begin = time.perf_counter()
        run.prefill()
        prefilled = time.perf_counter()
        num_steps = 0
        while any(generation.finish is None for generation in run.generations):
            run.step()
            num_steps += 1
        return Decoded(
            generations=run.generations,
            prefill_seconds=prefilled - begin,
            decode_seconds=time.perf_counter() - prefilled,
            num_steps=num_steps,
        )

    @torch.no_grad()
    def one_step(self, prompt: Sequence[int], config: DecodeConfig, budget: int, *, skip: int = 0) -> tuple[Tree, Walk]:
        """The tree of the first step after `skip` others, and the path that the target agreed with. A look, no more.

        Raises:
            ConfigError: as for `generate`.
        """
        run = self._begin([prompt], "ddtree", config, budget)
        run.prefill()
        for _ in range(skip):
            if run.generations[0].finish is None:
                run.step()
        tree = run._propose()
        return tree, run._judge(tree, run._cache.verify(tree).final)

    def _begin(
        self, prompts: Sequence[Sequence[int]], mode: Mode, config: DecodeConfig, budget: int | None
    ) -> _Run:
        self._check(prompts, mode, budget, config.max_new_tokens)
        return _Run(self, prompts, mode, config, budget)

    def _check(self, prompts: Sequence[Sequence[int]], mode: str, budget: int | None, max_new_tokens: int) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode in ("chain", "ddtree") and self.drafter is None:
            raise ConfigError(f"mode {mode} needs a drafter; give Decoder one, or take ar or lookup")
        if (mode == "ddtree") != (budget is not None):
            raise ConfigError(f"budget is the number of drafted nodes of ddtree, and of no other mode; got {budget} for {mode}")
        if budget is not None and budget < 1:
            raise ConfigError(f"budget must be at least 1 drafted node, got {budget}")
        rows = self._vocabulary.embedding.shape[0]
        if not prompts:
            raise ConfigError("no prompt was given")
        for number, prompt in enumerate(prompts):
            if not len(prompt):
                raise ConfigError(f"prompt {number} is empty; it needs at least one token, such as the one that begins a text")
            bad = next((token for token in prompt if not 0 <= token < rows), None)
            if bad is not None:
                raise ConfigError(
                    f"prompt {number} has token {bad}, but the embedding has rows 0 … {rows - 1}; its tokenizer belongs to "
                    "another target"
                )
            if len(prompt) + max_new_tokens > (most := self.target.max_positions):
                raise ConfigError(
                    f"prompt {number} has {len(prompt)} tokens, and with max_new_tokens = {max_new_tokens} goes beyond the "
                    f"{most} positions of {self.target.name}; shorten one of them"
                )


class _Run:
    """The state of one call of `generate`."""

    def __init__(
        self, decoder: Decoder, prompts: Sequence[Sequence[int]], mode: Mode, config: DecodeConfig, budget: int | None
    ) -> None:
        self._decoder, self._prompts, self._mode, self._config, self._budget = decoder, prompts, mode, config, budget
        device = decoder.target.device
        drafter = decoder.drafter if mode in ("chain", "ddtree") else None
        drafts = {"ar": 0, "lookup": decoder.num_lookup}.get(mode, drafter.config.num_draft_tokens if drafter else 0)
        # A step may start one token before the end and keep a whole path; such a row, ended, then stays in the batch with
        # a whole tree in flight.
        capacity = max(map(len, prompts)) + config.max_new_tokens + drafts + max(budget or 0, drafts) + 1
        if decoder.compile:
            capacity = -(-capacity // SLOTS_COMPILED) * SLOTS_COMPILED
        rows, compiled = len(prompts), decoder.compile
        self._cache = open_cache(decoder.target, rows, capacity, compiled=compiled)
        self._drafter_cache = None if drafter is None else DrafterCache(drafter, rows, capacity, compiled=compiled)
        self._lookups = [PromptLookup(prompt) for prompt in prompts] if mode == "lookup" else []
        self._generator = torch.Generator(device).manual_seed(config.seed)
        self._suppressed = torch.tensor(config.suppressed_ids, dtype=torch.int64, device=device)
        self._roots = torch.empty(0)
        self._draft_probs: Tensor | None = None
        self.generations = [Generation(tokens=[]) for _ in prompts]

    def prefill(self) -> None:
        """Run the prompts and draw the first token of each answer."""
        states = self._cache.prefill(self._prompts)
        lengths = self._cache.lengths
        if self._drafter_cache is not None:
            self._drafter_cache.extend(states.taps, torch.zeros_like(lengths))
        rows = torch.arange(len(lengths), device=lengths.device)
        self._roots = self._pick(states.final[rows, lengths - 1].unsqueeze(1)).squeeze(1)
        for row, token in enumerate(self._roots.tolist()):
            self.generations[row].add([token], self._config)
            if self._lookups:
                self._lookups[row].extend([token])

    def step(self) -> None:
        """Propose, verify, keep."""
        active = [generation.finish is None for generation in self.generations]
        tree = self._propose()
        states = self._cache.verify(tree)
        walk = self._judge(tree, states.final)
        # One read per step: the stop rules need the tokens.
        run = torch.cat([tree.tokens.gather(1, walk.path), walk.accepted[:, None], walk.next_tokens[:, None]], 1).tolist()
        for row, (*path, accepted, following) in enumerate(run):
            if not active[row]:
                continue
            written = [*path[1:accepted], following]
            self.generations[row].emitted.append(self.generations[row].add(written, self._config))
            if self._lookups:
                self._lookups[row].extend(written)
        going = torch.tensor(active, device=walk.path.device)
        if self._drafter_cache is not None:
            taken = walk.path.unsqueeze(2).expand(-1, -1, states.taps.shape[2])
            self._drafter_cache.extend(states.taps.gather(1, taken), self._cache.lengths)
        self._cache.keep(tree, walk.path, walk.accepted * going)
        self._roots = torch.where(going, walk.next_tokens, self._roots)

    def _propose(self) -> Tree:
        roots = self._roots
        if self._mode == "ar":
            return chain_tree(roots, roots.new_empty(len(roots), 0))
        if self._mode == "lookup":
            drafts = [lookup.propose(self._decoder.num_lookup) for lookup in self._lookups]
            return chain_tree(roots, torch.tensor(drafts, dtype=torch.int64, device=roots.device))
        logits = self._draft()
        temperature = self._config.temperature
        if self._mode == "ddtree":
            assert self._budget is not None
            return build_tree(roots, logits / temperature if temperature else logits, self._budget)
        if not temperature:
            return chain_tree(roots, logits.argmax(-1))
        self._draft_probs = sampling_probs(logits, temperature, self._config.top_p)
        return chain_tree(roots, draw(self._draft_probs, self._generator))

    def _draft(self) -> Tensor:
        """[R, D, V]"""
        drafter, vocabulary = self._decoder.drafter, self._decoder._vocabulary
        assert drafter is not None
        assert self._drafter_cache is not None
        config = drafter.config
        ids = F.pad(self._roots.unsqueeze(1), (0, config.block_size - 1), value=config.mask_token_id)
        states = vocabulary.embed(ids).to(drafter.fc.weight.dtype)
        hidden = self._drafter_cache.draft(states, self._cache.lengths)
        return self._allowed(vocabulary.logits(hidden if config.sample_from_anchor else hidden[:, 1:]))

    def _judge(self, tree: Tree, final: Tensor) -> Walk:
        if self._draft_probs is not None:
            target = sampling_probs(self._logits(final), self._config.temperature, self._config.top_p)
            return accept_chain(tree.tokens[:, 1:], self._draft_probs, target, self._generator)
        parts = torch.split(final, max(1, _NODES_PER_CHUNK // len(final)), dim=1)
        return walk_tree(tree, torch.cat([self._pick(part) for part in parts], dim=1))

    def _pick(self, final: Tensor) -> Tensor:
        """The target's token after each of final states [R, L, H]: [R, L]."""
        logits = self._logits(final)
        if not self._config.temperature:
            return logits.argmax(-1)
        return draw(sampling_probs(logits, self._config.temperature, self._config.top_p), self._generator)

    def _logits(self, final: Tensor) -> Tensor:
        return self._allowed(self._decoder._vocabulary.logits(final))

    def _allowed(self, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, self._suppressed, -torch.inf) if len(self._suppressed) else logits


class PromptLookup:
    """Drafts without a model: what followed the last tokens where they stood before.

    The longest match of 3, 2 or 1 tokens counts, the latest of equals. Without one the last token is repeated: a chain
    of fixed length is verified anyway.
    """

    longest = 3

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        # Where each n-gram was last followed by something.
        self._after: dict[tuple[int, ...], int] = {}
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens that are certain."""
        for token in tokens:
            for n in range(1, min(self.longest, len(self._tokens)) + 1):
                self._after[tuple(self._tokens[-n:])] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, count: int) -> list[int]:
        """`count` tokens to follow. A match that reaches the end goes on with its own copy (a loop)."""
        for n in range(min(self.longest, len(self._tokens)), 0, -1):
            start = self._after.get(tuple(self._tokens[-n:]))
            if start is not None:
                text = self._tokens[start:]
                return [text[i % len(text)] for i in range(count)]
        return [self._tokens[-1]] * count


def sampling_probs(logits: Tensor, temperature: float, top_p: float = 1.0) -> Tensor:
    """[..., V] logits to fp32 probabilities at a temperature above 0, cut to the nucleus."""
    probs = (logits.float() / temperature).softmax(-1)
    if top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        # The token that crosses top_p belongs to the nucleus.
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, ordered)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One sample from each of [..., V], int64 [...]: the first of V exponential clocks to ring."""
    clocks = torch.empty_like(probs).exponential_(generator=generator).clamp_min_(torch.finfo(probs.dtype).tiny)
    return (probs / clocks).argmax(-1)


def accept_chain(drafts: Tensor, draft_probs: Tensor, target_probs: Tensor, generator: torch.Generator) -> Walk:
    """Speculative sampling: accept each draft with probability min(1, p/q) up to the first refusal, and draw the next
    token from what of p exceeds q there (from p itself behind the last draft).

    Args:
        drafts: [R, D] int64, drawn from `draft_probs`.
        draft_probs: [R, D, V] fp32, q.
        target_probs: [R, D+1, V] fp32, p.
        generator: of the target's device.
    """
    p = target_probs[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
    q = draft_probs.gather(2, drafts.unsqueeze(2)).squeeze(2)
    chance = torch.empty_like(p).uniform_(generator=generator)
    num_drafts = (chance * q < p).cumprod(1).sum(1)
    here = num_drafts.view(-1, 1, 1).expand(-1, 1, target_probs.shape[2])
    target = target_probs.gather(1, here).squeeze(1)
    rest = (target - F.pad(draft_probs, (0, 0, 0, 1)).gather(1, here).squeeze(1)).clamp_min(0)
    # Where p = q up to rounding nothing is left, and nothing could be refused but by rounding: p itself then.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, target)
    return Walk(
        path=torch.arange(drafts.shape[1] + 1, device=drafts.device).expand(len(drafts), -1),
        accepted=num_drafts + 1,
        next_tokens=draw(rest, generator),
    )
