"""What a DDTree costs: making it from the drafter's logits, and a decoding step beside the target's own pass.

    python -m benchmarks.ddtree [--vocab 150000] [--depth 7] [--budgets 16,64,256,1024] [--compile 64] [--limit 120]

1. `build_tree` from logits [1, D, V] to tokens, parents, depths and masks on the device, stage by stage: eager, and
   replayed from a CUDA graph, where launches from Python cost nothing. Bound: 256 nodes of V = 150,000 in 0.5 ms, eager.
2. A step of `ddtree` on Gemma 3 270M (random weights of its shape, or `--target DIR|GGUF`), a drafter of the preset, one
   row: its parts, and the verification over the target's own pass, which has the same tokens, cache and masks, made before.

Times are medians of CUDA events. Without a GPU all runs in a small size on the CPU, by the clock, to show that it runs.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.measure import environment, markdown, time_cuda, write_json
from dflash_train import ddtree
from dflash_train.caches import SlotCache
from dflash_train.config import DrafterConfig, TargetConfig
from dflash_train.config_files import load_config
from dflash_train.ddtree import build_tree, walk_tree
from dflash_train.decode import DecodeConfig, Decoder
from dflash_train.drafter import Drafter
from dflash_train.targets import Target, load_target, tiny_model

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
BOUND_MS = 0.5


def median_ms(call: Callable[[], Any], rounds: int) -> float:
    """Median of `rounds` after a warm-up."""
    if CUDA:
        return time_cuda(call, warm_ups=5, rounds=rounds, limit_s=5.0).median
    call()
    times = []
    for _ in range(min(rounds, 5)):
        began = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def replayed_ms(call: Callable[[], Any], rounds: int) -> float | None:
    """The same from a CUDA graph; None where it cannot be captured."""
    if not CUDA:
        return None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except RuntimeError as error:
        print(f"  not captured: {str(error).splitlines()[0][:120]}", flush=True)
        return None
    return median_ms(graph.replay, rounds)


def building(vocab: int, depth: int, budget: int, dtype: torch.dtype, rounds: int) -> dict[str, float | None]:
    """Milliseconds of a tree and of its stages."""
    logits = (torch.randn(1, depth, vocab, generator=torch.Generator().manual_seed(0)) * 3).to(DEVICE, dtype)
    roots = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    width = min(budget, vocab)
    tokens = logits.topk(width, dim=-1).indices
    log = logits.log_softmax(-1, dtype=torch.float32).gather(-1, tokens).clamp_(max=0.0)
    kernel = ddtree._tree_kernel() if CUDA else None

    def whole() -> Any:
        return build_tree(roots, logits, budget)

    figures: dict[str, float | None] = {
        "whole": median_ms(whole, rounds),
        "replayed": replayed_ms(whole, rounds),
        "topk": median_ms(lambda: logits.topk(width, dim=-1), rounds),
        "log_softmax": median_ms(lambda: logits.log_softmax(-1, dtype=torch.float32), rounds),
        "kernels": None if kernel is None else median_ms(lambda: kernel.grow_tree(roots, log, tokens, budget), rounds),
        "level by level": median_ms(lambda: ddtree.grow_tree(roots, log, tokens, budget), rounds),
    }
    if kernel is not None:
        ours, plain = kernel.grow_tree(roots, log, tokens, budget), ddtree.grow_tree(roots, log, tokens, budget)
        same = all(torch.equal(getattr(ours, name), getattr(plain, name)) for name in ("tokens", "parents", "ancestors"))
        print(f"  {budget} nodes, {dtype}: the kernels' tree {'equals' if same else 'DIFFERS FROM'} torch's", flush=True)
    return figures


def random_gemma() -> nn.Module:
    """Gemma 3 270M's shape on the GPU, the tiny target elsewhere."""
    if not CUDA:
        return tiny_model(0)
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(18)]
    torch.manual_seed(0)
    with DEVICE:
        model: nn.Module = Gemma3ForCausalLM(
            Gemma3TextConfig(
                vocab_size=262144, hidden_size=640, intermediate_size=2048, num_hidden_layers=18, num_attention_heads=4,
                num_key_value_heads=1, head_dim=256, sliding_window=512, layer_types=kinds,
            )
        )  # fmt: skip
    return model.bfloat16()


