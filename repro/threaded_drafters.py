"""Train several small drafters in one process, one thread each: the kind of program that compile_guard is for.

Plain torch and threading, written as such programs are: a compiled flex_attention with a block mask, checkpointed
layers, a chunked and checkpointed lm_head loss, AdamW, batches whose length changes. Nothing here knows of
compile_guard but the lines behind `--guard`; `compile-guard run repro/threaded_drafters.py` guards it without them.

    python repro/threaded_drafters.py --devices cuda:0,cuda:0,cuda:0           # errors or hangs
    python repro/threaded_drafters.py --devices cuda:0,cuda:0,cuda:0 --guard   # all steps finish

FlexAttention has no backward on the CPU. There the layers are trained with SDPA and compiled whole, and compiled
flex_attention runs in an evaluation, forward only, between the steps. With `--snapshots` each drafter is traced with
torch.fx after every step, as for a decoder that wants a graph: since torch 2.13 that is what fails on the CPU.

Exit status: 0 all steps finished with finite losses, 1 an error or a hang, with the stacks of all threads.
"""

# Legend: B batch, H heads, L length, D head size, E width, V vocabulary, N = B * L rows.

from __future__ import annotations

import argparse
import faulthandler
import json
import math
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

VOCABULARY = 512
WIDTH = 128
NUM_HEADS = 2
NUM_LAYERS = 2
BATCH = 2
LENGTHS = (256, 320, 384)
"""A batch's length; the next step takes the next one."""
DRAFT_BLOCK = 16
"""Tokens that are drafted together: they see one another, and the blocks before theirs."""
CHUNK = 128
"""Rows whose logits exist at a time."""

Attend = Callable[..., torch.Tensor]
"""Takes q, k, v, each BHLD, and the mask."""


