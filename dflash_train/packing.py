"""Documents packed into rows of one length, and the order in which rows are trained on.

Which documents share a row is decided once, from their lengths alone; the order of rows is shuffled anew each epoch. So
the position in the data is one integer, and a batch is a pure function of it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dflash_train.conversations import DataError
from dflash_train.data import Documents


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRows:
    """A batch of R rows of S tokens."""

    tokens: Tensor
    """[R, S] int64; 0 at padding."""
    loss_mask: Tensor
    """[R, S] bool."""
    documents: Tensor
    """[R, S] int64, index of the document in its row, -1 at padding (on the right)."""
    positions: Tensor
    """[R, S] int64, position in the document."""
    document_numbers: tuple[tuple[int, ...], ...]
    """Per row, numbers of its documents in the data set."""

    def to(self, device: torch.device | str) -> PackedRows:
        """The same on another device."""
        moved = {n: getattr(self, n).to(device) for n in ("tokens", "loss_mask", "documents", "positions")}
        return replace(self, **moved)


def plan_rows(lengths: Sequence[int] | np.ndarray, row_length: int) -> list[list[int]]:
    """Which documents go into which row: longest first, each into the fullest row where it still fits.

    Deterministic in its arguments. Longer documents count as `row_length`: they are cut.
    """
    cut = np.minimum(np.asarray(lengths, np.int64), row_length)
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (space left, row), sorted
    for number in np.argsort(-cut, kind="stable").tolist():
        length = int(cut[number])
        if length == 0:
            continue
        fit = bisect_left(open_rows, (length, -1))
        if fit < len(open_rows):
            space, row = open_rows.pop(fit)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(number)
        if space > length:
            insort(open_rows, (space - length, row))
    return rows


class RowSampler:
    """Which rows make up batch i, for any i ≥ 0: epochs follow each other without a gap, each in a new order.

    Nothing depends on what was read before: the position in the data is the number of the batch.

    Raises:
        DataError: there are no rows.
    """

    def __init__(self, num_rows: int, rows_per_batch: int, seed: int) -> None:
        if num_rows < 1:
            raise DataError("there are no rows to train on; prepare more data")
        self._num_rows = num_rows
        self._rows_per_batch = rows_per_batch
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}
        """Of the epochs read last: sorting a million rows for every batch would keep the reader busy."""

    def rows(self, batch: int) -> list[int]:
        """Row numbers of a batch."""
        return self.rows_from(batch * self._rows_per_batch, self._rows_per_batch)

    def rows_from(self, place: int, count: int) -> list[int]:
        """Row numbers at `count` places of the endless order, from the given one on: what a batch of another size reads."""
        places = range(place, place + count)
        known = self._orders
        epochs = {place // self._num_rows for place in places}
        self._orders = orders = {epoch: known[epoch] if epoch in known else self._order(epoch) for epoch in epochs}
        return [int(orders[place // self._num_rows][place % self._num_rows]) for place in places]

    def epoch(self, batch: int) -> float:
        """Passes over the data completed before a batch."""
        return batch * self._rows_per_batch / self._num_rows

    def _order(self, epoch: int) -> np.ndarray:
        # Sorting random bits, not `Generator.permutation`, whose result numpy may change from one version to the next.
        # The last word of the counter keeps these bits apart from those of the anchors.
        bits = np.random.Philox(key=self._seed, counter=[0, epoch, 0, 1]).random_raw(self._num_rows)
        return np.argsort(bits, kind="stable")


class PackedDocuments:
    """The documents of a folder as rows; those with the given `numbers` alone, if there are any."""

    def __init__(self, documents: Documents, row_length: int, numbers: range | None = None) -> None:
        self._documents = documents
        self._row_length = row_length
        numbers = numbers or range(len(documents))
        planned = plan_rows(documents.lengths[numbers.start : numbers.stop], row_length)
        self._rows = [[numbers[i] for i in row] for row in planned]
        self.num_cut = int((documents.lengths > row_length).sum())
        """Documents longer than a row."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fill(self) -> float:
        """Part of the rows' tokens that is not padding."""
        used = np.minimum(self._documents.lengths, self._row_length).sum()
        return float(used) / max(1, len(self) * self._row_length)

    def batch(self, rows: Sequence[int]) -> PackedRows:
        """The rows with these numbers, on the CPU."""
        shape = (len(rows), self._row_length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        loss_mask, documents = np.zeros(shape, np.bool_), np.full(shape, -1, np.int64)
        for i, row in enumerate(rows):
            start = 0
            for index, number in enumerate(self._rows[row]):
                document = self._documents[number]
                length = min(len(document.tokens), self._row_length)
                part = slice(start, start + length)
                tokens[i, part] = document.tokens[:length]
                loss_mask[i, part] = document.supervised[:length]
                documents[i, part] = index
                positions[i, part] = np.arange(length)
                start += length
        return PackedRows(
            tokens=torch.from_numpy(tokens),
            loss_mask=torch.from_numpy(loss_mask),
            documents=torch.from_numpy(documents),
            positions=torch.from_numpy(positions),
            document_numbers=tuple(tuple(self._rows[row]) for row in rows),
        )
