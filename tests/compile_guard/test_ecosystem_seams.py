"""Seams in other libraries: put in when the program imports them, never imported for it, taken out again."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from compile_guard import ecosystem_seams
from compile_guard.ecosystem_seams import EcosystemSeam
from compile_guard.install import failed_seams
from compile_guard.patching import Patches
from compile_guard.tracing import TRACE_LOCK
from tests.compile_guard.test_install import said
from tests.threads import Puppet

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ModuleType]]:
    """A library on the path that nobody has imported, waited for by a seam; the modules that the seam was given."""
    given: list[ModuleType] = []

    def put_in(patches: Patches, module: ModuleType) -> None:
        given.append(module)
        patches.set_attribute(module, "answer", lambda: "guarded")

    (tmp_path / "waited_for.py").write_text("def answer():\n    return 'bare'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seam = EcosystemSeam("waiting", "to be tested", "waited_for", put_in)
    monkeypatch.setattr(ecosystem_seams, "ECOSYSTEM_SEAMS", (seam,))
    yield given
    sys.modules.pop("waited_for", None)


def test_a_seam_goes_in_after_the_import_and_comes_out_with_the_guard(clean: None, library: list[ModuleType]) -> None:
    import compile_guard

    finders = list(sys.meta_path)
    compile_guard.install(mode="record")
    assert library == []
    assert "waited_for" not in sys.modules
    module = importlib.import_module("waited_for")
    assert library == [module]
    assert module.answer() == "guarded"
    assert "_ThenPutIn" not in repr(module.__loader__)
    assert module.__spec__ is not None
    assert module.__spec__.loader is module.__loader__
    compile_guard.uninstall()
    assert module.answer() == "bare"
    assert sys.meta_path == finders


def test_what_is_imported_already_has_its_seam_at_once(clean: None, library: list[ModuleType]) -> None:
    import compile_guard

    module = importlib.import_module("waited_for")
    compile_guard.install(mode="record")
    assert library == [module]
    assert module.answer() == "guarded"


def test_a_seam_that_does_not_fit_leaves_the_import_alone(clean: None, library: list[ModuleType], tmp_path: Path) -> None:
    import compile_guard

    (tmp_path / "waited_for.py").write_text("import not_to_be_found\n")
    compile_guard.install(mode="record")
    with pytest.raises(ModuleNotFoundError, match="not_to_be_found"):
        importlib.import_module("waited_for")
    assert library == []
    (tmp_path / "waited_for.py").write_text("value = 1\n")
    importlib.invalidate_caches()
    assert importlib.import_module("waited_for").value == 1
    assert failed_seams() == {}  # the attribute that it sets need not have been there


def test_install_imports_none_of_them() -> None:
    program = """
import sys, compile_guard
before = set(sys.modules)
compile_guard.install()
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("transformers", "accelerate")))
"""
    assert said(program) == "[]"


@needs_transformers
def test_a_model_is_built_under_the_lock_and_in_its_own_dtype(guard: Any, puppet: Callable[[], Puppet]) -> None:
    from transformers import modeling_utils

    first, second = puppet(), puppet()
    block = modeling_utils.local_torch_dtype(torch.bfloat16)
    first.do(block.__enter__)
    assert first.do(TRACE_LOCK.owned)
    begun = threading.Event()

    def build() -> torch.dtype:
        begun.set()
        with modeling_utils.local_torch_dtype(torch.float16):
            return torch.get_default_dtype()

    waiting = second.start(build)
    assert begun.wait(10)
    assert first.do(torch.get_default_dtype) == torch.bfloat16
    first.do(block.__exit__, None, None, None)
    assert waiting.result() == torch.float16
    assert torch.get_default_dtype() == torch.float32
    assert TRACE_LOCK.owner is None


@needs_transformers
def test_untied_is_untied_for_the_loading_thread_alone(guard: Any, puppet: Callable[[], Puppet]) -> None:
    from transformers import PreTrainedModel, initialization

    class Model(PreTrainedModel):  # type: ignore[misc, no-untyped-call]
        def __init__(self) -> None:
            pass

    original = PreTrainedModel.tie_weights
    with initialization.no_tie_weights():
        assert PreTrainedModel.tie_weights is not original
        assert Model().tie_weights() is None  # suppressed here
        # Elsewhere the real one runs, and fails on this empty model.
        with pytest.raises(AttributeError):
            puppet().do(lambda: Model().tie_weights())
    assert PreTrainedModel.tie_weights is original


@needs_transformers
def test_an_error_inside_the_block_gives_the_lock_back(guard: Any) -> None:
    from transformers import modeling_utils

    with pytest.raises(ZeroDivisionError), modeling_utils.local_torch_dtype(torch.bfloat16):
        raise ZeroDivisionError
    assert TRACE_LOCK.owner is None
    assert torch.get_default_dtype() == torch.float32


@needs_transformers
def test_flex_attention_of_transformers_is_right_and_compiled_once(guard: Any) -> None:
    from transformers.integrations import flex_attention as integration

    query, key, value = (torch.randn(1, 2, 128, 16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    made = set()
    with torch.no_grad():
        for training in (True, False, True):
            found = integration.compile_friendly_flex_attention(query, key, value, training=training)
            assert torch.allclose(found, expected, atol=1e-5)
            made.add(id(integration.WrappedFlexAttention(training)()))
    assert len(made) == 1
    guard.uninstall()
    wrapper = integration.WrappedFlexAttention
    assert wrapper(True)() is not wrapper(False)()  # its own way again, with nothing of ours left in it


class Tuner:
    """What Triton's tuner keeps in itself."""


def test_an_attribute_of_each_thread(puppet: Callable[[], Puppet]) -> None:
    seen: list[int] = []
    other = puppet()
    Tuner.nargs = ecosystem_seams._of_thread("nargs", seen.append)  # type: ignore[attr-defined]
    try:
        tuner: Any = Tuner()
        tuner.nargs = {"x": 1}
        other.do(setattr, tuner, "nargs", {"x": 2})
        assert tuner.nargs == {"x": 1}
        assert seen == [threading.get_ident()]
        other.do(setattr, tuner, "nargs", None)
        assert (tuner.nargs, other.do(getattr, tuner, "nargs")) == ({"x": 1}, None)
        tuner.nargs = {"x": 3}  # nobody else has one now
        assert len(seen) == 1
    finally:
        del Tuner.nargs  # type: ignore[attr-defined]
