"""The settings of a run: frozen dataclasses, checked when made.

Every field says what it is and in which unit. `config_files.py` reads them from TOML and from `--set`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

SlidingRule = Literal["specforge", "speculators", "speculators-bidirectional", "modelopt"]
AttentionBackend = Literal["auto", "flex", "sdpa", "eager"]
Weighting = Literal["decay", "dpace", "uniform"]
CheckpointMode = Literal["non-reentrant", "reentrant", "off"]
LossImplementation = Literal["auto", "fused", "reference"]
Schedule = Literal["cosine", "wsd", "constant"]
Synchronise = Literal["gradients", "weights"]
FULL, SLIDING = "full_attention", "sliding_attention"


class ConfigError(ValueError):
    """A setting that cannot be used; the message has the value, its place and the next step."""


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def default_tap_layers(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The target layers whose outputs the drafter reads, as 0-based layer indices.

    Spread evenly over layers 1 … L-3, as z-lab's `build_target_layer_ids` does (Python's rounding, ties to even); one
    tap is the middle layer. In `transformers`, the output of layer `i` is `hidden_states[i + 1]`.

    Raises:
        ConfigError: fewer than one tap, or a target too shallow for that many different layers.
    """
    _require(num_taps >= 1, f"drafter.num_taps must be at least 1, got {num_taps}")
    _require(num_target_layers >= 1, f"drafter.num_target_layers must be at least 1, got {num_target_layers}")
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    layers = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    _require(
        len(set(layers)) == num_taps and layers[0] >= 0 and layers == tuple(sorted(layers)),
        f"a target of {num_target_layers} layers has no {num_taps} different layers to tap (the rule gives "
        f"{list(layers)}); lower drafter.num_taps or set drafter.target_layer_ids",
    )
    return layers


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetConfig:
    """Which language model is drafted for."""

    path: str = "tiny"
    """A local folder (config.json + safetensors), a .gguf file, or `tiny` for a small random model made from `seed`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of the frozen weights, and of the hidden states that the target hands out."""
    trust_remote_code: bool = False
    """Run Python that comes with the model's folder. Off: such a folder is refused by `transformers`."""
    spread: int = 1
    """Devices that hold one copy together, layer by layer, for a target that one has no room for: with 2, target devices
    0-3 are two target threads."""
    cuda_graph: bool = True
    """On a GPU, run batches as a CUDA graph where the target can be captured (the run says whether): one launch in place of
    several hundred, each of which waits for the interpreter lock among the other threads."""
    seed: int = 0
    """Seed of the `tiny` target's weights; unused otherwise."""

    def __post_init__(self) -> None:
        _require(self.spread >= 1, f"target.spread must be at least 1, got {self.spread}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """Shape of the drafter (DFlash, arXiv 2602.06036). Only `hidden_size` and `vocab_size` must be the target's."""

    hidden_size: int = 4096
    """Width of the residual stream, equal to the target's: embedding and head are the target's."""
    intermediate_size: int = 12288
    """Width inside the SwiGLU MLP."""
    num_layers: int = 5
    """Decoder layers of the drafter."""
    num_heads: int = 32
    """Query heads."""
    num_kv_heads: int = 8
    """Key and value heads; divides `num_heads`."""
    head_dim: int = 128
    """Width of one head; even, since RoPE rotates all of it."""
    vocab_size: int = 151936
    """Rows of the target's output head (padding rows count)."""
    rms_norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm."""
    rope_theta: float = 1_000_000.0
    """RoPE base. The whole head is rotated, unscaled, whatever the target does: partial rotary is not inherited."""
    max_position_embeddings: int = 40960
    """Longest position, in tokens; written into the exported config."""
    block_size: int = 16
    """Tokens of a block, the clean anchor in slot 0 included."""
    mask_token_id: int = 151669
    """Token of the masked slots: a row that exists in the target's embedding table and that no text uses."""
    num_target_layers: int = 36
    """Decoder layers of the target."""
    num_taps: int = 5
    """Target layers read, spread by the standard rule; unused if `target_layer_ids` is given."""
    target_layer_ids: tuple[int, ...] = ()
    """Target layers read, 0-based index of the layer whose output is taken; empty: the standard rule."""
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()
    """One per drafter layer; empty: all full."""
    sliding_window: int = 0
    """Window W of sliding layers, in tokens; 0 if there are none."""
    sliding_rule: SlidingRule = "specforge"
    """What a sliding layer sees (a anchor, o slot, p context position). `specforge`, which SGLang, vLLM and z-lab 0.1.0
    serve: p >= a+o-(W-1), causal in the block. `modelopt` (also NeMo): the same context, bidirectional in the block.
    `speculators`: p >= a-W, causal. `speculators-bidirectional`: p >= a-W, bidirectional."""
    sample_from_anchor: bool = False
    """Slot k predicts token a+1+k, slot 0 included (DSpark, DeepSpec), instead of a+k: a loader of the other kind is
    off by one everywhere."""
    embedding_scale: float = 1.0
    """Factor on the target's raw embedding rows at the drafter's input (z-lab's `input_embedding_scale`)."""
    logit_softcap: float = 0.0
    """The target's `final_logit_softcapping` c: logits become c·tanh(z/c); 0 for none."""
    attention: AttentionBackend = "auto"
    """`auto`: flex on CUDA, sdpa elsewhere."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
            "num_target_layers",
        ):
            value = getattr(self, name)
            _require(value >= 1, f"drafter.{name} must be at least 1, got {value}")
        _require(
            self.block_size >= 2,
            f"drafter.block_size must be at least 2 (an anchor and one draft), got {self.block_size}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"drafter.num_kv_heads must divide drafter.num_heads = {self.num_heads}, got {self.num_kv_heads}",
        )
        _require(self.head_dim % 2 == 0, f"drafter.head_dim must be even for RoPE, got {self.head_dim}")
        _require(self.rope_theta > 1, f"drafter.rope_theta must be above 1, got {self.rope_theta}")
        _require(self.rms_norm_eps > 0, f"drafter.rms_norm_eps must be positive, got {self.rms_norm_eps}")
        _require(self.mask_token_id >= 0, f"drafter.mask_token_id must be 0 or more, got {self.mask_token_id}")
        _require(
            self.logit_softcap >= 0, f"drafter.logit_softcap must be 0 (off) or positive, got {self.logit_softcap}"
        )
        if self.layer_types:
            _require(
                len(self.layer_types) == self.num_layers,
                f"drafter.layer_types must have drafter.num_layers = {self.num_layers} entries, "
                f"got {len(self.layer_types)}",
            )
        if SLIDING in self.layer_types:
            _require(
                self.sliding_window >= 1,
                f"drafter.sliding_window must be at least 1 with sliding layers, got {self.sliding_window}",
            )
            # The peers disagree on a window that ends inside the block; nobody serves one.
            _require(
                self.sliding_window >= self.block_size,
                f"drafter.sliding_window must be at least drafter.block_size = {self.block_size}, "
                f"got {self.sliding_window}",
            )
        beyond = [i for i in self.target_layer_ids if not 0 <= i < self.num_target_layers]
        _require(
            not beyond,
            f"drafter.target_layer_ids must lie in 0 … {self.num_target_layers - 1} (0-based output of a layer), "
            f"got {beyond}",
        )
        if not self.target_layer_ids:
            default_tap_layers(self.num_target_layers, self.num_taps)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers read, 0-based, resolved."""
        return self.target_layer_ids or default_tap_layers(self.num_target_layers, self.num_taps)

    @property
    def layers(self) -> tuple[str, ...]:
        """Kind of each drafter layer, resolved."""
        return self.layer_types or (FULL,) * self.num_layers

    @property
    def num_draft_tokens(self) -> int:
        """Tokens proposed per block: B-1, or B if the anchor's slot predicts too."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AnchorConfig:
    """Where blocks start."""

    per_document: int = 512
    """Most anchors drawn in one document and step."""
    per_row: int = 512
    """Blocks of one packed row, always this many: unused ones are masked, so that no shape changes."""

    def __post_init__(self) -> None:
        _require(self.per_document >= 1, f"anchors.per_document must be at least 1, got {self.per_document}")
        _require(self.per_row >= 1, f"anchors.per_row must be at least 1, got {self.per_row}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """The training objective: a weighted sum of terms, each weighted again per slot. Formulas stand in `losses.py`."""

    ce: float = 1.0
    """Weight of cross-entropy to the text."""
    kl: float = 0.0
    """Weight of forward KL to the target's distribution."""
    rkl: float = 0.0
    """Weight of reverse KL."""
    tv: float = 0.0
    """Weight of total variation, 1 - acceptance."""
    lk: float = 0.0
    """Weight of the LK hybrid of KL and TV."""
    lk_eta: float = 3.0
    """How early LK moves from KL to TV."""
    cap: float = 0.0
    """Weight of the confidence term on slots that are right."""
    weighting: Weighting = "decay"
    """Weight of a slot: `decay` exp(-(k-1)/gamma), `dpace`, or `uniform`."""
    decay_gamma: float = 7.0
    """Decay constant in slots: 7 for blocks of 16, 5 for 10, 4 for 8."""
    dpace_alpha: float = 0.5
    """Smoothing of D-PACE, 0 to 1."""
    implementation: LossImplementation = "auto"
    """`fused` makes the gradient in the forward (Triton, `kernels/head_loss.py`), `reference` is plain torch; `auto`: fused on
    CUDA where Triton is installed. `chunk_rows` and `checkpoint` are the reference's."""
    chunk_rows: int = 512
    """Slots whose logits exist at once; rounded down to whole blocks."""
    checkpoint: CheckpointMode = "non-reentrant"
    """How a chunk's logits are rebuilt in backward."""

    def __post_init__(self) -> None:
        for name in ("ce", "kl", "rkl", "tv", "lk", "cap", "lk_eta"):
            value = getattr(self, name)
            _require(0 <= value < float("inf"), f"loss.{name} must be 0 or more and finite, got {value}")
        _require(
            self.ce + self.kl + self.rkl + self.tv + self.lk > 0,
            "all of loss.ce, kl, rkl, tv, lk are 0: nothing would be learnt; set one of them",
        )
        _require(self.decay_gamma > 0, f"loss.decay_gamma must be positive, got {self.decay_gamma}")
        _require(0 <= self.dpace_alpha <= 1, f"loss.dpace_alpha must lie in 0 … 1, got {self.dpace_alpha}")
        _require(self.chunk_rows >= 1, f"loss.chunk_rows must be at least 1, got {self.chunk_rows}")

    @property
    def needs_teacher(self) -> bool:
        """Whether the target's final hidden states are read."""
        return bool(self.kl or self.rkl or self.tv or self.lk)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Prepared documents and how they are put into rows."""

    path: str = ""
    """Folder written by `prepare`; empty with the `tiny` target: made on the spot."""
    hidden: str = ""
    """Folder written by `cache-hidden`: hidden states are read from it and no target is loaded. Empty: the target runs."""
    row_length: int = 3072
    """Tokens of a packed row; longer documents are cut."""
    rows_per_batch: int = 2
    """Rows of one batch of one drafter device."""
    seed: int = 0
    """Order of rows and draw of anchors."""

    def __post_init__(self) -> None:
        _require(self.row_length >= 2, f"data.row_length must be at least 2, got {self.row_length}")
        _require(self.rows_per_batch >= 1, f"data.rows_per_batch must be at least 1, got {self.rows_per_batch}")
        _require(bool(self.path) or not self.hidden, "data.hidden needs data.path, the documents that it was made from")
        _require(0 <= self.seed < 2**63, f"data.seed must lie in 0 … 2**63-1, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The optimiser, how drafters are kept alike, devices, checkpoints."""

    steps: int = 10_000
    """Optimiser steps of the whole run."""
    learning_rate: float = 6e-4
    """Peak, of AdamW."""
    schedule: Schedule = "cosine"
    """After the warm-up: `cosine` to `final_share`, `wsd` (level, then straight down over `decay_share`), `constant`."""
    warmup_share: float = 0.04
    """Part of `steps` in which the rate rises from 0."""
    decay_share: float = 0.2
    """Part of `steps` over which `wsd` comes down."""
    final_share: float = 0.0
    """Last rate as a part of the peak."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; norms have none."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.95
    """AdamW's decay of the second moment."""
    clip: float = 1.0
    """Largest gradient norm; longer gradients are scaled down to it."""
    accumulation: int = 1
    """Batches of one drafter whose gradients make one step."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type in which the drafter computes. The weights that the optimiser updates, and its moments, are float32 always."""
    compile: bool = False
    """Compile the drafter's forward as a whole. Layers with flex attention are compiled in any case."""
    synchronise: Synchronise = "gradients"
    """How drafters are kept alike. `gradients`: one gradient of all batches of a step, so M drafters train as one with
    the global batch. `weights`: each takes its own steps, and the weights are averaged every `average_every` steps."""
    average_every: int = 50
    """Steps between averages of weights."""
    average_moments: bool = True
    """Average the optimiser's moments with the weights; off: each drafter keeps its own."""
    max_bad_steps: int = 10
    """Steps in a row with NaN or infinite gradients: each is skipped, and this many end the run."""
    prefetch: int = 2
    """Batches with hidden states held ready for each drafter."""
    save_every: int = 500
    """Steps between checkpoints; the last step, a signal and a failure save as well."""
    keep_last: int = 3
    """Checkpoints kept, besides the one of best acceptance."""
    log_every: int = 10
    """Steps between printed lines; `metrics.jsonl` has every step."""
    stall_seconds: float = 600.0
    """A run in which no step ends for so long is ended, with the stacks of all threads."""
    target_devices: str = "auto"
    """One target thread for each: `0-4` or `0,2` are GPUs; `cpu`, `cuda:0` and repeats are allowed."""
    drafter_devices: str = "auto"
    """One drafter for each, written alike."""
    seed: int = 0
    """Of the drafter's first weights."""

    def __post_init__(self) -> None:
        counts = ("accumulation", "average_every", "max_bad_steps", "prefetch", "save_every", "keep_last", "log_every")
        for name in ("steps", *counts):
            _require(getattr(self, name) >= 1, f"train.{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "stall_seconds"):
            value = getattr(self, name)
            _require(0 < value < float("inf"), f"train.{name} must be positive and finite, got {value}")
        for name in ("warmup_share", "decay_share", "final_share"):
            _require(0 <= getattr(self, name) <= 1, f"train.{name} must lie in 0 … 1, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"train.{name} must lie in 0 … 1, 1 excluded, got {getattr(self, name)}")
        _require(0 <= self.weight_decay < float("inf"), f"train.weight_decay must be 0 or more, got {self.weight_decay}")
        _require(0 <= self.seed < 2**63, f"train.seed must lie in 0 … 2**63-1, got {self.seed}")


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalConfig:
    """Short evaluations by decoding while the run trains; by them the best checkpoint is kept."""

    every: int = 0
    """Steps between them; 0 for none. A checkpoint is evaluated before it is saved, whenever that is."""
    path: str = ""
    """Folder written by `prepare`, of conversations that are not trained on: the tokens before a document's first answer
    are a prompt."""
    prompts: int = 8
    """Documents taken from its start, decoded at once."""
    max_new_tokens: int = 64
    """Longest answer, in tokens."""

    def __post_init__(self) -> None:
        _require(self.every >= 0, f"eval.every must be 0 (never) or more, got {self.every}")
        _require(not self.every or bool(self.path), "eval.every needs eval.path, a folder of held-out documents")
        for name in ("prompts", "max_new_tokens"):
            _require(getattr(self, name) >= 1, f"eval.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """All settings of a run."""

    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    anchors: AnchorConfig = field(default_factory=AnchorConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        _require(
            not (self.eval.every and self.data.hidden),
            f"eval.every = {self.eval.every} decodes with the target, and data.hidden = {self.data.hidden!r} trains without "
            "one; set eval.every = 0 and run `dflash-train eval` afterwards, or leave data.hidden empty",
        )


def field_names(section: type) -> list[str]:
    """Names of a section's fields, in order."""
    return [f.name for f in dataclasses.fields(section)]
