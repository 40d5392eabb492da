"""The DFlash drafter (arXiv 2602.06036): a Qwen3-style decoder whose every layer also attends to the target's hidden
states.

Parameter names are those of z-lab's checkpoints. Legend of shapes: R rows, S context tokens, T = N·B block tokens, H
width, K taps, D head width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_guard import compile
from dflash_train.anchors import Anchors
from dflash_train.blocks import Blocks
from dflash_train.config import FULL, SLIDING, DrafterConfig
from dflash_train.masks import dense_mask, flex_mask, visible_keys

Mask = Tensor | BlockMask | None
Rotation = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) · weight, the mean square in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed: Tensor = self.weight * wide.to(x.dtype)
        return normed


def rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Rotation:
    """cos and sin [R, 1, L, D] of RoPE for positions [R, L]; the angles are fp32 whatever the type of the model."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None].float() * torch.pow(theta, -exponent)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the neox layout (halves, not pairs) on x [R, heads, L, D]."""
    left, right = x.chunk(2, dim=-1)
    turned: Tensor = x * cos + torch.cat([-right, left], dim=-1) * sin
    return turned


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Mask, backend: str) -> Tensor:
    """Grouped-query attention: query [R, heads, T, D], key and value [R, kv heads, S+T, D] to [R, heads, T, D]."""
    if backend == "flex":
        assert mask is None or isinstance(mask, BlockMask)
        out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True)
        assert isinstance(out, Tensor)
        return out
    assert not isinstance(mask, BlockMask)
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if backend == "sdpa":
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    probabilities: Tensor = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return probabilities @ value


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block, through the same projections."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        query_width, key_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, rope: Rotation, mask: Mask, backend: str) -> Tensor:
        """x [R, T, H] and context [R, S, H] to [R, T, H]; `rope` is for the S+T keys, the queries being the last T."""
        cos, sin = rope
        key = torch.cat([self.k_proj(context), self.k_proj(x)], dim=1)
        value = torch.cat([self.v_proj(context), self.v_proj(x)], dim=1)
        num_queries = x.shape[1]
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), cos[..., -num_queries:, :], sin[..., -num_queries:, :])
        key = rotate(self.k_norm(self._heads(key)), cos, sin)
        out = attend(query, key, self._heads(value), mask, backend)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP. The context is not normalised here: it is the same for every layer."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, rope: Rotation, mask: Mask, backend: str) -> Tensor:
        return self.add_mlp(self.add_attention(x, context, rope, mask, backend))

    def add_attention(self, x: Tensor, context: Tensor, rope: Rotation, mask: Mask, backend: str) -> Tensor:
        """The first half: x [R, T, H] and what attention adds to it."""
        out: Tensor = x + self.self_attn(self.input_layernorm(x), context, rope, mask, backend)
        return out

    def add_mlp(self, x: Tensor) -> Tensor:
        """The second half: x [R, T, H] and what the MLP adds to it."""
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def _run_layer(layer: DecoderLayer, x: Tensor, context: Tensor, rope: Rotation, mask: Mask, backend: str) -> Tensor:
    return layer.forward(x, context, rope, mask, backend)


