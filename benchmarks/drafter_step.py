"""One training step of a drafter: ours, and SpecForge's with flex and sdpa attention, side by side in one process.

    python -m benchmarks.drafter_step [--sequences 1,2] [--sides ours,specforge-flex] [--limit 170] [--profile] [--json FILE]

The size of a Qwen3-8B drafter (H 4096, I 12288, 5 layers, V 151,936), S 3072, 512 anchors of 16 per sequence, bf16
weights, frozen head, fused AdamW included. All sides have the same weights, anchors and batch, and must give the same loss.

FLOP of a step, the same for all sides: 3 x forward for the drafter's products (context projections included), 2 x for the
frozen head (forward and gradient of its input), 3.5 x forward for attention with N·B·(S/2 + B) pairs. MFU is of 989 TFLOP/s.
SpecForge: `pip install --no-deps specforge==0.2.0`, beside transformers.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import compile_guard
from benchmarks.measure import environment, markdown, time_cuda, write_json
from benchmarks.specforge_side import make_online
from dflash_train import drafter as drafter_module
from dflash_train.anchors import Anchors
from dflash_train.blocks import build_blocks
from dflash_train.config import DrafterConfig, LossConfig, RunConfig
from dflash_train.config_files import load_config
from dflash_train.drafter import Drafter, draft_slots
from dflash_train.losses import block_loss
from dflash_train.packing import PackedRows
from dflash_train.replica import Replica
from dflash_train.targets import TargetStates
from dflash_train.vocabulary import Vocabulary

LENGTH, NUM_BLOCKS = 3072, 512
PEAK_TFLOPS = 989.0
RATE = 1e-5


def flop(config: DrafterConfig, sequences: int) -> float:
    """FLOP of a step by the rule above."""
    tokens, context = sequences * NUM_BLOCKS * config.block_size, sequences * LENGTH
    width, query, key = config.hidden_size, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * tokens * width * (2 * query + 2 * key + 3 * config.intermediate_size) + 2 * context * width * 2 * key
    body = config.num_layers * layer + 2 * context * len(config.taps) * width * width
    head = 2 * sequences * NUM_BLOCKS * config.num_draft_tokens * width * config.vocab_size
    pairs = tokens * (LENGTH / 2 + config.block_size)
    return 3 * body + 2 * head + 3.5 * config.num_layers * 4 * pairs * query


class Batch:
    """Rows of one document each, all supervised, and random anchors."""

    def __init__(self, config: DrafterConfig, sequences: int) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(0, config.vocab_size, (sequences, LENGTH), generator=generator)
        self.rows = PackedRows(
            tokens=tokens,
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            documents=torch.zeros_like(tokens),
            positions=torch.arange(LENGTH).repeat(sequences, 1),
            document_numbers=((0,),) * sequences,
        ).to(torch.device("cuda"))
        drawn = [torch.randperm(LENGTH - 1, generator=generator)[:NUM_BLOCKS].sort().values for _ in range(sequences)]
        positions = torch.stack(drawn).cuda()
        valid = torch.ones_like(positions, dtype=torch.bool)
        self.anchors = Anchors(positions=positions, valid=valid, num_empty_documents=0, num_over_budget=0)
        width = config.hidden_size
        taps = torch.randn(sequences, LENGTH, len(config.taps) * width, device="cuda", dtype=torch.bfloat16)
        final = torch.randn(sequences, LENGTH, width, device="cuda", dtype=torch.bfloat16)
        self.states = TargetStates(taps=taps, final=final)


class Ours:
    """The drafter and the loss as the trainer uses them, with bf16 weights and moments as SpecForge's side has them."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], vocabulary: Vocabulary, batch: Batch) -> None:
        self.config, self.vocabulary, self.batch = config, vocabulary, batch
        with torch.device("cuda"):
            self.drafter = Drafter(config.drafter)
        self.drafter.load_state_dict(weights)
        self.drafter.bfloat16()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=RATE, fused=True)

    def loss(self) -> Tensor:
        config, rows, anchors = self.config, self.batch.rows, self.batch.anchors
        blocks = build_blocks(rows.tokens, rows.loss_mask, rows.documents, rows.positions, anchors, config.drafter)
        masks = self.drafter.masks(anchors, rows.documents)
        context = self.drafter.fuse(self.batch.states.taps)
        embedded = self.vocabulary.embed(blocks.ids)
        hidden = self.drafter(embedded, context, blocks.positions, rows.positions, masks)
        slots = draft_slots(hidden, blocks, config.drafter)
        return block_loss(slots, blocks.labels, blocks.supervised, self.vocabulary, config.loss).mean()

    def step(self) -> Tensor:
        loss = self.loss()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class OursKeeping(Ours):
    """The same with what a layer keeps for backward left to the compiler."""

    def loss(self) -> Tensor:
        lean = drafter_module._compiled_layer
        plain = compile_guard.compile(
            drafter_module._run_layer, shared="benchmarks.drafter_step", dynamic=False, fullgraph=True
        )
        drafter_module._compiled_layer = lambda: plain  # type: ignore[assignment]
        try:
            return super().loss()
        finally:
            drafter_module._compiled_layer = lean


