"""The parts of the drafter against their definitions, written out."""

import math

import pytest
import torch
from tiny import tiny_config, tiny_drafter, tiny_vocabulary

from dflash_train.drafter import RMSNorm, attend, rotate, rotation
from dflash_train.vocabulary import Vocabulary


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_query_heads_share_keys_in_groups_of_neighbours(backend: str) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 3, 8, generator=generator)
    key, value = (torch.randn(1, 2, 5, 8, generator=generator) for _ in range(2))
    mask = torch.rand(1, 1, 3, 5, generator=generator) < 0.6
    mask[..., 0] = True
    out = attend(query, key, value, mask, backend)
    for head in range(4):
        for q in range(3):
            seen = [k for k in range(5) if mask[0, 0, q, k]]
            scores = torch.stack([query[0, head, q] @ key[0, head // 2, k] / math.sqrt(8) for k in seen]).softmax(0)
            expected = sum(s * value[0, head // 2, k] for s, k in zip(scores, seen, strict=True))
            torch.testing.assert_close(out[0, head, q], expected)


def test_rope_turns_dimension_i_with_i_plus_half_by_the_angle_of_its_position() -> None:
    """The neox layout, over the whole head, at a base that is no default."""
    x = torch.randn(1, 1, 2, 6, generator=torch.Generator().manual_seed(0))
    cos, sin = rotation(torch.tensor([[3, 700]]), 6, 5e6, torch.float32)
    out = rotate(x, cos, sin)
    for place, position in enumerate((3, 700)):
        for i in range(3):
            angle = position * 5e6 ** (-2 * i / 6)
            a, b = float(x[0, 0, place, i]), float(x[0, 0, place, i + 3])
            assert out[0, 0, place, i].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-4)
            assert out[0, 0, place, i + 3].item() == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-4)


def test_rms_norm_divides_by_the_root_mean_square() -> None:
    norm = RMSNorm(3, eps=0.5)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0])
    expected = torch.tensor([[1.0, -4.0, 6.0]]) / math.sqrt((1 + 4 + 4) / 3 + 0.5)
    torch.testing.assert_close(norm(torch.tensor([[1.0, -2.0, 2.0]])), expected)


def test_the_embedding_scale_multiplies_the_raw_rows() -> None:
    """As dflash does with `input_embedding_scale`."""
    table = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    vocabulary = Vocabulary(embedding=table, head=table, embedding_scale=25.0)
    assert torch.equal(vocabulary.embed(torch.tensor([3, 0])), table[[3, 0]] * 25.0)


def test_a_head_with_a_bias_uses_it() -> None:
    vocabulary = Vocabulary(embedding=torch.empty(0), head=torch.eye(3), head_bias=torch.tensor([0.0, 1.0, 2.0]))
    assert vocabulary.logits(torch.zeros(3)).tolist() == [0.0, 1.0, 2.0]


def test_a_tied_table_stays_one_on_another_device_or_type() -> None:
    table = torch.randn(5, 4)
    moved = Vocabulary(embedding=table, head=table, logit_softcap=2.0).to("cpu", torch.bfloat16)
    assert moved.embedding is moved.head
    assert (moved.head.dtype, moved.logit_softcap) == (torch.bfloat16, 2.0)


def test_no_weight_of_the_target_is_in_the_drafters_checkpoint() -> None:
    config = tiny_config()
    drafter, vocabulary = tiny_drafter(config), tiny_vocabulary(config)
    assert len(drafter.state_dict()) == 11 * config.num_layers + 3
    assert all(weight.shape != vocabulary.head.shape for weight in drafter.state_dict().values())