def _keep_products(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


def _run_layer_lean(layer: DecoderLayer, x: Tensor, context: Tensor, rope: Rotation, mask: Mask, backend: str) -> Tensor:
    """For compiling: the same, but what stands between the MLP's products is made again in backward.

    The compiler's own choice keeps the normed input and silu(gate)·up, since a product reads them in backward: 32 KiB a block
    token at H 4096 and I 12288. Made again, they are part of a kernel that reads gate and up in any case.
    """
    x = layer.add_attention(x, context, rope, mask, backend)
    if not torch.is_grad_enabled():
        return layer.add_mlp(x)
    contexts = functools.partial(create_selective_checkpoint_contexts, _keep_products)
    out: Tensor = checkpoint(layer.add_mlp, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return out


_LayerRun = Callable[[DecoderLayer, Tensor, Tensor, Rotation, Mask, str], Tensor]


@functools.cache
def _compiled_layer() -> _LayerRun:
    # One compile cache per device for all layers: their shapes are equal, only the mask differs between kinds. Made at
    # the first use, since the import behind it takes seconds. A graph break would leave flex_attention uncompiled,
    # which materialises all scores: better an error.
    compiled: _LayerRun = compile(_run_layer_lean, shared="dflash_train.drafter.layer", dynamic=False, fullgraph=True)
    return compiled


def _run_norm(norm: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = norm.forward(x)
    return out


@functools.cache
def _compiled_norm() -> Callable[[nn.Module, Tensor], Tensor]:
    # The last norm as well: eager, it goes over the block states in float32 six times.
    compiled: Callable[[nn.Module, Tensor], Tensor] = compile(
        _run_norm, shared="dflash_train.drafter.norm", dynamic=False, fullgraph=True
    )
    return compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class Masks:
    """Masks of one batch on one device, shared by all layers of a kind; None where no layer is of that kind."""

    full: Mask = None
    sliding: Mask = None


class Drafter(nn.Module):
    """The trainable part: fusion of the taps, decoder layers and final norm. Embedding and head stay with the target.

    Weights start as Qwen3's do: normal with std 0.02, norms at one.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.taps) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    @property
    def backend(self) -> str:
        """Attention in use: the configured one, or with `auto` flex on CUDA and sdpa elsewhere."""
        if self.config.attention != "auto":
            return self.config.attention
        return "flex" if self.fc.weight.is_cuda else "sdpa"

    def masks(self, anchors: Anchors, documents: Tensor) -> Masks:
        """Build the masks of a batch once; `documents` is [R, S] int64 on the drafter's device."""
        kinds = {FULL: None, SLIDING: self.config.sliding_window}
        built: dict[str, Mask] = {}
        for kind in set(self.config.layers):
            ranges = visible_keys(
                anchors.positions,
                anchors.valid,
                documents,
                self.config.block_size,
                sliding_window=kinds[kind],
                sliding_rule=self.config.sliding_rule,
            )
            built[kind] = flex_mask(ranges) if self.backend == "flex" else dense_mask(ranges)
        return Masks(full=built.get(FULL), sliding=built.get(SLIDING))

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's tapped states [R, S, K·H], in the order of `config.taps`, to context features [R, S, H]."""
        fused: Tensor = self.hidden_norm(self.fc(taps))  # not compiled: decoding comes with another length each time
        return fused

    def forward(
        self,
        block_states: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        masks: Masks,
    ) -> Tensor:
        """Hidden states of the block tokens, ready for the target's head.

        Args:
            block_states: [R, T, H] embedded block tokens.
            context: [R, S, H] from `fuse`.
            block_positions: [R, T] int64, counted within the document.
            context_positions: [R, S] int64.
            masks: from `masks`; an empty `Masks()` sees everything, which is right for one block behind its own
                context.
        """
        backend = self.backend
        positions = torch.cat([context_positions, block_positions], dim=1)
        rope = rotation(positions, self.config.head_dim, self.config.rope_theta, block_states.dtype)
        run = _compiled_layer() if backend == "flex" else _run_layer
        x = block_states
        for layer, kind in zip(self.layers, self.config.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            x = run(layer, x, context, rope, masks.sliding if kind == SLIDING else masks.full, backend)
        norm = _compiled_norm() if backend == "flex" else _run_norm
        return norm(self.norm, x)


def draft_slots(hidden: Tensor, blocks: Blocks, config: DrafterConfig) -> Tensor:
    """The states that predict: [R, T, H] to [R, N, P, H], slot 0 dropped unless it predicts too."""
    per_block = hidden.view(hidden.shape[0], blocks.labels.shape[1], config.block_size, -1)
    return per_block if config.sample_from_anchor else per_block[:, :, 1:]
