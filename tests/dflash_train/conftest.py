import sys
from pathlib import Path

import pytest

# The tests share builders of tiny models and rows in `tiny.py` and runs in `runs.py`, beside them.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of the `tiny` target, prepared."""
    pytest.importorskip("transformers")
    from runs import make_data

    return make_data(tmp_path_factory.mktemp("tiny") / "data")
