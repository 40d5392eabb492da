"""What only a GPU shows of a step: the host waits for nothing in it, and the compiled fused step is the eager reference."""

import dataclasses
from pathlib import Path

import pytest
import torch
from runs import small_config

import compile_guard
from dflash_train.anchors import Anchors
from dflash_train.data import Documents
from dflash_train.losses import LossSums
from dflash_train.packing import PackedDocuments, PackedRows
from dflash_train.pipeline import Source, Topology, hand_over, receive, with_states
from dflash_train.replica import Replica
from dflash_train.targets import TargetStates, load_target

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda", 0)


def one_batch(data: Path, *settings: str) -> tuple[Replica, tuple[PackedRows, Anchors, TargetStates]]:
    """A drafter on the GPU, and what it is given for the first step."""
    config = small_config(data, *settings)
    target = load_target(config.target, config.drafter.taps, CUDA)
    batch = Source(PackedDocuments(Documents(data), config.data.row_length), config, Topology(drafters_here=1)).batch(0)
    dtype = getattr(torch, config.train.dtype)
    replica = Replica(config, CUDA, target.vocabulary(1.0).to(CUDA, dtype))
    here = hand_over(with_states(batch, target), CUDA, dtype)
    return replica, (here.rows, here.anchors, receive(here, CUDA))


def test_forward_and_backward_make_the_host_wait_for_nothing(tiny_data: Path) -> None:
    pytest.importorskip("triton")
    compile_guard.install()
    settings = ["train.dtype=bfloat16", "drafter.attention=flex", "loss.kl=0.5", "loss.cap=0.1"]
    replica, batch = one_batch(tiny_data, *settings)
    for _ in range(2):
        replica.accumulate(*batch)
        replica.update(0, 10.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sums = replica.accumulate(*batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(sums.numerator) > 0


def test_the_compiled_fused_step_is_the_eager_reference(tiny_data: Path) -> None:
    pytest.importorskip("triton")
    compile_guard.install()
    results: list[tuple[LossSums, Replica]] = []
    for attention, loss in (("flex", "fused"), ("eager", "reference")):
        settings = [f"drafter.attention={attention}", f"loss.implementation={loss}"]
        replica, batch = one_batch(tiny_data, *settings, "loss.kl=0.5", "loss.cap=0.1", "loss.weighting=dpace")
        results.append((replica.accumulate(*batch), replica))
    fused, plain = results
    for field in dataclasses.fields(LossSums):
        torch.testing.assert_close(getattr(fused[0], field.name), getattr(plain[0], field.name), atol=1e-3, rtol=1e-3)
    for ours, theirs in zip(fused[1].gradients, plain[1].gradients, strict=True):
        assert float((ours - theirs).norm()) <= 1e-2 * float(theirs.norm())
