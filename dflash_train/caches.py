"""What decoding remembers between steps: the target's keys and values or recurrent states, and the drafter's keys and
values of its context.

Rows of a batch advance on their own: row r has `lengths[r]` tokens that are certain. A step hands the target a tree of
candidates behind them and then keeps one path of it; the others leave no trace.

Legend of shapes: R rows, C slots of a cache, L nodes of a tree, P tokens of a path, H width, K taps, D head width.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

import compile_guard
from dflash_train.config import SLIDING
from dflash_train.ddtree import Tree, chain_tree
from dflash_train.drafter import DecoderLayer, Drafter, attend, rotate, rotation
from dflash_train.masks import dense_mask, visible_keys
from dflash_train.model_files import TargetError
from dflash_train.target_masks import TargetMasks, text_config
from dflash_train.targets import Target, TargetStates

_ATTENTION_KINDS = {"full_attention", "sliding_attention"}
_VERSIONS = 64
"""Compiled versions of a step before it runs eager (which the guard reports)."""
_OPTIONS: dict[str, Any] = {"dynamic": False, "fullgraph": True}


class TargetCache(Protocol):
    """The target's memory of R rows."""

    lengths: Tensor
    """[R] int64, tokens that are certain and have been run."""

    def prefill(self, prompts: Sequence[Sequence[int]]) -> TargetStates:
        """Run whole prompts, one per row; states [R, longest, ...], meaningless behind the end of a shorter prompt."""

    def verify(self, tree: Tree) -> TargetStates:
        """States [R, L, ...] of every node, as if the path to it followed the certain tokens. Changes no length."""

    def keep(self, tree: Tree, path: Tensor, counts: Tensor) -> None:
        """Make the first `counts` [R] nodes of `path` [R, P] certain, of the tree verified last (0 keeps a row as it
        is)."""


def open_cache(target: Target, num_rows: int, capacity: int, *, compiled: bool = False) -> TargetCache:
    """A cache for `num_rows` rows of at most `capacity` tokens, candidates in flight included.

    Attention alone, full or sliding: `SlotCache`. Recurrent layers among them: `ReplayCache`, which is never compiled: its
    shapes change from step to step.
    """
    kinds = set(getattr(text_config(target.model), "layer_types", None) or ())
    if kinds <= _ATTENTION_KINDS:
        return SlotCache(target, num_rows, capacity, compiled=compiled)
    return ReplayCache(target, num_rows)


@functools.cache
def _compile(step: Callable[..., Any]) -> Callable[..., Any]:
    """One cache of compiled code for all decoders: a version for each number of rows, nodes and slots."""
    return compile_guard.compile(step, shared="dflash_train.caches", recompile_limit=_VERSIONS, **_OPTIONS)


@torch.no_grad()
def check_decoding(target: Target) -> None:
    """Whether `target` gives with a cache the states that it gives without one; tried on a few tokens, with a fork.

    Raises:
        TargetError: it does not, so nothing decoded with it could be trusted.
    """
    vocab = target.vocabulary().embedding.shape[0]
    text = [(7 * i + 1) % vocab for i in range(9)]
    other = [*text[:6], (text[6] + 3) % vocab, (text[7] + 5) % vocab, text[8]]
    positions = torch.arange(9, device=target.device)[None]
    plain = [target.run(torch.tensor([ids], device=target.device), positions).final[0].float() for ids in (text, other)]
    cache = open_cache(target, 1, 16)
    cache.prefill([text[:5]])
    device = target.device
    parents = torch.tensor([[0, 0, 0, 1, 2]], device=device)
    tree = Tree(
        tokens=torch.tensor([[text[5], text[6], other[6], text[7], other[7]]], device=device),
        parents=parents,
        depths=torch.tensor([[0, 1, 1, 2, 2]], device=device),
        ancestors=torch.tensor(
            [[[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]], device=device
        ).bool(),
        log_probs=torch.zeros(1, 5, device=device),
        max_depth=2,
    )
    nodes = cache.verify(tree).final[0].float()
    cache.keep(tree, torch.tensor([[0, 2, 4]], device=device), torch.tensor([3], device=device))
    last = cache.verify(chain_tree(torch.tensor([other[8]], device=device), parents[:, :0])).final[0].float()
    got = torch.cat([nodes, last])
    wanted = torch.stack([plain[0][5], plain[0][6], plain[1][6], plain[0][7], plain[1][7], plain[1][8]])
    difference = float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6))
    tolerance = 1e-3 if target.vocabulary().embedding.dtype in (torch.float32, torch.float64) else 0.1
    if not difference < tolerance:  # also true of NaN
        raise TargetError(
            f"{target.name} gives other hidden states with a cache and a tree mask than without (they differ by "
            f"{difference:.3g} of the largest, allowed {tolerance}); load it with attn_implementation='sdpa' or 'eager', "
            "or take another version of transformers"
        )


