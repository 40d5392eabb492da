"""The layer as it is compiled: the same values and gradients as the plain one, and less kept for backward."""

import dataclasses

import torch
from tiny import tiny_config
from torch import Tensor

import compile_guard
from dflash_train import drafter as drafter_module
from dflash_train.drafter import DecoderLayer, rotation


def test_the_compiled_layer_keeps_less_and_computes_the_same(clean: None) -> None:
    config = dataclasses.replace(tiny_config(), hidden_size=32, intermediate_size=96)
    torch.manual_seed(0)
    layer = DecoderLayer(config)
    x, context = torch.randn(1, 24, 32), torch.randn(1, 8, 32)
    rope = rotation(torch.arange(32)[None], config.head_dim, 1e4, torch.float32)
    results: list[tuple[Tensor, ...]] = []
    kept: list[int] = []
    for run in (drafter_module._run_layer, drafter_module._run_layer_lean):
        compiled = compile_guard.compile(run, dynamic=False, fullgraph=True)
        states = [tensor.clone().requires_grad_() for tensor in (x, context)]
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = compiled(layer, *states, rope, None, "sdpa")
        gradients = torch.autograd.grad(out.square().sum(), [*states, *layer.parameters()])
        results.append((out.detach(), *gradients))
        kept.append(sum(sizes))
        with torch.no_grad():
            torch.testing.assert_close(compiled(layer, x, context, rope, None, "sdpa"), out.detach())
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)
    # The normed input of the MLP, and silu(gate)·up; a number or two for each of the 24 tokens may come instead.
    assert kept[1] <= kept[0] - 24 * (32 + 96 - 2)
