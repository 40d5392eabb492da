import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the module has Triton's kernels")

from dflash_train.kernels.head_loss import LOGITS_BYTES, rows_per_chunk


@given(
    num_rows=st.integers(0, 20_000),
    width=st.integers(1, 8192),
    row_bytes=st.integers(1, 2**22),
    multiple=st.integers(1, 16),
    processors=st.integers(1, 200),
)
def test_a_chunk_is_whole_blocks_within_the_memory(
    num_rows: int, width: int, row_bytes: int, multiple: int, processors: int
) -> None:
    chunk = rows_per_chunk(num_rows, width, row_bytes, multiple, processors)
    assert chunk >= multiple
    assert chunk % multiple == 0
    assert chunk == multiple or chunk * row_bytes <= LOGITS_BYTES
