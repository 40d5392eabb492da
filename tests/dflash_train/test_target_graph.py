"""A target's pass as a CUDA graph: what of it needs no GPU, and on a GPU that it gives the plain pass's states."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs import column, small_run
from tiny import SIZES, gemma3, make_rows, qwen3, qwen36, spread, tiny_config
from torch import Tensor, nn

from dflash_train.cuda_graph import NotCapturable, check_capturable
from dflash_train.packing import PackedRows
from dflash_train.target_graph import capture, difference_from_plain, packed_pass
from dflash_train.targets import Target

transformers = pytest.importorskip("transformers")
LAYOUT = [[9, 1, 12], [24], [], [3, 19]]


def packed_rows(lengths: list[list[int]] = LAYOUT, seed: int = 2) -> PackedRows:
    rows = make_rows(lengths, 24, tiny_config(vocab_size=120), seed)
    return PackedRows(
        tokens=rows.tokens,
        loss_mask=rows.loss_mask,
        documents=rows.documents,
        positions=rows.positions,
        document_numbers=tuple(tuple(range(len(row))) for row in lengths),
    )


def inputs_of(rows: PackedRows) -> tuple[Tensor, Tensor, Tensor]:
    return rows.tokens, rows.documents, rows.positions


def mistral() -> nn.Module:
    """One window for all layers, which have no kinds."""
    config = transformers.MistralConfig(**SIZES, head_dim=8, num_hidden_layers=6, sliding_window=4)
    return spread(transformers.MistralForCausalLM(config))


def experts() -> nn.Module:
    """A mixture of experts that goes over them one by one, each with its tokens."""
    config = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        decoder_sparse_step=1, experts_implementation="eager",
    )  # fmt: skip
    return spread(transformers.Qwen3MoeForCausalLM(config))


def growing_rotation() -> nn.Module:
    """RoPE whose base depends on the longest text that it has met."""
    rope = {"rope_type": "dynamic", "factor": 2.0}
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, max_position_embeddings=64)
    if hasattr(config, "rope_parameters"):
        config.rope_parameters = {**rope, "rope_theta": 1e4}
    else:
        config.rope_scaling = rope
    return spread(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("make", [qwen3, gemma3, mistral])
def test_masks_of_our_own_give_the_states_of_the_masks_of_transformers(make: Callable[[], nn.Module]) -> None:
    target, rows = Target(spread(make()), (1, 3)), packed_rows()
    taps, final = packed_pass(target)(*inputs_of(rows))
    assert difference_from_plain(target, rows, taps, final) < 1e-5
    assert taps.isfinite().all()
    assert final.isfinite().all()


def test_states_that_see_another_document_are_found_to_differ() -> None:
    target, rows = Target(spread(gemma3()), (1, 3)), packed_rows()
    one_document = torch.zeros_like(rows.documents)
    taps, final = packed_pass(target)(rows.tokens, one_document, rows.positions)
    assert difference_from_plain(target, rows, taps, final) > 0.1


@pytest.mark.parametrize("make", [qwen3, gemma3, mistral])
def test_dense_targets_do_nothing_that_a_graph_cannot_hold(make: Callable[[], nn.Module]) -> None:
    check_capturable(packed_pass(Target(spread(make()), (1, 3))), *inputs_of(packed_rows()))


@pytest.mark.parametrize("make", [experts, growing_rotation])
def test_what_a_target_decides_on_the_host_is_found_before_a_capture(make: Callable[[], nn.Module]) -> None:
    target = Target(make(), (0, 1))
    with pytest.raises(NotCapturable, match="waits for a value on the host"):
        check_capturable(packed_pass(target), *inputs_of(packed_rows()))


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x: x + 1, None),
        (lambda x: x[torch.zeros_like(x)], None),
        (lambda x: x.masked_fill(x > 2, 0), None),
        (lambda x: x * 2 if x.sum() > 0 else x, "waits for a value on the host"),
        (lambda x: x[x > 2], "shape of a tensor depends on values"),
        (lambda x: x.unique(), "shape of a tensor depends on values"),
        (lambda x: x.to("meta"), "copies between the host and the device"),
    ],
)
def test_what_a_graph_cannot_hold_is_told(run: Callable[[Tensor], Tensor], reason: str | None) -> None:
    if reason is None:
        check_capturable(run, torch.arange(6))
        return
    with pytest.raises(NotCapturable, match=reason):
        check_capturable(run, torch.arange(6))


def test_a_target_that_cannot_be_captured_says_why_and_runs_as_before() -> None:
    rows = packed_rows()
    hybrid, dense = Target(spread(qwen36(8)), (1, 5), name="hybrid"), Target(spread(qwen3()), (1, 3), name="dense")
    with pytest.raises(NotCapturable, match="each document is run by itself"):
        packed_pass(hybrid)
    assert capture(dense, rows) == "target dense runs kernel by kernel, not as a CUDA graph: it is on cpu"
    assert not dense.graphs
    dense.states_of(rows)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [qwen3, gemma3])
def test_replays_give_the_states_of_the_plain_pass(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """Of other tokens and other documents than those captured, each time in tensors of its own."""
    target = Target(spread(make()).to("cuda", dtype), (1, 3), name="tiny")
    said = capture(target, packed_rows().to("cuda"))
    assert "as a CUDA graph; its states" in said
    kept: list[tuple[PackedRows, Tensor]] = []
    for seed, lengths in enumerate(([[24]] * 4, LAYOUT[::-1], [[2] * 12] * 4)):
        rows = packed_rows(list(lengths), seed).to("cuda")
        states = target.states_of(rows)
        assert difference_from_plain(target, rows, states.taps, states.final) < (1e-4 if dtype == torch.float32 else 0.1)
        kept.append((rows, states.final))
    for rows, final in kept:
        assert torch.equal(target.states_of(rows).final, final)


@pytest.mark.cuda
def test_threads_on_streams_of_their_own_share_a_graph() -> None:
    target = Target(spread(gemma3()).to("cuda"), (1, 3))
    rows = [packed_rows(seed=i).to("cuda") for i in range(3)]
    capture(target, rows[0])
    assert target.graphs
    expected = [target.states_of(r).taps for r in rows]
    torch.cuda.synchronize()
    wrong: list[int] = []
    barrier = threading.Barrier(3, timeout=60)

    def run(i: int) -> None:
        barrier.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                if not torch.equal(target.states_of(rows[i]).taps, expected[i]):
                    wrong.append(i)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


@pytest.mark.cuda
def test_experts_chosen_on_the_host_run_kernel_by_kernel_on_a_gpu() -> None:
    """And the GPU is as before: no capture was begun."""
    target = Target(experts().to("cuda"), (0, 1))
    assert "kernel by kernel, not as a CUDA graph: " in capture(target, packed_rows().to("cuda"))
    assert not target.graphs
    assert target.states_of(packed_rows().to("cuda")).final.isfinite().all()


@pytest.mark.cuda
def test_three_drafters_train_alike_from_a_graph_and_from_the_plain_pass(tiny_data: Path, tmp_path: Path, clean: None) -> None:
    devices = ["train.target_devices=cuda:0,cuda:0", "train.drafter_devices=cuda:0,cuda:0,cuda:0"]
    flex = ["drafter.attention=flex", "data.row_length=256", "anchors.per_row=32", "train.steps=12"]
    graph = small_run(tiny_data, tmp_path / "graph", *flex, *devices)
    plain = small_run(tiny_data, tmp_path / "plain", *flex, *devices, "target.cuda_graph=false")
    assert graph.findings == plain.findings == ()
    assert column(tmp_path / "graph", "loss") == pytest.approx(column(tmp_path / "plain", "loss"), rel=1e-3)
