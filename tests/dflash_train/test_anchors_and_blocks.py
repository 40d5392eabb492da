import numpy as np
import pytest
import torch
from tiny import VOCAB, make_anchors, make_rows, tiny_config
from torch import Tensor

from dflash_train.anchors import Anchors, admissible_anchors, draw_anchors


def draw(loss_mask: Tensor, documents: Tensor, numbers: list[list[int]], **changes: int) -> Anchors:
    settings = {"per_document": 3, "per_row": 8, "seed": 5, "step": 0} | changes
    return draw_anchors(loss_mask, documents, numbers, **settings)  # type: ignore[arg-type]


def test_an_anchor_and_its_first_label_are_both_supervised() -> None:
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1, 1], dtype=bool)
    assert admissible_anchors(mask).tolist() == [1, 6, 7]


def test_an_anchor_never_takes_its_label_from_the_next_document() -> None:
    mask = torch.ones(1, 8, dtype=torch.bool)
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, -1, -1]])
    anchors = draw(mask & (documents >= 0), documents, [[0, 1, 2]])
    assert anchors.positions[anchors.valid].tolist() == [0, 1, 3]
    assert anchors.num_empty_documents == 1


def test_anchors_are_distinct_sorted_and_at_most_the_asked_number() -> None:
    mask = torch.ones(2, 40, dtype=torch.bool)
    documents = torch.tensor([[0] * 20 + [1] * 20, [0] * 40])
    anchors = draw(mask, documents, [[7, 9], [4]], per_document=5, per_row=12)
    assert anchors.valid.sum(1).tolist() == [10, 5]
    for row in range(2):
        kept = anchors.positions[row][anchors.valid[row]].tolist()
        assert kept == sorted(set(kept))
    assert (anchors.positions[0][anchors.valid[0]] < 20).sum() == 5
    assert not anchors.positions[~anchors.valid].any()


def test_the_draw_of_a_document_does_not_depend_on_where_it_is_packed() -> None:
    """One replica or several: a document's anchors are the same in any row, beside any other document."""
    mask = torch.rand(1, 30, generator=torch.Generator().manual_seed(0)) < 0.7
    alone = draw(mask, torch.zeros(1, 30, dtype=torch.int64), [[17]], per_document=6)
    other = torch.ones(1, 11, dtype=torch.bool)
    documents = torch.tensor([[0] * 11 + [1] * 30 + [-1] * 4])
    padding = torch.zeros(1, 4, dtype=torch.bool)
    packed = draw(torch.cat([other, mask, padding], 1), documents, [[3, 17]], per_document=6, per_row=20)
    inside = packed.positions[packed.valid & (packed.positions >= 11)] - 11
    assert inside.tolist() == alone.positions[alone.valid].tolist()


@pytest.mark.parametrize("change", [{"step": 1}, {"seed": 6}])
def test_another_step_or_seed_draws_anew_and_the_same_one_again(change: dict[str, int]) -> None:
    mask, documents = torch.ones(1, 200, dtype=torch.bool), torch.zeros(1, 200, dtype=torch.int64)
    first = draw(mask, documents, [[0]], per_document=8)
    assert torch.equal(first.positions, draw(mask, documents, [[0]], per_document=8).positions)
    assert not torch.equal(first.positions, draw(mask, documents, [[0]], per_document=8, **change).positions)
    assert not torch.equal(first.positions, draw(mask, documents, [[1]], per_document=8).positions)


def test_the_draw_is_pinned_for_good() -> None:
    """A resumed run must draw what the first one did, also after an upgrade of numpy."""
    mask, documents = torch.ones(1, 1000, dtype=torch.bool), torch.zeros(1, 1000, dtype=torch.int64)
    anchors = draw(mask, documents, [[11]], per_document=6, per_row=6, seed=2, step=3)
    assert anchors.positions.tolist() == [[53, 181, 505, 645, 725, 953]]