class SlotCache:
    """Keys and values of C slots per row, slot i holding the token at position i; sliding layers keep all of them and
    are masked.

    Candidates are written behind the certain tokens and the kept ones moved to the front, so shapes never change and
    nothing is undone: what is stale lies behind `lengths`, where no mask reaches. `compiled`: `verify` is.
    """

    def __init__(self, target: Target, num_rows: int, capacity: int, *, compiled: bool = False) -> None:
        self._compiled = compiled
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=target.device)
        self._target = target
        self._slots = torch.arange(capacity, device=target.device)
        self._store = _Store(num_rows, capacity)
        self._target_masks = TargetMasks(target.model, target.vocabulary().embedding.dtype)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> TargetStates:
        device = self.lengths.device
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        # Padding on the right lands behind the certain tokens, like a candidate that was not kept.
        tokens = tokens.to(device)
        states = self._verify(chain_tree(tokens[:, 0], tokens[:, 1:]))
        self.lengths = lengths
        return states

    def verify(self, tree: Tree) -> TargetStates:
        return self._verify(tree, compiled=self._compiled)

    def _verify(self, tree: Tree, *, compiled: bool = False) -> TargetStates:
        step = _compile(_pass_of_target) if compiled else _pass_of_target
        states: TargetStates = step(self.lengths, tree, self)
        return states

    def keep(self, tree: Tree, path: Tensor, counts: Tensor) -> None:
        self._store.move(self.lengths.unsqueeze(1) + path, self.lengths)
        self.lengths = self.lengths + counts

    def _masks(self, tree: Tree, positions: Tensor) -> dict[str, Tensor] | Tensor:
        start = self.lengths.view(-1, 1, 1)
        length = tree.tokens.shape[1]
        # Which candidate a slot holds; clamped where it holds none, and masked there.
        node = self._slots - start
        in_flight = (node >= 0) & (node < length)
        node = node.clamp(0, length - 1)
        seen = (self._slots < start) | (in_flight & tree.ancestors.gather(2, node.expand(-1, length, -1)))
        slot_positions = torch.where(in_flight, positions.gather(1, node.squeeze(1)).unsqueeze(1), self._slots)
        return self._target_masks.of(seen, positions.unsqueeze(2) - slot_positions)


def _pass_of_target(lengths: Tensor, tree: Tree, cache: SlotCache) -> TargetStates:
    start = lengths.unsqueeze(1)
    positions = start + tree.depths
    cache._store.slots = start + torch.arange(tree.tokens.shape[1], device=start.device)
    return cache._target.run(tree.tokens, positions, cache._masks(tree, positions), cache._store)


