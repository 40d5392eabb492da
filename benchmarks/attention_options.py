"""flex_attention of the drafter alone, at the sizes of `drafter_step`: kernel options side by side, forward and backward.

    python -m benchmarks.attention_options [--only 0,3] [--limit 120] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import compile_guard
from benchmarks.measure import environment, markdown, time_cuda, write_json
from dflash_train.config_files import load_config
from dflash_train.masks import flex_mask, visible_keys

LENGTH, NUM_BLOCKS = 3072, 512
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"ROWS_GUARANTEED_SAFE": True},
    {"ROWS_GUARANTEED_SAFE": True, "PRESCALE_QK": True},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 128, "fwd_num_stages": 2, "fwd_num_warps": 8},
    {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 3, "fwd_num_warps": 4},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 3, "bwd_num_warps": 4},
    {"bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 64, "bwd_num_stages": 2, "bwd_num_warps": 8},
    {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 128, "bwd_BLOCK_M2": 128, "bwd_BLOCK_N2": 32, "bwd_num_stages": 3, "bwd_num_warps": 4},
    {"USE_TMA": True},
)


def main() -> None:
    """Measure each set of options within the time limit; print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="numbers of the sets, with commas")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which nothing new is begun")
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    deadline = time.perf_counter() + options.limit
    config = load_config("qwen3-8b").drafter
    tokens = NUM_BLOCKS * config.block_size
    generator = torch.Generator().manual_seed(1)
    anchors = torch.randperm(LENGTH - 1, generator=generator)[:NUM_BLOCKS].sort().values[None].cuda()
    documents = torch.zeros(1, LENGTH, dtype=torch.int64, device="cuda")
    mask = flex_mask(visible_keys(anchors, torch.ones_like(anchors, dtype=torch.bool), documents, config.block_size))

    def states(heads: int, length: int) -> Tensor:
        # As the layer has them: heads beside each other in memory.
        made = torch.randn(1, length, heads, config.head_dim, device="cuda", dtype=torch.bfloat16)
        return made.transpose(1, 2).requires_grad_()

    query = states(config.num_heads, tokens)
    key, value = (states(config.num_kv_heads, LENGTH + tokens) for _ in range(2))
    direction = torch.randn_like(query.detach())
    work = 4 * tokens * (LENGTH / 2 + config.block_size) * config.num_heads * config.head_dim
    wanted = [int(number) for number in options.only.split(",") if number]
    results: dict[str, Any] = {}
    lines: list[list[str]] = []
    truth: Tensor | None = None
    for number, chosen in enumerate(OPTIONS):
        if (wanted and number not in wanted) or time.perf_counter() > deadline:
            continue

        def attend(query: Tensor, key: Tensor, value: Tensor, chosen: dict[str, Any] = chosen) -> Tensor:
            out = flex_attention(query, key, value, block_mask=mask, enable_gqa=True, kernel_options=chosen)
            assert isinstance(out, Tensor)
            return out

        compiled = compile_guard.compile(attend, dynamic=False, fullgraph=True)

        def forward() -> Tensor:
            with torch.no_grad():
                return compiled(query, key, value)  # noqa: B023

        def both() -> Tensor:
            query.grad = key.grad = value.grad = None
            out: Tensor = compiled(query, key, value)  # noqa: B023
            out.backward(direction)
            assert query.grad is not None
            return query.grad

        name = f"{number}: " + (" ".join(f"{option}={setting}" for option, setting in chosen.items()) or "torch's own")
        try:
            gradient = both()
            off = 0.0 if truth is None else float((gradient - truth).float().norm() / truth.float().norm())
            truth = gradient.clone() if truth is None else truth
            first, second = time_cuda(forward, limit_s=5), time_cuda(both, limit_s=5)
        except RuntimeError as error:  # options that do not fit the card
            print(f"{name}: {type(error).__name__}: {str(error)[:160]}", flush=True)
            continue
        backward = second.median - first.median
        rates = work / first.median / 1e9, 2.5 * work / backward / 1e9
        print(
            f"{name}\n    forward {first.median:.3f} ms {rates[0]:.0f} TFLOP/s, backward {backward:.3f} ms {rates[1]:.0f} "
            f"TFLOP/s, gradient off {off:.0e}",
            flush=True,
        )
        results[name] = {"forward_ms": first.median, "backward_ms": backward, "off": off}
        lines.append([name, f"{first.median:.2f}", f"{backward:.2f}", f"{rates[0]:.0f}", f"{rates[1]:.0f}"])
    print(environment())
    print(markdown(["options", "forward ms", "backward ms", "TFLOP/s forward", "backward"], lines))
    write_json(options.json, {"attention_options": results})


if __name__ == "__main__":
    main()