def stepping(decoder: Decoder, budget: int, context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the parts of one step, each called by itself on the same state, and of the target's own passes."""
    target, drafter = decoder.target, decoder.drafter
    assert drafter is not None
    vocab = target.vocabulary().embedding.shape[0]
    prompt = torch.randint(0, vocab, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    run = decoder._begin([prompt], "ddtree", DecodeConfig(max_new_tokens=8), budget)
    run.prefill()
    cache, drafter_cache = run._cache, run._drafter_cache
    assert isinstance(cache, SlotCache)
    assert drafter_cache is not None
    logits = run._draft()
    tree = build_tree(run._roots, logits, budget)
    states = cache.verify(tree)
    posterior = run._pick(states.final)
    walk = walk_tree(tree, posterior)
    positions = cache.lengths.unsqueeze(1) + tree.depths
    masks = cache._masks(tree, positions)
    none_kept = torch.zeros_like(walk.accepted)
    path_taps = states.taps[:, : drafter.config.block_size].contiguous()
    root = ddtree.chain_tree(run._roots, tree.tokens[:, :0])

    calls: dict[str, Callable[[], Any]] = {
        "the target's own pass": lambda: target.run(tree.tokens, positions, masks, cache._store),
        "drafter's pass": run._draft,
        "tree": lambda: build_tree(run._roots, logits, budget),
        "masks": lambda: cache._masks(tree, positions),
        "head and choice": lambda: run._pick(states.final),
        "walk": lambda: walk_tree(tree, posterior),
        "keep": lambda: cache.keep(tree, walk.path, none_kept),
        "drafter's context": lambda: drafter_cache.extend(path_taps, cache.lengths),
    }
    figures = {}
    with torch.no_grad():
        for name, call in calls.items():
            figures[name] = median_ms(call, rounds)
        figures["a step of ar"] = median_ms(lambda: run._pick(cache.verify(root).final), rounds)
    own = figures["the target's own pass"]
    figures["verify over the target's own pass"] = (
        own + sum(figures[name] for name in ("masks", "head and choice", "walk", "keep"))
    ) / own
    return figures


def compiled(decoder: Decoder, budget: int, context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the passes of a step, eager and compiled, and of the compiles."""
    vocab = decoder.target.vocabulary().embedding.shape[0]
    prompt = torch.randint(0, vocab, (context,), generator=torch.Generator().manual_seed(1)).tolist()
    figures = {}
    for name in ("eager", "compiled"):
        decoder.compile = name == "compiled"
        run = decoder._begin([prompt], "ddtree", DecodeConfig(max_new_tokens=8), budget)
        with torch.no_grad():
            run.prefill()
            tree = build_tree(run._roots, run._draft(), budget)
            root = ddtree.chain_tree(run._roots, tree.tokens[:, :0])
            calls = {"tree's pass": tree, "ar's pass": root}
            for what, nodes in calls.items():
                began = time.perf_counter()
                run._cache.verify(nodes)
                figures[f"{what}, first call, {name}"] = 1e3 * (time.perf_counter() - began)
                figures[f"{what}, {name}"] = median_ms(functools.partial(run._cache.verify, nodes), rounds)
            figures[f"drafter's pass, {name}"] = median_ms(run._draft, rounds)
    decoder.compile = False
    return figures


def main() -> int:
    """Both parts; 0 unless the bound does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=150_000)
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--budgets", default="16,64,256,1024", help="drafted nodes (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="certain tokens before the step (%(default)s)")
    parser.add_argument("--target", help="a folder or .gguf file instead of random weights")
    parser.add_argument("--compile", type=int, metavar="NODES", help="and the passes of a tree of so many nodes, compiled")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which nothing new is begun")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    budgets = [int(text) for text in options.budgets.split(",")]
    deadline = time.perf_counter() + options.limit
    torch.backends.cuda.matmul.allow_tf32 = False
    print(environment(), flush=True)
    results: dict[str, Any] = {"building": {}, "stepping": {}}
    rows = []
    missed = False
    for dtype in (torch.bfloat16, torch.float32):
        for budget in budgets:
            if time.perf_counter() > deadline:
                print("the time limit is reached", flush=True)
                break
            figures = building(options.vocab, options.depth, budget, dtype, options.rounds)
            name = str(dtype).removeprefix("torch.")
            results["building"][f"{name}/{budget}"] = figures
            rows.append([name, str(budget), *("-" if ms is None else f"{ms:.3f}" for ms in figures.values())])
            if CUDA and budget == 256 and options.vocab >= 150_000:
                whole = figures["whole"] or 0.0
                missed = missed or whole > BOUND_MS
                verdict = "ok" if whole <= BOUND_MS else "MISSED"
                print(f"  256 nodes, {name}: {whole:.3f} ms, bound {BOUND_MS} ms: {verdict}", flush=True)
    stages = ["whole", "replayed", "topk", "log_softmax", "kernels", "level by level"]
    print(markdown(["logits", "nodes", *(f"{stage}, ms" for stage in stages)], rows), flush=True)

    preset = load_config("gemma3-270m" if CUDA or options.target else "tiny-cpu")
    config: DrafterConfig = preset.drafter
    if options.target:
        target = load_target(TargetConfig(path=options.target, dtype="bfloat16"), config.taps, DEVICE)
    else:
        target = Target(random_gemma().to(DEVICE), config.taps)
    drafter = Drafter(replace(config, attention="auto"))
    dtype = target.vocabulary().embedding.dtype
    decoder = Decoder(target, drafter.to(DEVICE, dtype).eval().requires_grad_(False))
    context = options.context if CUDA else min(options.context, 64)
    for budget in budgets:
        if time.perf_counter() > deadline:
            print("the time limit is reached", flush=True)
            break
        parts = results["stepping"][str(budget)] = stepping(decoder, budget, context, options.rounds)
        print(f"\na step of {budget} nodes behind {context} tokens, {dtype}:", flush=True)
        for name, value in parts.items():
            print(f"  {name:<36} {value:8.3f}{'' if 'over' in name else ' ms'}", flush=True)
    write_json(options.json, {"ddtree": results})
    if options.compile:
        figures = results["compiled"] = compiled(decoder, options.compile, context, options.rounds)
        print(f"\ncompiled, {options.compile} nodes behind {context} tokens:", flush=True)
        for name, value in figures.items():
            print(f"  {name:<36} {value:10.3f} ms", flush=True)
        write_json(options.json, {"ddtree": results})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