class OursTrainer:
    """The step of the trainer: float32 masters and moments, clipping, the norm read by the host."""

    def __init__(self, config: RunConfig, weights: dict[str, Tensor], vocabulary: Vocabulary, batch: Batch) -> None:
        self.batch = batch
        self.replica = Replica(config, torch.device("cuda"), vocabulary)
        self.replica.load_weights(weights)

    def step(self) -> Tensor:
        sums = self.replica.accumulate(self.batch.rows, self.batch.anchors, self.batch.states)
        self.replica.update(100, float(sums.denominator))
        return sums.mean()


class SpecForge:
    """`OnlineDFlashModel` with our weights and anchors."""

    def __init__(
        self, config: RunConfig, weights: dict[str, Tensor], vocabulary: Vocabulary, batch: Batch, attention: str, chunk: int
    ) -> None:
        with torch.device("cuda"):
            self.online = make_online(config, vocabulary, NUM_BLOCKS, attention, chunk)
        model = self.online.draft_model
        model.load_state_dict(weights, strict=True)
        self.online.draft_model = model.cuda().bfloat16()
        fixed = batch.anchors.positions, batch.anchors.valid
        self.online._sample_anchor_positions = lambda *_: fixed
        self.batch, self.mask = batch, batch.rows.loss_mask.float()
        self.optimizer = torch.optim.AdamW(self.online.draft_model.parameters(), lr=RATE, fused=True)

    def step(self) -> Tensor:
        loss, _, _ = self.online(self.batch.rows.tokens, self.batch.states.taps, self.mask)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        result: Tensor = loss.detach()
        return result


