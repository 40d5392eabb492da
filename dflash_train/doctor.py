"""`doctor`: will this run fit and how fast will it be, told before anything is loaded for long."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from dflash_train.anchors import draw_anchors
from dflash_train.config import ConfigError, RunConfig
from dflash_train.data import Documents, read_manifest
from dflash_train.devices import group_name, parse_devices, target_groups
from dflash_train.drafter_files import weight_shapes
from dflash_train.hidden_cache import CachedTarget
from dflash_train.packing import PackedRows
from dflash_train.pipeline import Batch, Source, Topology, hand_over, receive, with_states
from dflash_train.replica import Replica
from dflash_train.run_setup import open_target, pack_rows
from dflash_train.target_graph import capture
from dflash_train.targets import Target, load_target

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Predicted bytes of a drafter's device; activations are an estimate, the rest is exact."""

    weights: int
    """What computes, and the float32 weights that are updated where those are others."""
    optimiser: int
    """Gradients and the two moments, float32."""
    vocabulary: int
    """The target's embedding and head, unless the target on the same device lends them."""
    inputs: int
    """Hidden states held ready, and those in use."""
    activations: int
    """Kept from forward to backward, and the logits of one chunk."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(dataclasses.astuple(self))


def predict_memory(config: RunConfig, *, lent: bool = False) -> Memory:
    """Memory of one drafter.

    Args:
        config: of the run.
        lent: embedding and head are those of a target on the same device, of the same type.
    """
    drafter, data = config.drafter, config.data
    parameters = sum(math.prod(shape) for shape in weight_shapes(drafter).values())
    size = BYTES[config.train.dtype]
    rows, length = data.rows_per_batch, data.row_length
    blocks = config.anchors.per_row * drafter.block_size
    width, inner = drafter.hidden_size, drafter.intermediate_size
    query, key = drafter.num_heads * drafter.head_dim, drafter.num_kv_heads * drafter.head_dim
    # Of each block token and layer: the residual stream and its norms (with their fp32 copies), queries and attention's
    # output twice (before and after RoPE, norm), the MLP's three inner states; of each key, the same for keys and values.
    per_token = 8 * width + 4 * query + 3 * inner
    per_key = 6 * key
    layers = drafter.num_layers * rows * (blocks * per_token + (length + blocks) * per_key) * size
    # The reference: logits, their log-softmax and its gradient, of one chunk, those of the teacher as well. The fused loss has
    # a bound of its own, below that at the default chunk.
    chunk = config.loss.chunk_rows * drafter.vocab_size * (size + 3 * 4) * (2 if config.loss.needs_teacher else 1)
    states = rows * length * (len(drafter.taps) + 1) * width * size
    return Memory(
        weights=parameters * (4 + (size if size != 4 else 0)),
        optimiser=parameters * 12,
        vocabulary=0 if lent else 2 * drafter.vocab_size * width * size,
        inputs=(config.train.prefetch + 1) * states,
        activations=layers + chunk,
    )


def diagnose(config: RunConfig, report: Callable[[str], None], *, seconds: float = 30.0) -> None:
    """Check a run's settings against the machine, then time target and drafter on a batch.

    The batch is of random tokens. With `data.hidden` it is the first one of the run, its states are read from there, and no
    target is loaded.

    Args:
        config: of the run.
        report: told each line.
        seconds: how long the probe may take; 0 leaves it out, and loads no model (of hidden states it is checked whether they
            belong to the data, in any case).

    Raises:
        ConfigError, DataError, TargetError: what would stop the run.
    """
    groups, drafters = target_groups(config), parse_devices(config.train.drafter_devices, "drafter")
    report(f"targets on {', '.join(map(group_name, groups))}; drafters on {', '.join(map(str, drafters))}")
    if config.data.path:
        manifest = read_manifest(Path(config.data.path))
        if manifest.vocab_size > config.drafter.vocab_size:
            raise ConfigError(
                f"{config.data.path} was made by a tokenizer of {manifest.vocab_size} ids, more than drafter.vocab_size = "
                f"{config.drafter.vocab_size}; it belongs to another target"
            )
        report(f"data: {manifest.documents} documents, {manifest.tokens} tokens, tokenizer {manifest.tokenizer[:12]}")
    for device in dict.fromkeys(drafters):
        lent = (device,) in groups and config.target.dtype == config.train.dtype
        memory = predict_memory(config, lent=lent)
        parts = ", ".join(f"{name} {value / GIB:.2f}" for name, value in dataclasses.asdict(memory).items())
        count = drafters.count(device)
        there = f" of {torch.cuda.get_device_properties(device).total_memory / GIB:.0f}" if device.type == "cuda" else ""
        report(f"memory of {count} drafters on {device}: {count * memory.total / GIB:.2f}{there} GiB (each: {parts})")
    if seconds <= 0 and not config.data.hidden:
        return
    documents = Documents(Path(config.data.path)) if config.data.path else None
    target = open_target(config, documents, groups[0], load_target)
    target.check(config.drafter)
    if isinstance(target, Target):
        report(f"target {config.target.path} fits the drafter's settings; the mask token has a row of its embedding")
        batch = _random_batch(config)
    else:
        assert documents is not None
        report(f"hidden states in {config.data.hidden} are of these documents and fit the drafter; no target is loaded")
        batch = Source(pack_rows(config, documents), config, Topology(drafters_here=1)).batch(0)
    if seconds > 0:
        _probe(config, target, batch, drafters[0], report, seconds)


def _probe(
    config: RunConfig,
    target: Target | CachedTarget,
    batch: Batch,
    device: torch.device,
    report: Callable[[str], None],
    seconds: float,
) -> None:
    if config.target.cuda_graph and isinstance(target, Target) and target.device.type == "cuda":
        report(capture(target, batch.rows.to(target.device)))
    dtype = getattr(torch, config.train.dtype)
    replica = Replica(config, device, target.vocabulary(config.drafter.embedding_scale).to(device, dtype))
    made = with_states(batch, target)

    def run_target() -> None:
        float(with_states(batch, target).states.final[0, 0, 0])  # type: ignore[union-attr]

    def run_drafter() -> None:
        here = hand_over(made, device, dtype)
        sums = replica.accumulate(here.rows, here.anchors, receive(here, device))
        replica.update(0, float(sums.denominator))

    per_target, per_drafter = (_seconds_each(work, seconds / 2) for work in (run_target, run_drafter))
    of_target, of_drafter = batch.num_tokens / per_target, batch.num_tokens / per_drafter
    what = "target" if isinstance(target, Target) else "reading hidden states"
    report(f"{what}: {of_target:,.0f} tok/s a thread; drafter: {of_drafter:,.0f} tok/s a device")
    needed = per_target / per_drafter
    report(f"one drafter keeps {needed:.2f} target threads busy: for each 3 drafters, {max(1, math.ceil(3 * needed))} targets")


def _random_batch(config: RunConfig) -> Batch:
    shape = (config.data.rows_per_batch, config.data.row_length)
    generator = torch.Generator().manual_seed(0)
    rows = PackedRows(
        tokens=torch.randint(0, min(256, config.drafter.vocab_size), shape, generator=generator),
        loss_mask=torch.ones(shape, dtype=torch.bool),
        documents=torch.zeros(shape, dtype=torch.int64),
        positions=torch.arange(shape[1]).expand(shape).contiguous(),
        document_numbers=tuple((i,) for i in range(shape[0])),
    )
    per_row = config.anchors.per_row
    anchors = draw_anchors(
        rows.loss_mask, rows.documents, rows.document_numbers, per_document=per_row, per_row=per_row, seed=0, step=0
    )
    return Batch(step=0, rows=rows, anchors=anchors, num_tokens=shape[0] * shape[1])


def _seconds_each(work: Callable[[], None], budget: float) -> float:
    """Mean seconds of a call after the first one, which compiles; calls for at most the budget, once at least."""
    work()
    began = time.perf_counter()
    count = 0
    while count == 0 or time.perf_counter() - began < budget:
        work()
        count += 1
    return (time.perf_counter() - began) / count