class _Store:
    """Keys and values by layer, in the place where `transformers` expects a cache: it calls `update` from every
    attention layer, and with masks and positions given nothing else."""

    is_compileable = False

    def __init__(self, num_rows: int, capacity: int) -> None:
        self._shape = (num_rows, capacity)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.slots = torch.empty(0)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write [R, heads, L, D] at `slots` and return all C slots."""
        if layer_idx not in self._layers:
            rows, capacity = self._shape
            self._layers[layer_idx] = (
                key.new_zeros(rows, key.shape[1], capacity, key.shape[3]),
                value.new_zeros(rows, value.shape[1], capacity, value.shape[3]),
            )
        keys, values = self._layers[layer_idx]
        _write(keys, key, self.slots)
        _write(values, value, self.slots)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def move(self, source: Tensor, start: Tensor) -> None:
        """Copy slots `source` [R, P] to `start` [R] and on."""
        to = start.unsqueeze(1) + torch.arange(source.shape[1], device=source.device)
        for pair in self._layers.values():
            for store in pair:
                index = source.to(store.device)[:, None, :, None].expand(-1, store.shape[1], -1, store.shape[3])
                _write(store, store.gather(2, index), to)


class ReplayCache:
    """For recurrent layers, whose state cannot be cut back: candidates run on a copy of the state, and the kept tokens
    are run again on the state itself.

    A recurrent layer reads its row in order, so a tree is run as the rows of its paths from the root to each leaf. That
    is exact with an unmodified model, and costs leaves times depth instead of nodes. Each row has a cache of
    `transformers` of its own, since rows that keep different numbers of tokens cannot share a state.
    """

    def __init__(self, target: Target, num_rows: int) -> None:
        from transformers import DynamicCache

        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=target.device)
        self._target = target
        make_cache: Any = DynamicCache
        self._caches: list[Any] = [make_cache(config=text_config(target.model)) for _ in range(num_rows)]
        self._tried: list[tuple[Any, list[list[int]]]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> TargetStates:
        states = [self._advance(row, torch.tensor(prompt)) for row, prompt in enumerate(prompts)]
        longest = max(map(len, prompts))
        self.lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.lengths.device)
        return TargetStates(
            taps=torch.cat([_pad(s.taps, longest) for s in states]),
            final=torch.cat([_pad(s.final, longest) for s in states]),
        )

    def verify(self, tree: Tree) -> TargetStates:
        self._tried = []
        out = []
        for row, (parents, tokens) in enumerate(zip(tree.parents.tolist(), tree.tokens, strict=True)):
            paths = _paths(parents)
            cache = copy.deepcopy(self._caches[row])
            cache.reorder_cache(torch.zeros(len(paths), dtype=torch.int64, device=tokens.device))
            longest = max(map(len, paths))
            # Filler stands behind a shorter path, where neither attention nor recurrence sees it from the path.
            nodes = torch.tensor([path + [0] * (longest - len(path)) for path in paths], device=tokens.device)
            states = self._forward(cache, tokens[nodes], int(self.lengths[row]))
            where = {node: (i, depth) for i, path in enumerate(paths) for depth, node in enumerate(path)}
            index = torch.tensor([where[node] for node in range(len(parents))], device=tokens.device).unbind(1)
            out.append(TargetStates(taps=states.taps[index], final=states.final[index]))
            self._tried.append((cache, paths))
        return TargetStates(taps=torch.stack([s.taps for s in out]), final=torch.stack([s.final for s in out]))

    def keep(self, tree: Tree, path: Tensor, counts: Tensor) -> None:
        for row, (nodes, count) in enumerate(zip(path.tolist(), counts.tolist(), strict=True)):
            cache, paths = self._tried[row]
            kept = nodes[:count]
            longest = max(map(len, paths))
            if not kept:
                continue
            if kept in paths and count == longest:  # the copy has just these tokens: nothing to run again
                cache.reorder_cache(torch.tensor([paths.index(kept)], device=path.device))
                self._caches[row] = cache
            else:
                self._advance(row, tree.tokens[row, kept])
        self.lengths = self.lengths + counts
        self._tried = []

    def _advance(self, row: int, tokens: Tensor) -> TargetStates:
        return self._forward(self._caches[row], tokens.to(self.lengths.device)[None], int(self.lengths[row]))

    def _forward(self, cache: Any, tokens: Tensor, start: int) -> TargetStates:
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device).expand_as(tokens)
        return self._target.run(tokens, positions, None, cache)


class DrafterCache:
    """Keys and values of the context for each drafter layer, so that a step projects the new tokens only. `compiled`:
    `draft` is."""

    def __init__(self, drafter: Drafter, num_rows: int, capacity: int, *, compiled: bool = False) -> None:
        self._drafter = drafter
        self._step = _compile(_pass_of_drafter) if compiled else _pass_of_drafter
        config, weight = drafter.config, drafter.fc.weight
        shape = (num_rows, config.num_kv_heads, capacity, config.head_dim)
        self._layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.num_layers)]
        self._documents = torch.zeros(num_rows, capacity, dtype=torch.int64, device=weight.device)

    def extend(self, taps: Tensor, starts: Tensor) -> None:
        """Add the context of taps [R, P, K·H] at positions `starts` [R] and on. Those that are not certain are
        overwritten by the next call, and not visible before."""
        config = self._drafter.config
        positions = starts.unsqueeze(1) + torch.arange(taps.shape[1], device=taps.device)
        context = self._drafter.fuse(taps.to(self._drafter.fc.weight.dtype))
        rope = rotation(positions, config.head_dim, config.rope_theta, context.dtype)
        for layer, (keys, values) in zip(self._drafter.layers, self._layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            attention = layer.self_attn
            key = attention.k_norm(_heads(attention.k_proj(context), config.head_dim))
            _write(keys, rotate(key, *rope), positions)
            _write(values, _heads(attention.v_proj(context), config.head_dim), positions)

    def draft(self, block_states: Tensor, anchors: Tensor) -> Tensor:
        """Final states [R, B, H] of one block per row.

        Args:
            block_states: [R, B, H], the embedded anchor token and mask tokens.
            anchors: [R] int64, position of slot 0; only context before it is visible.
        """
        hidden: Tensor = self._step(block_states, anchors, self)
        return hidden

    def _mask(self, kind: str, anchors: Tensor) -> Tensor:
        config = self._drafter.config
        ranges = visible_keys(
            anchors,
            torch.ones_like(anchors, dtype=torch.bool),
            self._documents,
            config.block_size,
            sliding_window=config.sliding_window if kind == SLIDING else None,
            sliding_rule=config.sliding_rule,
        )
        return dense_mask(ranges)


def _pass_of_drafter(block_states: Tensor, anchors: Tensor, cache: DrafterCache) -> Tensor:
    config = cache._drafter.config
    positions = anchors.unsqueeze(1) + torch.arange(config.block_size, device=anchors.device)
    rope = rotation(positions, config.head_dim, config.rope_theta, block_states.dtype)
    masks = {kind: cache._mask(kind, anchors.unsqueeze(1)) for kind in set(config.layers)}
    x = block_states
    for layer, kind, (keys, values) in zip(cache._drafter.layers, config.layers, cache._layers, strict=True):
        assert isinstance(layer, DecoderLayer)
        attention = layer.self_attn
        u = layer.input_layernorm(x)
        query = rotate(attention.q_norm(_heads(attention.q_proj(u), config.head_dim)), *rope)
        key = rotate(attention.k_norm(_heads(attention.k_proj(u), config.head_dim)), *rope)
        key = torch.cat([keys, key], dim=2)
        value = torch.cat([values, _heads(attention.v_proj(u), config.head_dim)], dim=2)
        # Of all backends only SDPA and eager take one small dense mask without compiling.
        out = attend(query, key, value, masks[kind], "eager" if cache._drafter.backend == "eager" else "sdpa")
        x = x + attention.o_proj(out.transpose(1, 2).flatten(2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    normed: Tensor = cache._drafter.norm(x)
    return normed


def _write(store: Tensor, new: Tensor, slots: Tensor) -> None:
    """new [R, heads, L, D] into store [R, heads, C, D] at slots [R, L], wherever the layer is (a target may be spread)."""
    store.scatter_(2, slots.to(store.device)[:, None, :, None].expand_as(new), new)


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head_dim).transpose(1, 2)


def _pad(states: Tensor, length: int) -> Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, length - states.shape[1]))


def _paths(parents: list[int]) -> list[list[int]]:
    """Nodes from the root to each leaf; a parent stands before its children."""
    leaves = sorted(set(range(len(parents))) - set(parents[1:]))
    paths = []
    for leaf in leaves:
        path = [leaf]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    return paths