def profile(step: Callable[[], Tensor], count: int = 25) -> list[tuple[str, float, int]]:
    """CUDA kernels of one step: name, ms, calls; the dearest first."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as run:
        step()
        torch.cuda.synchronize()
    kernels = [event for event in run.key_averages() if event.self_device_time_total > 0 and event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels) / 1e3
    print(f"  kernels of one step: {total:.1f} ms", flush=True)
    rows = [(event.key, event.self_device_time_total / 1e3, event.count) for event in kernels[:count]]
    for name, spent, calls in rows:
        print(f"    {spent:8.2f} ms {calls:5d} x  {name[:150]}")
    return rows


def sides(config: RunConfig) -> dict[str, Callable[..., Any]]:
    def ours(implementation: str, **changes: Any) -> Callable[..., Any]:
        changed = replace(config, loss=replace(config.loss, implementation=implementation), **changes)  # type: ignore[arg-type]
        return lambda *rest: Ours(changed, *rest)

    return {
        "ours": ours("auto"),
        "ours, reference loss": ours("reference"),
        "ours, trainer (fp32 masters)": lambda *rest: OursTrainer(config, *rest),
        "ours, nothing made again": lambda *rest: OursKeeping(config, *rest),
        "ours, eager layers (sdpa)": ours("auto", drafter=replace(config.drafter, attention="sdpa")),
        "specforge flex": lambda *rest: SpecForge(config, *rest, "flex_attention", 0),
        "specforge flex, chunks of 64": lambda *rest: SpecForge(config, *rest, "flex_attention", 64),
        "specforge sdpa, chunks of 64": lambda *rest: SpecForge(config, *rest, "sdpa", 64),
    }


def guard_ratio(step: Callable[[], Tensor], rounds: int) -> dict[str, float]:
    """Step time with the guard over without, paired round by round in one process: the seams are put in and taken out."""
    times: dict[str, list[float]] = {"guard": [], "bare": []}
    # The drafter's own limit is the guard's to keep: on bare torch the sides measured before would have used up torch's.
    with torch._dynamo.config.patch(recompile_limit=64):
        for number in range(2 * rounds + 2):
            side = ("guard", "bare")[number % 2]
            (compile_guard.install if side == "guard" else compile_guard.uninstall)()
            step()
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(3):
                step()
            torch.cuda.synchronize()
            if number >= 2:
                times[side].append((time.perf_counter() - began) / 3)
    compile_guard.install()
    ratios = sorted(a / b for a, b in zip(times["guard"], times["bare"], strict=True))
    return {"ratio": ratios[len(ratios) // 2], "lowest": ratios[0], "highest": ratios[-1], "ms": 1e3 * min(times["bare"])}


def main() -> None:
    """Measure the sides asked for within the time limit; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="1,2")
    parser.add_argument("--sides", default="", help="beginnings of names, with semicolons; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which nothing new is begun")
    parser.add_argument("--profile", action="store_true", help="print the dearest CUDA kernels of each side")
    parser.add_argument("--guard", action="store_true", help="the step with the guard over without")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    compile_guard.install()
    config = replace(load_config("qwen3-8b"), loss=LossConfig())
    deadline = time.perf_counter() + options.limit
    torch.manual_seed(0)
    with torch.device("cuda"):  # a billion random numbers take a CPU half a minute
        weights = {name: weight.to(torch.bfloat16).float() for name, weight in Drafter(config.drafter).state_dict().items()}
    shape = config.drafter.vocab_size, config.drafter.hidden_size
    table, head = ((torch.randn(shape, device="cuda") * 0.02).bfloat16() for _ in range(2))
    vocabulary = Vocabulary(embedding=table, head=head)
    wanted = [name for name in options.sides.split(";") if name]
    results: dict[str, Any] = {}
    lines: list[list[str]] = []
    for sequences in map(int, options.sequences.split(",")):
        batch = Batch(config.drafter, sequences)
        work = flop(config.drafter, sequences)
        print(f"{sequences} sequence(s) of {LENGTH}, {NUM_BLOCKS} blocks each: {work / 1e12:.1f} TFLOP", flush=True)
        for name, make in sides(config).items():
            if wanted and not any(name.startswith(start) for start in wanted):
                continue
            if time.perf_counter() > deadline:
                print(f"  {name}: left out, the time limit is reached", flush=True)
                continue
            side = None
            try:
                side = make(weights, vocabulary, batch)
                loss = float(side.step())
                timing = time_cuda(side.step, warm_ups=2, rounds=options.rounds, limit_s=12)
            except (ImportError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                del side
                gc.collect()
                torch.cuda.empty_cache()
                continue
            rate, useful = 1e3 * sequences * LENGTH / timing.median, work / timing.median / 1e9
            print(
                f"  {name:<32} {timing.median:7.1f} ms ±{timing.spread:5.1%} {rate:9,.0f} tok/s {useful:5.0f} TFLOP/s  MFU "
                f"{useful / PEAK_TFLOPS:.3f}  peak {timing.peak_gib:5.1f} GiB  first loss {loss:.4f}",
                flush=True,
            )
            row = {**timing.as_dict(), "tok_s": rate, "tflops": useful, "mfu": useful / PEAK_TFLOPS, "loss": loss}
            figures = [f"{timing.median:.0f}", f"{rate:,.0f}", f"{useful:.0f}", f"{useful / PEAK_TFLOPS:.3f}"]
            lines.append([str(sequences), name, *figures, f"{timing.peak_gib:.1f}", f"{loss:.4f}"])
            if options.profile:
                row["kernels"] = profile(side.step)
            if options.guard and name == "ours":
                row["guard"] = guard_ratio(side.step, 7)
                print(f"  the guard, of {name}: {row['guard']}", flush=True)
            results[f"{sequences}/{name}"] = row
            del side
            gc.collect()
            torch.cuda.empty_cache()
    print(environment())
    print(markdown(["sequences", "side", "ms", "context tok/s", "useful TFLOP/s", "MFU", "peak GiB", "first loss"], lines))
    write_json(options.json, {"drafter_step": results})


if __name__ == "__main__":
    main()
