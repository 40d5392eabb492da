import itertools
import shutil

import pytest
import torch
from tiny import hidden_states, make_anchors, make_rows, tiny_config, tiny_drafter, tiny_vocabulary
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from dflash_train.config import ConfigError
from dflash_train.drafter import Masks, attend
from dflash_train.masks import dense_mask, flex_mask, visible_keys

RULES = ["specforge", "speculators", "speculators-bidirectional", "modelopt"]
# Documents and padding; anchors closer than a block, at a document's first and last token, and invalid blocks.
LENGTHS = [[9, 1, 12], [5, 20]]
ANCHORS = [[0, 3, 4, 8, 9, 12, 21], [4, 5, 18, 24]]
ROW, BLOCKS, BLOCK = 26, 8, 4


def brute_force(anchors: Tensor, valid: Tensor, documents: Tensor, block: int, rule: str | None, window: int) -> Tensor:
    """The published rules, query by query and key by key."""
    num_rows, num_blocks = anchors.shape
    length = documents.shape[1]
    mask = torch.zeros(num_rows, num_blocks * block, length + num_blocks * block, dtype=torch.bool)
    for row, j, o in itertools.product(range(num_rows), range(num_blocks), range(block)):
        a = int(anchors[row, j])
        query = j * block + o
        for p in range(length):
            seen = bool(valid[row, j]) and documents[row, p] == documents[row, a] and p < a
            if rule in ("specforge", "modelopt"):
                seen = seen and p >= (a + o) - (window - 1)
            elif rule is not None:
                seen = seen and p >= a - window
            mask[row, query, p] = seen
        for other in range(block):
            causal = rule in ("specforge", "speculators")
            mask[row, query, length + j * block + other] = other <= o or not causal
    return mask


@pytest.mark.parametrize("rule", [None, *RULES])
@pytest.mark.parametrize("window", [4, 7])
def test_dense_mask_is_the_published_rule(rule: str | None, window: int) -> None:
    rows, anchors = make_rows(LENGTHS, ROW, tiny_config()), make_anchors(ANCHORS, BLOCKS)
    ranges = visible_keys(
        anchors.positions, anchors.valid, rows.documents, BLOCK,
        sliding_window=window if rule else None, sliding_rule=rule or "specforge",  # type: ignore[arg-type]
    )  # fmt: skip
    expected = brute_force(anchors.positions, anchors.valid, rows.documents, BLOCK, rule, window)
    assert torch.equal(dense_mask(ranges)[:, 0], expected)


@pytest.mark.parametrize("rule", [None, "specforge", "modelopt"])
def test_flex_tiles_and_mask_function_are_the_dense_mask(rule: str | None) -> None:
    """Several tiles a side, lengths that are no multiple of a tile: full, partial and empty tiles all occur."""
    config = tiny_config(block_size=16)
    lengths = [[300, 17, 100], [400]]
    rows = make_rows(lengths, 420, config)
    generator = torch.Generator().manual_seed(0)
    drawn = [sorted(torch.randperm(sum(row), generator=generator)[:19].tolist()) for row in lengths]
    anchors = make_anchors([drawn[0], list(range(200, 376, 16))], 20)
    ranges = visible_keys(
        anchors.positions, anchors.valid, rows.documents, 16,
        sliding_window=150 if rule else None, sliding_rule=rule or "specforge",  # type: ignore[arg-type]
    )  # fmt: skip
    dense = dense_mask(ranges)
    mask = flex_mask(ranges)
    reference = create_block_mask(mask.mask_mod, B=2, H=None, Q_LEN=320, KV_LEN=420 + 320, device="cpu")
    assert mask.shape == reference.shape == (2, 1, 320, 740)
    # What each tile of ours lets through, rebuilt from its lists.
    rebuilt = torch.zeros_like(dense)
    kinds = {"partial": 0, "full": 0}
    for row, q in itertools.product(range(2), range(mask.kv_num_blocks.shape[-1])):
        for kind, counts, lists in (
            ("partial", mask.kv_num_blocks, mask.kv_indices),
            ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
        ):
            assert counts is not None
            assert lists is not None
            for kv in lists[row, 0, q, : int(counts[row, 0, q])].tolist():
                kinds[kind] += 1
                tile = (row, 0, slice(q * 128, q * 128 + 128), slice(kv * 128, kv * 128 + 128))
                rebuilt[tile] = True if kind == "full" else dense[tile]
    assert torch.equal(rebuilt, dense)
    assert kinds["partial"] > 0
    if rule is None:
        assert kinds["full"] > 0
        assert torch.equal(mask.to_dense(), reference.to_dense())
    query, key = torch.arange(320)[:, None], torch.arange(740)[None, :]
    for row in range(2):
        through = mask.mask_mod(torch.tensor(row), torch.tensor(0), query, key)
        assert torch.equal(through, dense[row, 0])


