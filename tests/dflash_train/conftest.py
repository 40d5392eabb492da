import sys
from pathlib import Path

# The tests share builders of tiny models and rows in `tiny.py`, beside them.
sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of the `tiny` target, prepared."""
    pytest.importorskip("transformers")
    from runs import make_data

    return make_data(tmp_path_factory.mktemp("tiny") / "data")