class Layer(nn.Module):
    """Attention and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_feed = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x_BLE: torch.Tensor, mask: Any, attend: Attend) -> torch.Tensor:
        qkv_BL3HD = self.qkv(self.norm_attention(x_BLE)).unflatten(-1, (3, NUM_HEADS, -1))
        q_BHLD, k_BHLD, v_BHLD = (qkv_BL3HD[:, :, part].transpose(1, 2) for part in range(3))
        y_BHLD = attend(q_BHLD, k_BHLD, v_BHLD, mask)
        x_BLE = x_BLE + self.out(y_BHLD.transpose(1, 2).flatten(2))
        fed: torch.Tensor = self.down(F.gelu(self.up(self.norm_feed(x_BLE))))
        return x_BLE + fed


class Drafter(nn.Module):
    """A small block-causal transformer; `features` stands for the frozen target's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Embedding(VOCABULARY, WIDTH).requires_grad_(False)
        self.positions = nn.Parameter(torch.randn(max(LENGTHS), WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def embed(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.features(tokens_BL) + self.positions[: tokens_BL.shape[1]]
        return embedded

    def logits(self, x_BLE: torch.Tensor) -> torch.Tensor:
        logits_BLV: torch.Tensor = self.lm_head(self.norm(x_BLE))
        return logits_BLV

    def forward(self, tokens_BL: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """The plain model, as a decoder calls it and as `snapshot` traces it."""
        x_BLE = self.embed(tokens_BL)
        for layer in self.layers:
            x_BLE = layer(x_BLE, mask, sdpa)
        return self.logits(x_BLE)


def block_causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    """Each block of drafted tokens sees itself and what is before it."""
    return q // DRAFT_BLOCK >= kv // DRAFT_BLOCK


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
    attended: Any = flex_attention(q, k, v, block_mask=mask)
    return attended  # type: ignore[no-any-return]


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def run_layer(layer: Layer, x_BLE: torch.Tensor, mask: Any, attend: Attend) -> torch.Tensor:
    y_BLE: torch.Tensor = layer(x_BLE, mask, attend)
    return y_BLE


class Masks:
    """The masks of one thread, made once per length."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._block: dict[int, BlockMask] = {}
        self._dense: dict[int, torch.Tensor] = {}

    def block(self, length: int) -> BlockMask:
        if length not in self._block:
            self._block[length] = create_block_mask(block_causal, None, None, length, length, device=str(self.device))
        return self._block[length]

    def dense(self, length: int) -> torch.Tensor:
        if length not in self._dense:
            places = torch.arange(length, device=self.device)
            self._dense[length] = block_causal(None, None, places[:, None], places[None, :])
        return self._dense[length]


@dataclass(frozen=True)
class Compiled:
    """What a thread calls: one set for all threads (`singleton`), or a set of each thread's own (`per-thread`)."""

    flex: Attend
    run_layer: Callable[..., torch.Tensor]
    chunk_loss: Callable[..., torch.Tensor]

    @classmethod
    def new(cls) -> Compiled:
        # Static shapes: a block mask belongs to one length, and flex_attention is fastest when it knows it.
        return cls(
            flex=torch.compile(flex, dynamic=False),
            run_layer=torch.compile(run_layer),
            chunk_loss=torch.compile(chunk_loss, dynamic=False),
        )


def chunk_loss(lm_head: nn.Linear, x_NE: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(lm_head(x_NE), labels_N, reduction="sum")


def loss_of(
    drafter: Drafter, compiled: Compiled, x_BLE: torch.Tensor, labels_BL: torch.Tensor, use_reentrant: bool
) -> torch.Tensor:
    """Mean loss, with the logits of one chunk alive at a time, in forward and in backward."""
    x_NE, labels_N = drafter.norm(x_BLE).flatten(0, 1), labels_BL.flatten()
    total = x_NE.new_zeros(())
    for x_CE, labels_C in zip(torch.split(x_NE, CHUNK), torch.split(labels_N, CHUNK), strict=True):
        chunk: Any = checkpoint(compiled.chunk_loss, drafter.lm_head, x_CE, labels_C, use_reentrant=use_reentrant)
        total = total + chunk
    mean: torch.Tensor = total / labels_N.numel()
    return mean


def train_step(drafter: Drafter, compiled: Compiled, masks: Masks, batch_BL: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    """Forward and backward of one batch; every layer and every chunk of the loss is checkpointed."""
    tokens_BL, labels_BL = batch_BL[:, :-1], batch_BL[:, 1:]
    x_BLE = drafter.embed(tokens_BL)
    length = tokens_BL.shape[1]
    for layer in drafter.layers:
        if masks.device.type == "cuda":
            x: Any = checkpoint(layer, x_BLE, masks.block(length), compiled.flex, use_reentrant=use_reentrant)
        else:
            x = checkpoint(compiled.run_layer, layer, x_BLE, masks.dense(length), sdpa, use_reentrant=use_reentrant)
        x_BLE = x
    loss = loss_of(drafter, compiled, x_BLE, labels_BL, use_reentrant)
    torch.autograd.backward(loss)
    return loss.detach()


@torch.no_grad()
def evaluate(drafter: Drafter, compiled: Compiled, masks: Masks, batch_BL: torch.Tensor) -> float:
    """Loss on a batch with compiled flex_attention, forward only."""
    tokens_BL, labels_BL = batch_BL[:, :-1], batch_BL[:, 1:]
    x_BLE = drafter.embed(tokens_BL)
    for layer in drafter.layers:
        x_BLE = layer(x_BLE, masks.block(tokens_BL.shape[1]), compiled.flex)
    return F.cross_entropy(drafter.logits(x_BLE).flatten(0, 1), labels_BL.flatten()).item()


@torch.no_grad()
def snapshot(drafter: Drafter, masks: Masks, batch_BL: torch.Tensor) -> torch.fx.GraphModule:
    """The drafter as an FX graph, for a decoder; checked against the drafter itself.

    Raises:
        ValueError: the graph computes something else.
    """
    traced = torch.fx.symbolic_trace(drafter)
    tokens_BL = batch_BL[:, :-1]
    mask = masks.dense(tokens_BL.shape[1])
    if not torch.allclose(traced(tokens_BL, mask), drafter(tokens_BL, mask), atol=1e-4):
        raise ValueError(f"the snapshot computes something else than the drafter:\n{traced.code}")
    return traced


def next_batch(generator: torch.Generator, length: int) -> torch.Tensor:
    """Sequences that can be learned: each token follows from the one before, but for some noise."""
    tokens_BL = torch.empty(BATCH, length + 1, dtype=torch.long)
    tokens_BL[:, 0] = torch.randint(VOCABULARY, (BATCH,), generator=generator)
    noise_BL = torch.randint(4, (BATCH, length + 1), generator=generator)
    for place in range(1, length + 1):
        tokens_BL[:, place] = (tokens_BL[:, place - 1] * 5 + 1 + noise_BL[:, place]) % VOCABULARY
    return tokens_BL


def train(
    number: int, drafter: Drafter, compiled: Compiled, device: torch.device, options: argparse.Namespace
) -> dict[str, list[float]]:
    """One drafter's whole training, in its thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    drafter.to(device)
    masks = Masks(device)
    optimizer = torch.optim.AdamW((p for p in drafter.parameters() if p.requires_grad), lr=1e-3)
    # A generator of its own: what this drafter sees depends on nothing that other threads draw.
    generator = torch.Generator().manual_seed(1000 * options.seed + number)
    losses, evaluations = [], []
    for step in range(options.steps):
        # Thread k starts at length k: the threads meet each other's shapes.
        length = LENGTHS[(number + step) % len(LENGTHS)]
        batch_BL = next_batch(generator, length).to(device)
        loss = train_step(drafter, compiled, masks, batch_BL, options.reentrant)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if device.type == "cpu":
            evaluations.append(evaluate(drafter, compiled, masks, next_batch(generator, LENGTHS[0])))
        if options.snapshots:
            snapshot(drafter, masks, batch_BL)
        say(f"drafter-{number} step {step + 1}/{options.steps} | length {length} | loss {losses[-1]:.4f}")
    return {"losses": losses, "evaluations": evaluations}


def say(text: str) -> None:
    """To stderr: stdout is for the result."""
    print(text, file=sys.stderr, flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--guard", action="store_true", help="install compile_guard first")
    parser.add_argument("--devices", help="comma-separated, thread k takes the k-th, repeats allowed (cuda:0, or cpu)")
    parser.add_argument("--threads", type=int, help="drafters (as many as devices, at least 3)")
    parser.add_argument("--steps", type=int, default=20, help="steps of each drafter (20)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (0)")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--reentrant", action="store_true", help="reentrant checkpoints")
    modes.add_argument("--non-reentrant", action="store_false", dest="reentrant", help="the default")
    parser.add_argument("--wrappers", choices=["singleton", "per-thread"], default="singleton")
    parser.add_argument("--snapshots", action="store_true", help="trace the drafter with torch.fx after every step")
    parser.add_argument("--alone", type=int, metavar="K", help="train drafter K alone: its losses should be the same")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds until it counts as hung (300)")
    parser.add_argument("--json", action="store_true", help="print the losses of each drafter as one JSON document")
    options = parser.parse_args(arguments)
    options.devices = (options.devices or ("cuda:0" if torch.cuda.is_available() else "cpu")).split(",")
    if options.threads is None:
        options.threads = max(3, len(options.devices))
    if options.threads < 1 or options.steps < 1:
        parser.error(f"--threads and --steps must be at least 1, got {options.threads} and {options.steps}")
    if options.alone is not None and not 0 <= options.alone < options.threads:
        parser.error(f"--alone must name one of the {options.threads} drafters, 0 to {options.threads - 1}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.guard:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        import compile_guard

        compile_guard.install()
    # Room for each device, shape and grad mode. (Since torch 2.12 a new thread does not see this: hazard C2.)
    torch._dynamo.config.recompile_limit = 64
    devices = [torch.device(options.devices[k % len(options.devices)]) for k in range(options.threads)]
    if any(device.type == "cpu" for device in devices):
        say("CPU: flex_attention has no backward here. Layers train with SDPA, compiled whole; flex runs in evaluation.")
    numbers = range(options.threads) if options.alone is None else [options.alone]
    drafters: dict[int, Drafter] = {}
    for number in numbers:
        # Made one after the other: initialisation draws from the generator of the process.
        torch.manual_seed(1000 * options.seed + number)
        drafters[number] = Drafter()
    shared = Compiled.new()
    results: queue.Queue[tuple[int, dict[str, list[float]] | BaseException]] = queue.Queue()
    start = threading.Barrier(len(drafters))

    def work(number: int) -> None:
        compiled = shared if options.wrappers == "singleton" else Compiled.new()
        try:
            start.wait()
            results.put((number, train(number, drafters[number], compiled, devices[number], options)))
        except BaseException as error:  # handed to the main thread, which ends the program with it
            results.put((number, error))

    started = time.monotonic()
    for number in drafters:
        threading.Thread(target=work, args=(number,), name=f"drafter-{number}", daemon=True).start()
    finished: dict[int, dict[str, list[float]]] = {}
    failed = None
    while failed is None and len(finished) < len(drafters):
        try:
            number, result = results.get(timeout=max(0.0, started + options.timeout - time.monotonic()))
        except queue.Empty:
            unfinished = ", ".join(f"drafter-{number}" for number in drafters if number not in finished)
            failed = f"hung: {unfinished} not finished after {options.timeout:g} s"
        else:
            if isinstance(result, BaseException):
                traceback.print_exception(result)
                failed = f"drafter-{number} failed: {type(result).__name__}: {str(result).strip()}"
            else:
                finished[number] = result
                if not all(map(math.isfinite, result["losses"])):
                    failed = f"drafter-{number} has a loss that is not finite: {result['losses']}"
    wall_s = round(time.monotonic() - started, 1)
    if failed is not None:
        faulthandler.dump_traceback()
        say(failed)
    else:
        say(f"{len(finished)} drafters finished {options.steps} steps each in {wall_s} s")
    if options.json:
        drafted = {str(number): finished[number] for number in sorted(finished)}
        print(
            json.dumps({"torch": torch.__version__, "failed": failed, "wall_s": wall_s, "drafters": drafted}),
            flush=True,
        )
    if failed is None:
        return 0
    # Threads that hang would keep the interpreter from ending.
    sys.stderr.flush()
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