@pytest.mark.parametrize("changes", [
    {},
    {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6},
    {"layer_types": ("sliding_attention",) * 2, "sliding_window": 6, "sliding_rule": "modelopt"},
])  # fmt: skip
def test_packed_forward_is_one_block_at_a_time(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    rows, anchors = make_rows(LENGTHS, ROW, config), make_anchors(ANCHORS, BLOCKS)
    packed = hidden_states(drafter, vocabulary, rows, anchors).unflatten(1, (BLOCKS, BLOCK))
    blocks = rows.blocks(anchors, config)
    for row, row_anchors in enumerate(ANCHORS):
        for j, a in enumerate(row_anchors):
            start = a - int(rows.positions[row, a])
            ids = blocks.ids[row : row + 1].unflatten(1, (BLOCKS, BLOCK))[:, j]
            alone = make_anchors([[a - start]], 1)
            # For sliding layers the block alone still needs their mask; full layers need none at all.
            masks = drafter.masks(alone, torch.zeros(1, a - start + 1, dtype=torch.int64)) if changes else Masks()
            if changes:
                masks = Masks(**{k: m if m is None else cut(m, a - start) for k, m in vars(masks).items()})
            out = drafter(
                vocabulary.embed(ids),
                drafter.fuse(rows.taps[row : row + 1, start:a]),
                torch.arange(a - start, a - start + BLOCK)[None],
                torch.arange(a - start)[None],
                masks,
            )
            torch.testing.assert_close(packed[row : row + 1, j], out, atol=2e-5, rtol=1e-5)


def cut(mask: Tensor, context: int) -> Tensor:
    """Drop the anchor's own context column, which a lone block does not have."""
    return torch.cat([mask[..., :context], mask[..., context + 1 :]], dim=-1)


def test_hidden_states_at_the_anchor_and_later_move_nothing() -> None:
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    rows, anchors = make_rows([[20]], 20, config), make_anchors([[7]], 1)
    before = hidden_states(drafter, vocabulary, rows, anchors)
    rows.taps[:, 7:] = 1e3
    assert torch.equal(hidden_states(drafter, vocabulary, rows, anchors), before)
    rows.taps[:, 6] += 1
    assert not torch.allclose(hidden_states(drafter, vocabulary, rows, anchors), before)


def test_other_documents_and_other_blocks_move_nothing() -> None:
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    rows, anchors = make_rows([[10, 10]], 20, config), make_anchors([[14, 15]], 2)
    before = hidden_states(drafter, vocabulary, rows, anchors)
    rows.taps[:, :10] += 1
    assert torch.equal(hidden_states(drafter, vocabulary, rows, anchors), before)
    rows.tokens[:, 14] = (rows.tokens[:, 14] + 1) % 90  # the first block's anchor token, unseen by the second
    after = hidden_states(drafter, vocabulary, rows, anchors)
    assert torch.equal(after[:, 4:], before[:, 4:])
    assert not torch.allclose(after[:, :4], before[:, :4])


def test_attention_inside_a_block_runs_both_ways() -> None:
    """SpecForge #427: with a causal block, an early slot would not move when a later one changes."""
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    rows, anchors = make_rows([[20]], 20, config), make_anchors([[7]], 1)
    blocks = rows.blocks(anchors, config)
    states = vocabulary.embed(blocks.ids)
    masks, context = drafter.masks(anchors, rows.documents), drafter.fuse(rows.taps)
    before = drafter(states, context, blocks.positions, rows.positions, masks)
    states[:, 3] += 1
    after = drafter(states, context, blocks.positions, rows.positions, masks)
    assert not torch.allclose(after[:, 0], before[:, 0])


@pytest.mark.parametrize("rule", [None, "specforge"])
def test_eager_and_sdpa_agree_forward_and_backward(rule: str | None) -> None:
    changes: dict[str, object] = (
        {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6} if rule else {}
    )
    results = []
    for backend in ("eager", "sdpa"):
        config = tiny_config(attention=backend, **changes)
        drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
        rows, anchors = make_rows(LENGTHS, ROW, config), make_anchors(ANCHORS, BLOCKS)
        hidden = hidden_states(drafter, vocabulary, rows, anchors)
        (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3))).sum().backward()
        results.append([hidden, *(p.grad for p in drafter.parameters())])
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(eager, sdpa, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling flex_attention for the CPU needs g++")
def test_flex_equals_sdpa_and_one_graph_serves_all_layers_and_steps() -> None:
    """SpecForge #477, attention-gym #159. Forward only: flex_attention has no backward on the CPU."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    changes: dict[str, object] = {
        "head_dim": 16, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 6,
    }  # fmt: skip
    graphs = []
    with torch.no_grad():
        for seed in range(4):  # other documents, anchors and numbers of valid blocks in each step
            anchors = make_anchors([ANCHORS[seed % 2][: 4 + seed], ANCHORS[1]], BLOCKS)
            hidden = []
            for backend in ("sdpa", "flex"):
                config = tiny_config(attention=backend, **changes)
                rows = make_rows([LENGTHS[seed % 2], LENGTHS[1]], ROW, config, seed=seed)
                drafter = tiny_drafter(config)
                hidden.append(hidden_states(drafter, tiny_vocabulary(config), rows, anchors))
            torch.testing.assert_close(hidden[1], hidden[0], atol=2e-5, rtol=1e-4)
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [graphs[0]] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_gets_queries_keys_and_values_of_the_models_own_type(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch #176025: flex_attention cannot compile a backward of mixed types, which RoPE in fp32 would make."""
    seen: list[torch.dtype] = []

    def recording(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
        seen.extend(x.dtype for x in (query, key, value))
        return attend(query, key, value, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("dflash_train.drafter.attend", recording)
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config).to(dtype), tiny_vocabulary(config).to("cpu", dtype)
    rows, anchors = make_rows(LENGTHS, ROW, config), make_anchors(ANCHORS, BLOCKS)
    rows.taps = rows.taps.to(dtype)
    assert hidden_states(drafter, vocabulary, rows, anchors).dtype == dtype
    assert seen == [dtype] * 6


def test_rows_without_any_valid_block_stay_finite() -> None:
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    rows, anchors = make_rows([[], [5]], 12, config), make_anchors([[], []], 3)
    hidden = hidden_states(drafter, vocabulary, rows, anchors)
    hidden.sum().backward()
    assert hidden.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())


def test_a_window_that_ends_inside_the_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window must be at least drafter\.block_size = 4, got 3"):
        tiny_config(layer_types=("sliding_attention",) * 2, sliding_window=3)