def test_every_admissible_position_is_drawn_equally_often() -> None:
    """Chi-square over 2,000 steps and 19 positions: 5 standard deviations of its mean is the bound."""
    mask, documents = torch.ones(1, 20, dtype=torch.bool), torch.zeros(1, 20, dtype=torch.int64)
    counts = torch.zeros(20)
    for step in range(2000):
        anchors = draw(mask, documents, [[0]], per_document=4, step=step)
        counts[anchors.positions[anchors.valid]] += 1
    assert counts[19] == 0
    expected = 2000 * 4 / 19
    chi_square = float(((counts[:19] - expected) ** 2 / (expected * (1 - 4 / 19))).sum())
    assert chi_square < 18 + 5 * 6


def test_a_full_row_drops_the_rest_evenly_and_counts_it() -> None:
    mask = torch.ones(1, 300, dtype=torch.bool)
    documents = torch.tensor([[0] * 100 + [1] * 200])
    in_first = 0
    for step in range(100):
        anchors = draw(mask, documents, [[0, 1]], per_document=1000, per_row=30, step=step)
        assert anchors.num_over_budget == 99 + 199 - 30
        in_first += int((anchors.positions < 100).sum())
    assert abs(in_first / 3000 - 99 / 298) < 0.04


def test_packed_documents_are_covered_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """speculators #1071: one draw per packed row starves short documents."""
    lengths = [400, 12, 12, 12, 12]
    documents = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))[None]
    mask = torch.ones_like(documents, dtype=torch.bool)
    anchors = draw(mask, documents, [[0, 1, 2, 3, 4]], per_document=8, per_row=40)
    per_document = torch.bincount(documents[0][anchors.positions[0][anchors.valid[0]]], minlength=5)
    assert per_document.tolist() == [8] * 5


def test_no_admissible_anchor_is_no_error() -> None:
    mask, documents = torch.zeros(2, 9, dtype=torch.bool), torch.zeros(2, 9, dtype=torch.int64)
    anchors = draw(mask, documents, [[0], [1]])
    assert not anchors.valid.any()
    assert anchors.num_empty_documents == 2


def test_slot_k_predicts_the_token_k_after_the_anchor() -> None:
    config = tiny_config()
    rows, anchors = make_rows([[12]], 12, config), make_anchors([[3]], 2)
    rows.loss_mask[:] = True
    rows.tokens[:] = torch.arange(12) + 40
    blocks = rows.blocks(anchors, config)
    assert blocks.ids[0].tolist() == [43, VOCAB - 1, VOCAB - 1, VOCAB - 1] + [VOCAB - 1] * 4
    assert blocks.positions[0, :4].tolist() == [3, 4, 5, 6]
    assert blocks.labels[0, 0].tolist() == [44, 45, 46]
    assert blocks.teacher_positions[0, 0].tolist() == [3, 4, 5]
    assert blocks.supervised[0].tolist() == [[True] * 3, [False] * 3]


def test_sampling_from_the_anchor_moves_every_label_by_one() -> None:
    config = tiny_config(sample_from_anchor=True)
    rows, anchors = make_rows([[12]], 12, config), make_anchors([[3]], 1)
    rows.loss_mask[:] = True
    rows.tokens[:] = torch.arange(12) + 40
    blocks = rows.blocks(anchors, config)
    assert blocks.labels[0, 0].tolist() == [44, 45, 46, 47]
    assert blocks.teacher_positions[0, 0].tolist() == [3, 4, 5, 6]


def test_slots_past_the_document_or_unsupervised_carry_no_loss() -> None:
    config = tiny_config()
    rows, anchors = make_rows([[6, 6]], 13, config), make_anchors([[3, 4, 10]], 3)
    rows.loss_mask[:] = True
    rows.loss_mask[0, 5] = False
    blocks = rows.blocks(anchors, config)
    assert blocks.supervised[0].tolist() == [[True, False, False], [False, False, False], [True, False, False]]
    assert not blocks.labels[~blocks.supervised].any()


def test_rope_positions_restart_with_the_document() -> None:
    config = tiny_config()
    rows, anchors = make_rows([[5, 7]], 12, config), make_anchors([[7]], 1)
    assert rows.blocks(anchors, config).positions[0].tolist() == [2, 3, 4, 5]
