"""What only a CUDA device shows of the drafter: flex against the reference, recompiles, memory of the loss, one step.

Run: `python -m benchmarks.drafter_cuda_check` (about a minute on one H200). Exits with 1 if a bound does not hold.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dflash_train.anchors import Anchors
from dflash_train.blocks import build_blocks
from dflash_train.config import AttentionBackend, CheckpointMode, DrafterConfig, LossConfig
from dflash_train.config_files import load_config
from dflash_train.drafter import Drafter, draft_slots
from dflash_train.losses import block_loss
from dflash_train.vocabulary import Vocabulary

DEVICE = torch.device("cuda")
GIB = 2**30
failures: list[str] = []


def report(what: str, value: str, holds: bool | None = None) -> None:
    print(f"{what:<74} {value:>24}{'' if holds is None else '   ok' if holds else '   FAILS'}", flush=True)
    if holds is False:
        failures.append(what)


def packed_batch(config: DrafterConfig, num_rows: int, length: int, num_blocks: int, seed: int) -> dict[str, Tensor]:
    """Rows of a few documents with padding, and anchors of which the last ones are not valid; other in every step."""
    generator = torch.Generator().manual_seed(seed)
    documents = torch.full((num_rows, length), -1)
    positions = torch.zeros(num_rows, length, dtype=torch.int64)
    anchors = torch.zeros(num_rows, num_blocks, dtype=torch.int64)
    valid = torch.zeros(num_rows, num_blocks, dtype=torch.bool)
    for row in range(num_rows):
        ends = torch.randperm(length - 1, generator=generator)[:3].sort().values + 1
        start = 0
        for index, end in enumerate(ends.tolist()):
            documents[row, start:end] = index
            positions[row, start:end] = torch.arange(end - start)
            start = end
        count = min(start, num_blocks - int(torch.randint(0, num_blocks // 4, (1,), generator=generator)))
        anchors[row, :count] = torch.randperm(start, generator=generator)[:count].sort().values
        valid[row, :count] = True
    batch = {
        "tokens": torch.randint(0, config.vocab_size, (num_rows, length), generator=generator),
        "documents": documents,
        "positions": positions,
        "anchors": anchors,
        "valid": valid,
        "taps": torch.randn(num_rows, length, len(config.taps) * config.hidden_size, generator=generator),
    }
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def forward(drafter: Drafter, vocabulary: Vocabulary, batch: dict[str, Tensor]) -> Tensor:
    """[R, N, P, H]."""
    anchors = Anchors(positions=batch["anchors"], valid=batch["valid"], num_empty_documents=0, num_over_budget=0)
    mask = batch["documents"] >= 0
    blocks = build_blocks(batch["tokens"], mask, batch["documents"], batch["positions"], anchors, drafter.config)
    masks = drafter.masks(anchors, batch["documents"])
    context = drafter.fuse(batch["taps"].to(drafter.fc.weight.dtype))
    hidden = drafter(vocabulary.embed(blocks.ids), context, blocks.positions, batch["positions"], masks)
    # What an invalid block holds does not matter, and need not be equal.
    return draft_slots(hidden, blocks, drafter.config) * batch["valid"][..., None, None]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def check_backends() -> None:
    base = DrafterConfig(
        hidden_size=256, intermediate_size=512, num_layers=3, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=1000,
        mask_token_id=999, num_target_layers=8, num_taps=2, sliding_window=200,
        layer_types=("sliding_attention", "full_attention", "sliding_attention"),
    )  # fmt: skip
    for dtype, bound in ((torch.float32, 2e-4), (torch.bfloat16, 6e-2)):
        generator = torch.Generator().manual_seed(0)
        table = (torch.randn(1000, 256, generator=generator)).to(DEVICE, dtype)
        vocabulary = Vocabulary(embedding=table, head=table)
        batch = packed_batch(base, 2, 1000, 60, seed=1)
        results: dict[str, list[Tensor]] = {}
        backends: tuple[AttentionBackend, ...] = ("eager", "sdpa", "flex")
        for backend in backends:
            torch.manual_seed(0)
            drafter = Drafter(replace(base, attention=backend))
            for parameter in drafter.parameters():
                parameter.data.add_(torch.randn_like(parameter) * 0.05)
            drafter.to(DEVICE, dtype)
            hidden = forward(drafter, vocabulary, batch)
            direction = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
            (hidden * direction).sum().backward()
            results[backend] = [hidden.detach(), *(p.grad for p in drafter.parameters() if p.grad is not None)]
        for backend in ("sdpa", "flex"):
            pairs = list(zip(results[backend], results["eager"], strict=True))
            name = f"{backend} against eager, {str(dtype).removeprefix('torch.')}"
            forward_error, backward_error = relative(*pairs[0]), max(relative(a, b) for a, b in pairs[1:])
            report(f"{name}: forward, largest relative difference", f"{forward_error:.1e}", forward_error < bound)
            report(f"{name}: {len(pairs) - 1} gradients", f"{backward_error:.1e}", backward_error < bound)


def check_recompiles() -> None:
    from torch._dynamo.utils import counters

    config = DrafterConfig(
        hidden_size=256, intermediate_size=512, num_layers=4, num_heads=8, num_kv_heads=4, head_dim=64, vocab_size=1000,
        mask_token_id=999, num_target_layers=8, num_taps=2, sliding_window=128,
        layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    )  # fmt: skip
    drafter = Drafter(config).to(DEVICE, torch.bfloat16)
    table = torch.randn(1000, 256, device=DEVICE, dtype=torch.bfloat16)
    vocabulary = Vocabulary(embedding=table, head=table)
    graphs = [counters["stats"]["unique_graphs"]]
    for step in range(8):
        forward(drafter, vocabulary, packed_batch(config, 2, 1024, 64, seed=step)).square().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    report("graphs compiled in step 1 (full and sliding layers)", str(graphs[1] - graphs[0]))
    later = graphs[-1] - graphs[1]
    report("graphs compiled in steps 2 … 8, other documents and anchors each", str(later), later == 0)


def peak_of(run: Callable[[], tuple[Tensor, Tensor]]) -> tuple[float, float, Tensor, Tensor]:
    """GiB above what was allocated, ms (median of 3 after one), value, gradient."""
    value, gradient = run()
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / GIB, statistics.median(times), value, gradient


def check_loss_memory() -> None:
    blocks, slots, width, vocab = 512, 15, 4096, 151_936
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE, dtype=torch.bfloat16) * scale

    vocabulary = Vocabulary(embedding=normal(1, width), head=normal(vocab, width, scale=0.02))
    hidden = normal(blocks, slots, width).requires_grad_()
    teacher = normal(blocks, slots, width)
    labels = torch.randint(0, vocab, (blocks, slots), generator=generator, device=DEVICE)
    supervised = torch.rand(blocks, slots, generator=generator, device=DEVICE) < 0.9

    def ours(config: LossConfig) -> tuple[Tensor, Tensor]:
        hidden.grad = None
        loss = block_loss(hidden, labels, supervised, vocabulary, config, teacher).mean()
        loss.backward()
        assert hidden.grad is not None
        return loss.detach(), hidden.grad

    def plain_ce() -> tuple[Tensor, Tensor]:
        hidden.grad = None
        logits = F.linear(hidden.flatten(0, 1), vocabulary.head).float()
        weights = supervised * torch.exp(-torch.arange(slots, device=DEVICE) / 7.0)
        losses = F.cross_entropy(logits, labels.flatten(), reduction="none").view(labels.shape)
        loss = (losses * weights).sum() / weights.sum()
        loss.backward()
        assert hidden.grad is not None
        return loss.detach(), hidden.grad

    rows = blocks * slots
    print(f"\nloss over {rows} rows, V = {vocab}, H = {width}, bf16: peak above inputs, forward + backward")
    dense_peak, dense_time, dense_value, dense_gradient = peak_of(plain_ce)
    report("ce, plain torch, dense", f"{dense_peak:.2f} GiB {dense_time:.0f} ms")
    modes: tuple[CheckpointMode, ...] = ("non-reentrant", "reentrant")
    for mode in modes:
        for chunk in (256, 512, 1024, 2048):
            config = LossConfig(chunk_rows=chunk, checkpoint=mode)
            peak, spent, value, gradient = peak_of(lambda config=config: ours(config))  # type: ignore[misc]
            share, error, grad_error = (
                peak / dense_peak,
                relative(value, dense_value),
                relative(gradient, dense_gradient),
            )
            what = f"ce, chunks of {chunk}, {mode}: value {error:.0e}, gradient {grad_error:.0e} off"
            holds = error < 1e-4 and grad_error < 2e-2 and (share <= 0.15 or chunk > LossConfig().chunk_rows)
            report(what, f"{peak:.2f} GiB {share:5.1%} {spent:.0f} ms", holds)
    mixed = LossConfig(ce=0.5, kl=0.5, cap=0.1)
    dense = replace(mixed, chunk_rows=rows, checkpoint="off")
    dense_peak, dense_time, dense_value, dense_gradient = peak_of(lambda: ours(dense))
    report("ce + kl + cap, ours in one chunk", f"{dense_peak:.2f} GiB {dense_time:.0f} ms")
    peak, spent, value, gradient = peak_of(lambda: ours(mixed))
    error, grad_error = relative(value, dense_value), relative(gradient, dense_gradient)
    report(
        f"ce + kl + cap, chunks of {mixed.chunk_rows}: value {error:.0e}, gradient {grad_error:.0e} off",
        f"{peak:.2f} GiB {peak / dense_peak:5.1%} {spent:.0f} ms",
        error < 1e-4 and grad_error < 2e-2 and peak <= 0.15 * dense_peak,
    )


def check_step() -> None:
    """The published size: compare with a peer's step under the same shape and rule."""
    run = load_config("qwen3-8b")
    config, length, num_blocks = run.drafter, 3072, 512
    drafter = Drafter(config).to(DEVICE, torch.bfloat16)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-5, fused=True)
    table = torch.randn(config.vocab_size, config.hidden_size, device=DEVICE, dtype=torch.bfloat16) * 0.02
    vocabulary = Vocabulary(embedding=table, head=table.clone())
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(length)[None]
    batch = {
        "tokens": torch.randint(0, config.vocab_size, (1, length), generator=generator).to(DEVICE),
        "documents": torch.zeros(1, length, dtype=torch.int64, device=DEVICE),
        "positions": positions.to(DEVICE),
        "anchors": torch.randperm(length - 1, generator=generator)[:num_blocks].sort().values[None].to(DEVICE),
        "valid": torch.ones(1, num_blocks, dtype=torch.bool, device=DEVICE),
        "taps": torch.randn(1, length, len(config.taps) * config.hidden_size, device=DEVICE, dtype=torch.bfloat16),
    }
    labels = torch.randint(0, config.vocab_size, (1, num_blocks, config.num_draft_tokens), device=DEVICE)
    print(
        f"\none step, size of Qwen3 8B: S {length}, {num_blocks} anchors of {config.block_size}, fused AdamW included"
    )
    for chunk in (512, 1024, 2048):
        loss_config = replace(run.loss, chunk_rows=chunk)
        times: list[float] = []
        for _ in range(6):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            hidden = forward(drafter, vocabulary, batch)
            block_loss(
                hidden, labels, torch.ones_like(labels, dtype=torch.bool), vocabulary, loss_config
            ).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        peak = torch.cuda.max_memory_allocated() / GIB
        report(
            f"step, loss in chunks of {chunk} (first {times[0]:.0f} ms)",
            f"{statistics.median(times[2:]):.0f} ms {peak:.1f} GiB",
        )


def main() -> int:
    """Run all checks; 0 if every bound holds."""
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to check", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}")
    check_backends()
    check_recompiles()
    check_loss_memory()
    check_step()
    print(f"\n{len(failures)} bounds do not hold" + "".join(f"\n  {what}" for what in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
